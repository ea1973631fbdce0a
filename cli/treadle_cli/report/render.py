"""Draws all faces of a run from its folder: what `treadle demo` does at the end and `treadle trace` does again."""

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from treadle_cli.report.accounting import arm_figures
from treadle_cli.report.comparison import print_report
from treadle_cli.report.page import write_page
from treadle_cli.report.picture import draw_picture
from treadle_cli.report.records import read_run, write_summary


def render(folder: Path, console: Console) -> None:
    """Read the run in `folder`, write report.html and report.png there, and print the tables. Raises RecordError."""
    run = read_run(folder)
    figures = [arm_figures(arm, run.of_arm(arm.arm)) for arm in run.record.arms]
    write_summary(folder, run.record, [asdict(figure) for figure in figures])
    write_page(run, figures, folder / "report.html")
    draw_picture(run, figures, folder / "report.png")
    print_report(console, run, figures, folder)
