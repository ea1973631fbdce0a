"""Explanation of a trajectory, and how it is printed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from treadle_core.model import LEDGER_PARTS, Ledger
from treadle_core.state import Decision

MEANINGS = {
    "held_s": "a step waited in the scheduler for room or an engine",
    "queue_s": "a step waited at its engine before it first ran",
    "prefill_s": "an engine read the context",
    "decode_s": "an engine sampled tokens",
    "preempted_s": "a step was evicted until it ran again",
    "move_s": "a step waited until its KV had moved",
    "tool_s": "a tool ran between two steps",
    "weights_s": "a step waited as engines loaded weights",
    "control_s": "calls, the bus, and the client's own work",
}
SIMULATED = (
    "Simulated (docs/simulator.md): the recorded steps and tools of the rollout, all "
    "trajectories begun at once."
)
LEAST_SHOWN_S = 5e-4


@dataclass(frozen=True, slots=True)
class Fate:
    """The seconds from the start of the rollout to the end of the trajectory, and of the rollout,
    under a policy."""

    policy: str
    title: str
    trajectory_s: float
    rollout_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Account of the time of one trajectory, with reasons.

    about: one line that names the trajectory. left: names the time that the ledger does not have.
    recorded: the time as it was; None where all of it is simulated. notes: what a reader must know.
    """

    trajectory_id: str
    about: str
    ledger: Ledger
    wall_s: float
    left: str
    decisions: Sequence[Decision]
    opened_s: float  # time on the clock of the decisions
    recorded: Fate | None
    policies: Sequence[Fate]
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {
            "trajectory_id": self.trajectory_id,
            "about": self.about,
            "wall_s": self.wall_s,
            "ledger": asdict(self.ledger),
            "left_s": self.wall_s - self.ledger.total_s,
            "left": self.left,
            "decisions": [
                {
                    "at_s": each.now_s - self.opened_s,
                    **{name: getattr(each, name) for name in _DECISION},
                }
                for each in self.decisions
            ],
            "recorded": asdict(self.recorded) if self.recorded is not None else None,
            "simulated": [asdict(fate) for fate in self.policies],
            "notes": list(self.notes),
        }

    def print(self, out: Console) -> None:
        """Print the explanation to a terminal."""
        out.print(
            f"{self.trajectory_id}: {self.about}", style="bold", highlight=False, markup=False
        )
        out.print()
        out.print(self._ledger_table())
        if self.decisions:
            out.print()
            out.print(self._decision_table())
        if self.policies:
            out.print()
            out.print(self._policy_table())
        for note in (*([SIMULATED] if self.policies else []), *self.notes):
            out.print(note, style="dim", highlight=False, markup=False)

    def _ledger_table(self) -> Table:
        table = _table("part", "seconds", "share", "")
        for name in LEDGER_PARTS:
            spent_s = getattr(self.ledger, name)
            table.add_row(name.removesuffix("_s"), *self._share(spent_s), MEANINGS[name])
        left_s = self.wall_s - self.ledger.total_s
        if abs(left_s) >= LEAST_SHOWN_S:
            table.add_row("", *self._share(left_s), self.left)
        table.add_row("all", *self._share(self.wall_s), "", style="bold")
        return table

    def _share(self, spent_s: float) -> tuple[str, str]:
        return f"{spent_s:.3f}", f"{spent_s / self.wall_s:.1%}" if self.wall_s else ""

    def _decision_table(self) -> Table:
        table = _table("at", "decision", "engine", "")
        for each in self.decisions:
            table.add_row(
                f"{each.now_s - self.opened_s:.3f}", each.kind, each.engine_id, each.reason
            )
        return table

    def _policy_table(self) -> Table:
        table = _table("policy", "this one ends", "the rollout ends", "")
        for fate in (*([self.recorded] if self.recorded is not None else []), *self.policies):
            table.add_row(
                fate.policy, f"{fate.trajectory_s:.2f} s", f"{fate.rollout_s:.2f} s", fate.title
            )
        return table


_DECISION = ("kind", "engine_id", "reason")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        numeric = name in ("seconds", "share", "at", "this one ends", "the rollout ends")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric)
    return table
