"""Print and write a simulation: sentences, tables, summary.json and trajectories.jsonl.

trajectories.jsonl holds columns, not rows: its first line is the workload's, then a line for each
system and seed, all in the order of the workload. 6,400 trajectories of nine systems are about 3
MB.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from treadle_sim.systems import ORACLE, TREADLE, Run
from treadle_sim.workloads.workload import groups

from treadle_cli.simulate.comparison import Bound, Comparison, Row
from treadle_cli.simulate.request import SimulationPlan

SUMMARY, TRAJECTORIES, PICTURE, PAGE = (
    "summary.json",
    "trajectories.jsonl",
    "simulate.png",
    "simulate.html",
)
SECONDS = ("finished_s", "queue_s", "prefill_s", "decode_s", "tool_s")
COUNTS = ("prefilled_tokens", "preemptions", "migrations")
NOTHING = "–"
SAME = 0.01  # a difference below this share is none
MOSTLY = 0.5  # share of the longest trajectory's time, from which its tools bound the workload
CLOSE = 1.1  # two bounds nearer than this factor both hold
FAR = 0.25  # from what was recorded: a simulation that differs more is of other engines


@dataclass(frozen=True, slots=True)
class Sentences:
    """Sentences that compare the systems. step: what a logged step would have taken; bound: what no
    schedule beats; verdict: how Treadle does; losses: where it is worse."""

    bound: str
    verdict: str
    losses: tuple[str, ...]
    notes: tuple[str, ...]
    step: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        lost = [f"Where treadle loses: {'; '.join(self.losses)}."] if self.losses else []
        return [line for line in (*self.step, self.bound, self.verdict, *lost, *self.notes) if line]


def describe(plan: SimulationPlan, comparison: Comparison) -> Sentences:
    treadle = comparison.row(TREADLE.name)
    return Sentences(
        bound=_bound_sentence(comparison.bound, plan.settings[0].gpus),
        verdict=_verdict(comparison, treadle) if treadle else "",
        losses=_losses(comparison, treadle) if treadle else (),
        notes=_notes(plan, comparison),
        step=_step_sentences(plan, comparison),
    )


def _step_sentences(plan: SimulationPlan, comparison: Comparison) -> tuple[str, ...]:
    """Return what Treadle would have won on a logged step, and how far the simulation is from what
    was recorded."""
    step = summarize_step(plan, comparison)
    if step is None:
        return ()
    bound_s, treadle_s, way_s = step["bound_s"], step["treadle_s"], step["baseline_s"]
    told = [
        f"On {step['log']} {step['baseline']} takes {way_s:.1f} s and Treadle {treadle_s:.1f} s, "
        "that is "
        f"{way_s / treadle_s:.2f} times as fast; no schedule takes less than {bound_s:.1f} s."
    ]
    for each in step["recorded"]:
        if each["simulated_s"] is None:
            told.append(f"By the log, {each['name']} took {each['recorded_s']:.1f} s.")
            continue
        off = each["simulated_s"] / each["recorded_s"] - 1.0
        told.append(
            f"By the log, {each['name']} took {each['recorded_s']:.1f} s; simulated, it takes "
            f"{each['simulated_s']:.1f} s ({off:+.0%})."
            + (" So far off, the simulated engines are not yours." if abs(off) > FAR else "")
        )
    return tuple(told)


def summarize_step(plan: SimulationPlan, comparison: Comparison) -> dict[str, Any] | None:
    """Return the key `step` of the JSON object: the logged step as it was run and with Treadle, in
    seconds; None for another workload."""
    log = plan.log
    treadle = comparison.row(TREADLE.name)
    way = comparison.row(log.way or comparison.best_baseline) if log else None
    if log is None or treadle is None or way is None:
        return None
    rows = {row.system.name: row.median.makespan_s for row in comparison.rows}
    return {
        "log": log.name,
        "baseline": way.system.name,
        "baseline_s": way.median.makespan_s,
        "treadle_s": treadle.median.makespan_s,
        "ratio": way.median.makespan_s / treadle.median.makespan_s,
        "bound_s": comparison.bound.lower_s,
        "recorded": [
            {"name": each.name, "recorded_s": each.makespan_s, "simulated_s": rows.get(each.system)}
            for each in log.recorded
        ],
        "assumptions": list(_assumptions(plan)),
    }


def _assumptions(plan: SimulationPlan) -> tuple[str, ...]:
    if plan.log is None:
        return ()
    engines: tuple[str, ...] = ()
    if plan.log.model is None:
        model, gpus = plan.settings[0].models[0], plan.settings[0].gpus
        engines = (
            f"Engines are {model.llm} on {gpus} {model.accelerator}: give yours with --llm, "
            "--accelerator, --gpus and --slots, or with a measured --profile.",
        )
    always = (
        "All trajectories are there at once, and end at the lengths that were logged, "
        "whoever schedules them."
    )
    return (*plan.log.assumptions, *engines, always)


def _bound_sentence(bound: Bound, gpus: int) -> str:
    engine = f"{bound.longest_gpus} GPU{'s' if bound.longest_gpus > 1 else ''}"
    tools = (
        f", {bound.longest_tools_s:.1f} s of them in tools" if bound.longest_tools_s >= 0.05 else ""
    )
    longest = (
        f"the longest trajectory, alone on {engine}, takes {bound.longest_alone_s:.1f} s{tools}"
    )
    work = f"all work, spread over {gpus} GPUs that never idle, takes {bound.work_s:.1f} s"
    if bound.longest_alone_s > bound.work_s * CLOSE:
        first, second = longest, work
        by_tools = bound.longest_tools_s > MOSTLY * bound.longest_alone_s
        so = (
            "The tools of its longest trajectory bound it."
            if by_tools
            else "Its longest trajectory bounds it."
        )
    elif bound.work_s > bound.longest_alone_s * CLOSE:
        first, second, so = work, longest, "The amount of work bounds it, not its tail."
    else:
        first, second, so = (
            longest,
            work,
            "Its longest trajectory and the amount of work bound it about equally.",
        )
    return f"No schedule ends this workload before {bound.lower_s:.1f} s: {first}; {second}. {so}"


def _verdict(comparison: Comparison, treadle: Row) -> str:
    parts = []
    best = comparison.row(comparison.best_baseline)
    if best:
        parts.append(
            f"is {treadle.ratios['best_baseline']:.2f} times as fast as the best baseline, "
            f"{best.system.name} ({best.median.makespan_s:.1f} s on {best.engines})"
        )
    if to_oracle := treadle.ratios["oracle"]:
        parts.append(f"takes {_longer(to_oracle)} if it knew every length ({ORACLE.name})")
    parts.append(f"takes {_longer(treadle.ratios['bound'] or 0.0)} the bound")
    return f"Treadle {', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]}."


def _longer(ratio: float) -> str:
    """Return words as in "12% longer than"; ratio: of the other's seconds over the own."""
    change = 1.0 / ratio - 1.0
    if abs(change) < SAME / 2:
        return "as long as"
    return f"{abs(change):.0%} {'longer' if change > 0 else 'less'} than"


