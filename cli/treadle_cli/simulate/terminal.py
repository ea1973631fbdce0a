"""The comparison in the terminal: how long each system takes, what it does meanwhile, and the sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from treadle_sim.systems import TREADLE

from treadle_cli.simulate.comparison import Comparison, Row
from treadle_cli.simulate.request import SimulationPlan
from treadle_cli.simulate.sentences import Told

NOTHING = "–"


def heading(plan: SimulationPlan) -> str:
    """What was simulated, on one line."""
    setting = plan.settings[0]
    works = setting.workload.trajectories
    prompts = len({work.prompt_id for work in works})
    return (
        f"{plan.workload}: {len(works):,} trajectories of {prompts:,} prompts, {setting.workload.gen_tokens:,} tokens; "
        f"{plan.llm} on {setting.gpus} {plan.accelerator}, predictor {setting.predictor}, seed {plan.seed}"
    )


def print_comparison(console: Console, plan: SimulationPlan, comparison: Comparison, told: Told, folder: Path) -> None:
    """Paths come last, because that is where a reader looks."""
    console.print(heading(plan), style="bold", highlight=False)
    console.print()
    console.print(_table(LONG, [_long(row) for row in comparison.rows], comparison))
    console.print("Times as fast as: another's makespan over the system's own.", style="dim", highlight=False)
    console.print()
    console.print(_table(MEANWHILE, [_meanwhile(row) for row in comparison.rows], comparison))
    console.print()
    for line in told.lines():
        console.print(line, highlight=False, markup=False)
    console.print(
        f"Picture: {folder / 'simulate.png'} (and simulate.html, summary.json, trajectories.jsonl)",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def tables(comparison: Comparison) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Both tables as text, their headings first."""
    return (
        [tuple(map(_flat, LONG)), *(_long(row) for row in comparison.rows)],
        [tuple(map(_flat, MEANWHILE)), *(_meanwhile(row) for row in comparison.rows)],
    )


def _flat(heading_cell: str) -> str:
    return heading_cell.replace("-\n", "").replace("\n", " ").strip()


LONG = ("system", "engines", "makespan", "best\nbaseline", "\nverl", "\noracle", "the\nbound")
MEANWHILE = (
    "system",
    "tokens/s",
    "half\nended",
    "90%\nended",
    "longest\n10% in\nqueue",
    "migra-\ntions",
    "preemp-\ntions",
    "prefilled\nagain",
)


def _long(row: Row) -> tuple[str, ...]:
    ratios = (row.to_best_baseline, row.to_verl, row.to_oracle, row.to_bound)
    seconds = f"{row.median.makespan_s:.1f} s"
    if len(row.makespans_s) > 1:
        seconds += f"\n{min(row.makespans_s):.0f}–{max(row.makespans_s):.0f}"
    return (row.system.name, row.engines, seconds, *(NOTHING if each is None else f"{each:.2f}" for each in ratios))


def _meanwhile(row: Row) -> tuple[str, ...]:
    own = row.median
    return (
        row.system.name,
        f"{own.tokens_per_s:,.0f}",
        f"{own.half_ended_s:.1f} s",
        f"{own.most_ended_s:.1f} s",
        f"{own.queue_share_longest:.0%}",
        f"{own.migrations:,.0f}",
        f"{own.preemptions:,.0f}",
        f"{own.recomputed_tokens / 1000:,.0f}K",
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        left = column in ("system", "engines")
        table.add_column(column, justify="left" if left else "right", vertical="top", no_wrap=left, overflow="fold")
    for row, cells in zip(comparison.rows, rows, strict=True):
        name = row.system.name
        table.add_row(
            *cells, style="bold" if name == TREADLE.name else "green" if name == comparison.best_baseline else ""
        )
    return table
