"""The comparison in plain sentences: what bounds the workload, how far each system comes, where Treadle loses."""

from __future__ import annotations

from dataclasses import dataclass

from treadle_sim.systems import ORACLE, TREADLE

from treadle_cli.simulate.comparison import Bound, Comparison, Row
from treadle_cli.simulate.request import SimulationPlan

SAME = 0.01  # a difference below this share is none
MOSTLY = 0.5  # of the longest trajectory's time, from which its tools bound the workload
CLOSE = 1.1  # two bounds nearer than this factor both hold


@dataclass(frozen=True, slots=True)
class Told:
    """bound: what no schedule beats; verdict: how Treadle fares; losses: where it does not; notes: what to know."""

    bound: str
    verdict: str
    losses: tuple[str, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """In the order in which they are read."""
        lost = [f"Where treadle loses: {'; '.join(self.losses)}."] if self.losses else []
        return [line for line in (self.bound, self.verdict, *lost, *self.notes) if line]


def tell(plan: SimulationPlan, comparison: Comparison) -> Told:
    """All sentences."""
    treadle = comparison.row(TREADLE.name)
    return Told(
        bound=_bound(comparison.bound, plan.settings[0].gpus),
        verdict=_verdict(comparison, treadle) if treadle else "",
        losses=_losses(comparison, treadle) if treadle else (),
        notes=_notes(plan, comparison),
    )


def _bound(bound: Bound, gpus: int) -> str:
    engine = f"{bound.longest_gpus} GPU{'s' if bound.longest_gpus > 1 else ''}"
    tools = f", {bound.longest_tools_s:.1f} s of them in tools" if bound.longest_tools_s >= 0.05 else ""
    longest = f"the longest trajectory, alone on {engine}, takes {bound.longest_alone_s:.1f} s{tools}"
    work = f"all work, spread over {gpus} GPUs that never idle, takes {bound.work_s:.1f} s"
    if bound.longest_alone_s > bound.work_s * CLOSE:
        first, second = longest, work
        by_tools = bound.longest_tools_s > MOSTLY * bound.longest_alone_s
        so = "The tools of its longest trajectory bound it." if by_tools else "Its longest trajectory bounds it."
    elif bound.work_s > bound.longest_alone_s * CLOSE:
        first, second, so = work, longest, "The amount of work bounds it, not its tail."
    else:
        first, second, so = longest, work, "Its longest trajectory and the amount of work bound it about equally."
    return f"No schedule ends this workload before {bound.lower_s:.1f} s: {first}; {second}. {so}"


def _verdict(comparison: Comparison, treadle: Row) -> str:
    parts = []
    best = comparison.row(comparison.best_baseline)
    if best and treadle.to_best_baseline is not None:
        parts.append(
            f"is {treadle.to_best_baseline:.2f} times as fast as the best baseline, {best.system.name} "
            f"({best.median.makespan_s:.1f} s on {best.engines})"
        )
    if treadle.to_oracle is not None:
        parts.append(f"takes {_longer(treadle.to_oracle)} if it knew every length ({ORACLE.name})")
    parts.append(f"takes {_longer(treadle.to_bound)} the bound")
    return f"Treadle {', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]}."


def _longer(ratio: float) -> str:
    """ "12% longer than", of the other's seconds over one's own."""
    change = 1.0 / ratio - 1.0
    if abs(change) < SAME / 2:
        return "as long as"
    return f"{abs(change):.0%} {'longer' if change > 0 else 'less'} than"


def _losses(comparison: Comparison, treadle: Row) -> tuple[str, ...]:
    """Against every system but the one that knows all."""
    others = [row for row in comparison.rows if row.system.name not in (TREADLE.name, ORACLE.name)]
    own = treadle.median
    found = []
    faster = [row for row in others if row.median.makespan_s < own.makespan_s * (1.0 - SAME)]
    if faster:
        named = ", ".join(f"{row.system.name} ({row.median.makespan_s:.1f} s)" for row in faster)
        found.append(f"{named} end{'s' if len(faster) == 1 else ''} earlier than its {own.makespan_s:.1f} s")
    for what, name in (("half of", "half_ended_s"), ("90% of", "most_ended_s")):
        first = min(others, key=lambda row: getattr(row.median, name), default=None)
        if first and getattr(first.median, name) < getattr(own, name) * (1.0 - SAME):
            found.append(
                f"{what} the trajectories have ended after {getattr(first.median, name):.1f} s with "
                f"{first.system.name}, after {getattr(own, name):.1f} s with treadle"
            )
    least = min(others, key=lambda row: row.median.recomputed_tokens, default=None)
    if least and least.median.recomputed_tokens < own.recomputed_tokens - SAME * own.prefilled_tokens:
        found.append(
            f"it prefills {own.recomputed_tokens:,.0f} tokens more than once, {least.system.name} "
            f"{least.median.recomputed_tokens:,.0f}"
        )
    return tuple(found)


def _notes(plan: SimulationPlan, comparison: Comparison) -> tuple[str, ...]:
    notes = []
    cut = sum(work.censored for work in plan.settings[0].workload.trajectories)
    if plan.from_file and cut:
        count = len(plan.settings[0].workload.trajectories)
        notes.append(f"{cut} of the {count} trajectories were cut off by a limit, and run as if that were their end.")
    if len(plan.settings) == 1:
        notes.append("One seed; --repeats shows how much another one changes.")
    else:
        spread = max(max(row.makespans_s) / min(row.makespans_s) - 1.0 for row in comparison.rows)
        notes.append(f"Medians of {len(plan.settings)} seeds, whose makespans lie up to {spread:.0%} apart.")
    notes.append(
        f"All of this is simulated: docs/simulator.md states every assumption. The engine's curve is {plan.origin} "
        "(sim/README.md)."
    )
    return tuple(notes)