def _losses(comparison: Comparison, treadle: Row) -> tuple[str, ...]:
    """Return where Treadle is worse than any system but the oracle."""
    others = [row for row in comparison.rows if row.system.name not in (TREADLE.name, ORACLE.name)]
    own = treadle.median
    found = []
    faster = [row for row in others if row.median.makespan_s < own.makespan_s * (1.0 - SAME)]
    if faster:
        named = ", ".join(f"{row.system.name} ({row.median.makespan_s:.1f} s)" for row in faster)
        found.append(
            f"{named} end{'s' if len(faster) == 1 else ''} earlier than its {own.makespan_s:.1f} s"
        )
    for what, name in (("half of", "half_ended_s"), ("90% of", "most_ended_s")):
        first = min(others, key=lambda row: getattr(row.median, name), default=None)
        if first and getattr(first.median, name) < getattr(own, name) * (1.0 - SAME):
            found.append(
                f"{what} the trajectories have ended after {getattr(first.median, name):.1f} s "
                f"with {first.system.name}, after {getattr(own, name):.1f} s with treadle"
            )
    least = min(others, key=lambda row: row.median.recomputed_tokens, default=None)
    if (
        least
        and least.median.recomputed_tokens < own.recomputed_tokens - SAME * own.prefilled_tokens
    ):
        found.append(
            f"it prefills {own.recomputed_tokens:,.0f} tokens more than once, {least.system.name} "
            f"{least.median.recomputed_tokens:,.0f}"
        )
    return tuple(found)


def _notes(plan: SimulationPlan, comparison: Comparison) -> tuple[str, ...]:
    notes = [f"Assumed: {each}" for each in _assumptions(plan)]
    cut = sum(work.censored for work in plan.settings[0].workload.trajectories)
    if plan.from_file and cut:
        count = len(plan.settings[0].workload.trajectories)
        notes.append(
            f"{cut} of the {count} trajectories were cut off by a limit, and run as if that were "
            "their end."
        )
    if len(plan.settings) == 1:
        notes.append("One seed; --repeats shows how much another one changes.")
    else:
        spread = max(max(row.makespans_s) / min(row.makespans_s) - 1.0 for row in comparison.rows)
        notes.append(
            f"Medians of {len(plan.settings)} seeds, whose makespans lie up to {spread:.0%} apart."
        )
    notes.append(
        "All of this is simulated: docs/simulator.md states every assumption. The engine's curve "
        f"is {plan.origin} (sim/README.md)."
    )
    return tuple(notes)


