"""The end of a run in the terminal: the comparison, where the time went, and where the report lies."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from treadle_cli.records import Run
from treadle_cli.report.accounting import ArmFigures
from treadle_cli.report.comparison import Row, headline, losses, rows, time_rows

_VERDICT_STYLE = {"better": "green", "worse": "red", "even": "dim"}


def print_report(console: Console, run: Run, figures: Sequence[ArmFigures], folder: Path) -> None:
    """Prints the tables; paths come last, because that is where a reader looks."""
    titles = [arm.title for arm in run.record.arms]
    console.print()
    console.print(_table("The arms compared", rows(figures), titles))
    console.print(_table("Where the time went (all trajectories)", time_rows(figures), titles))
    for arm in run.record.arms:
        for loss in arm.engine_losses:
            console.print(f"[yellow]{arm.title}: {loss}[/yellow]")
    console.print(f"[bold]{headline(figures, titles)}[/bold] One run is an anecdote.")
    lost = losses(figures)
    if lost:
        console.print(f"{titles[-1]} did worse in: {'; '.join(lost)}.", style="dim", highlight=False)
    console.print(
        f"Report: {folder / 'report.html'} (and report.png, trajectories.jsonl, summary.json)", soft_wrap=True
    )


def _table(title: str, table_rows: Sequence[Row], titles: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for arm in titles:
        table.add_column(arm, justify="right")
    table.add_column("change", justify="right")
    for row in table_rows:
        style = _VERDICT_STYLE[row.verdict()]
        table.add_row(row.label, *[row.shown(value) for value in row.values], f"[{style}]{row.change()}[/{style}]")
    return table
