"""Draws the fits of all engines against the measurements, as a PNG file."""

from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from treadle_cli.fit import DPI, draw_requests, draw_steps

from treadle_bench.fit.profiles import SHIPPED_ENGINE, Check, FitReport
from treadle_bench.fit.serving import ServingFit

COLUMNS = 8  # two models of four degrees a row
PANEL_INCHES = (1.9, 1.75)
TITLE_CHARACTERS = 45


def draw(report: FitReport, path: Path) -> None:
    """Requests predicted against measured, then a panel for each decode curve that was fitted to
    measurements."""
    curves = [
        fitted
        for fitted in report.engines
        if fitted.points and fitted.engine in (SHIPPED_ENGINE, "splitwise")
    ]
    rows = -(-len(curves) // COLUMNS)
    figure = Figure((PANEL_INCHES[0] * COLUMNS, PANEL_INCHES[1] * (rows + 2)), layout="constrained")
    grid = figure.add_gridspec(rows + 2, COLUMNS)
    scatters: list[ServingFit | Check] = [*report.served, *report.checks]
    width = COLUMNS // len(scatters)
    for index, scatter in enumerate(scatters):
        axes = figure.add_subplot(grid[0:2, index * width : (index + 1) * width])
        _scatter(axes, scatter)
    for index, fitted in enumerate(curves):
        axes = figure.add_subplot(grid[2 + index // COLUMNS, index % COLUMNS])
        draw_steps(axes, fitted.points, fitted.profile.curve)
        profile, error = fitted.profile, fitted.decode_error
        share = f"  {error.held_out_p90:.0%}" if error else ""
        axes.set_title(f"{profile.llm} {profile.accelerator} x{profile.gpus}{share}", fontsize=7)
    figure.suptitle(
        "Lines: the fit; points: measured. Small panels: ms of a decode step by batch, a line for "
        "each context length "
        "(dark 256, light 32K tokens); the share is the held-out 90th percentile of the error",
        fontsize=9,
    )
    figure.savefig(path, dpi=DPI)


def _scatter(axes: Axes, fit: ServingFit | Check) -> None:
    if isinstance(fit, ServingFit):
        pairs = [
            (row.request_s, own_s, row.gpus)
            for row, own_s in zip(fit.rows, fit.predicted_s, strict=True)
        ]
        error = (
            f"off {fit.unseen_gpus.median:.1%}, degree unseen {fit.unseen_gpus.held_out_median:.1%}"
        )
        title = (
            f"{fit.engine}, {fit.llm} on {fit.accelerator},\nseconds of a request: "
            f"{len(pairs)} rows\n{error}"
        )
    else:
        pairs = list(fit.pairs)
        label = "\n".join(wrap(fit.label, TITLE_CHARACTERS))
        title = f"{label}:\noff {fit.median:.1%}, {fit.rows} rows, none seen"
    measured, predicted, gpus = np.array(pairs).T
    draw_requests(axes, measured, predicted, gpus.astype(int))
    axes.set_title(title, fontsize=8)