def make_document(
    plan: SimulationPlan, comparison: Comparison, sentences: Sentences, folder: Path
) -> dict[str, Any]:
    """Return the JSON object that --json prints and summary.json holds."""
    setting = plan.settings[0]
    works = setting.workload.trajectories
    return {
        "workload": plan.workload,
        "trajectories": len(works),
        "prompts": len(groups(works)),
        "gen_tokens": setting.workload.gen_tokens,
        "llm": setting.models[0].llm,
        "accelerator": setting.models[0].accelerator,
        "curve": plan.origin,
        "gpus": setting.gpus,
        "slots_per_gpu": setting.models[0].slots // setting.models[0].gpus,
        "degree": plan.degree or None,
        "predictor": setting.predictor,
        "seeds": [each.seed for each in plan.settings],
        **comparison.as_json(),
        "step": summarize_step(plan, comparison),
        "told": sentences.lines(),
        "losses": list(sentences.losses),
        "folder": str(folder),
    }


def write_trajectories(plan: SimulationPlan, runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Write the columns of the workload and of each run."""
    works = plan.settings[0].workload.trajectories
    lines: list[dict[str, Any]] = [
        {
            "workload": plan.workload,
            "seed": plan.settings[0].seed,
            "prompt_id": [work.prompt_id for work in works],
            "sample": [work.sample for work in works],
            "gen_tokens": [work.gen_tokens for work in works],
        }
    ]
    for name, of_system in runs.items():
        for setting, run in zip(plan.settings, of_system, strict=True):
            seconds = {
                what: [round(getattr(each, what), 3) for each in run.outcome.times]
                for what in SECONDS
            }
            counts = {what: [getattr(each, what) for each in run.outcome.times] for what in COUNTS}
            lines.append({"system": name, "seed": setting.seed, **seconds, **counts})
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def heading(plan: SimulationPlan) -> str:
    """Return what was simulated, on one line."""
    setting = plan.settings[0]
    works = setting.workload.trajectories
    prompts, model = len(groups(works)), setting.models[0]
    return (
        f"{plan.workload}: {len(works):,} trajectories of {prompts:,} prompts, "
        f"{setting.workload.gen_tokens:,} tokens; {model.llm} on {setting.gpus} "
        f"{model.accelerator}, predictor {setting.predictor}, seed {setting.seed}"
    )


def _seconds(row: Row) -> str:
    shown = f"{row.median.makespan_s:.1f} s"
    if len(row.makespans_s) > 1:
        shown += f"\n{min(row.makespans_s):.0f}–{max(row.makespans_s):.0f}"
    return shown


def _ratio(row: Row, to: str) -> str:
    ratio = row.ratios[to]
    return NOTHING if ratio is None else f"{ratio:.2f}"


# Columns of each table: heading and cell.
HOW_LONG: Mapping[str, Callable[[Row], str]] = {
    "system": lambda row: row.system.name,
    "engines": lambda row: row.engines,
    "makespan": _seconds,
    "best\nbaseline": partial(_ratio, to="best_baseline"),
    "\nverl": partial(_ratio, to="verl"),
    "\noracle": partial(_ratio, to="oracle"),
    "the\nbound": partial(_ratio, to="bound"),
}
MEANWHILE: Mapping[str, Callable[[Row], str]] = {
    "system": lambda row: row.system.name,
    "tokens/s": lambda row: f"{row.median.tokens_per_s:,.0f}",
    "half\nended": lambda row: f"{row.median.half_ended_s:.1f} s",
    "90%\nended": lambda row: f"{row.median.most_ended_s:.1f} s",
    "longest\n10% in\nqueue": lambda row: f"{row.median.queue_share_longest:.0%}",
    "migra-\ntions": lambda row: f"{row.median.migrations:,.0f}",
    "preemp-\ntions": lambda row: f"{row.median.preemptions:,.0f}",
    "prefilled\nagain": lambda row: f"{row.median.recomputed_tokens / 1000:,.0f}K",
}


def text_tables(comparison: Comparison) -> list[list[list[str]]]:
    """Return both tables as text, their headings first."""
    return [
        [
            [name.replace("-\n", "").replace("\n", " ").strip() for name in columns],
            *([cell(row) for cell in columns.values()] for row in comparison.rows),
        ]
        for columns in (HOW_LONG, MEANWHILE)
    ]


def print_comparison(
    console: Console,
    plan: SimulationPlan,
    comparison: Comparison,
    sentences: Sentences,
    folder: Path,
) -> None:
    """Print the comparison; paths come last, because that is where a reader looks."""
    show = partial(console.print, highlight=False, markup=False)
    show(heading(plan), style="bold")
    show()
    show(_terminal_table(HOW_LONG, comparison))
    show("Times as fast as: another's makespan over the system's own.", style="dim")
    show()
    show(_terminal_table(MEANWHILE, comparison))
    show()
    for line in sentences.lines():
        show(line)
    show(f"Picture: {folder / PICTURE} (and {PAGE}, {SUMMARY}, {TRAJECTORIES})", soft_wrap=True)


def _terminal_table(columns: Mapping[str, Callable[[Row], str]], comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        left = name in ("system", "engines")
        table.add_column(
            name, justify="left" if left else "right", vertical="top", no_wrap=left, overflow="fold"
        )
    for row in comparison.rows:
        name = row.system.name
        style = (
            "bold" if name == TREADLE.name else "green" if name == comparison.best_baseline else ""
        )
        table.add_row(*(cell(row) for cell in columns.values()), style=style)
    return table
