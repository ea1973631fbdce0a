"""Draws all faces of a run from its folder: what `treadle demo` does at the end and `treadle trace` does again."""

from pathlib import Path

from rich.console import Console

from treadle_cli.report.accounting import arm_figures
from treadle_cli.report.comparison import print_report
from treadle_cli.report.page import write_page
from treadle_cli.report.picture import draw_picture
from treadle_cli.report.records import read_run, write_summary

PAGE_FILE = "report.html"
PICTURE_FILE = "report.png"


def render(folder: Path, console: Console) -> None:
    """Reads trajectories.jsonl and summary.json of `folder`, writes report.html and report.png there, prints the
    tables.

    Raises RecordError where the folder is not that of a finished run.
    """
    run = read_run(folder)
    figures = [arm_figures(arm, run.of_arm(arm.arm)) for arm in run.record.arms]
    write_summary(folder, run.record, [figure.as_json() for figure in figures])
    write_page(run, figures, folder / PAGE_FILE)
    draw_picture(run, figures, folder / PICTURE_FILE)
    print_report(console, run, figures, folder)
