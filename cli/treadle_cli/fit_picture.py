"""Draws fitted curves against the measurements, as PNG files."""

from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from treadle_sim.engine_model import StepCurve
from treadle_sim.fitting.curves import DecodePoint, MeasuredEngine
from treadle_sim.fitting.fit import SHIPPED_ENGINE, Check, FitReport
from treadle_sim.fitting.serving import ServingFit

COLUMNS = 8  # two models of four degrees a row
PANEL_INCHES = (1.9, 1.75)
DPI = 100
TITLE_CHARACTERS = 45
LEAST_SPAN = 1.3  # of the time axis around the points, so that noise of a per cent does not look like a trend
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
COLOURS = colormaps["viridis"]
CONTEXTS = LogNorm(256, 32_768)
DEGREE_COLOURS = {1: "#777777", 2: "#4477aa", 4: "#228833", 8: "#ee6677"}


def draw_public(report: FitReport, path: Path) -> None:
    """Requests predicted against measured, then a panel for each decode curve that was fitted to measurements."""
    curves = [fitted for fitted in report.engines if fitted.points and fitted.engine in (SHIPPED_ENGINE, "splitwise")]
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
        _steps(axes, fitted.points, fitted.profile.curve)
        profile, error = fitted.profile, fitted.decode_error
        share = f"  {error.held_out_p90:.0%}" if error else ""
        axes.set_title(f"{profile.llm} {profile.accelerator} x{profile.gpus}{share}", fontsize=7)
    figure.suptitle(
        "Lines: the fit; points: measured. Small panels: ms of a decode step by batch, a line for each context length "
        "(dark 256, light 32K tokens); the share is the held-out 90th percentile of the error",
        fontsize=9,
    )
    figure.savefig(path, dpi=DPI)


def draw_measured(measured: MeasuredEngine, path: Path) -> None:
    """Decode steps and prefills of one live engine, with their fit."""
    figure = Figure((10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    curve = measured.engine.curve
    _steps(left, measured.decode, curve)
    left.set_title(f"{measured.engine.name}: ms of a decode step by batch", fontsize=9)
    figure.colorbar(ScalarMappable(CONTEXTS, COLOURS), ax=left, label="tokens of context a sequence")
    if measured.prefill:
        seen = np.array([point.seconds for point in measured.prefill])
        predicted = np.array([curve.prefill_s(point.new_tokens, point.cached_tokens) for point in measured.prefill])
        _diagonal(right, seen * 1e3, predicted * 1e3)
    right.set_title("a prefill, ms", fontsize=9)
    figure.savefig(path, dpi=DPI)


def _scatter(axes: Axes, fit: ServingFit | Check) -> None:
    if isinstance(fit, ServingFit):
        pairs = [(row.request_s, own_s, row.gpus) for row, own_s in zip(fit.rows, fit.predicted_s, strict=True)]
        error = f"off {fit.unseen_gpus.median:.1%}, degree unseen {fit.unseen_gpus.held_out_median:.1%}"
        title = f"{fit.engine}, {fit.llm} on {fit.accelerator},\nseconds of a request: {len(pairs)} rows\n{error}"
    else:
        pairs = list(fit.pairs)
        label = "\n".join(wrap(fit.label, TITLE_CHARACTERS))
        title = f"{label}:\noff {fit.median:.1%}, {fit.rows} rows, none seen"
    measured, predicted, gpus = np.array(pairs).T
    _diagonal(axes, measured, predicted, gpus.astype(int))
    axes.set_title(title, fontsize=8)


def _diagonal(axes: Axes, measured: np.ndarray, predicted: np.ndarray, gpus: np.ndarray | None = None) -> None:
    degrees = gpus if gpus is not None else np.ones(measured.size, dtype=int)
    for degree in np.unique(degrees):
        at = degrees == degree
        axes.plot(measured[at], predicted[at], "o", ms=3, color=DEGREE_COLOURS[int(degree)], label=f"x{degree}")
    ends = [float(min(measured.min(), predicted.min())), float(max(measured.max(), predicted.max()))]
    axes.plot(ends, ends, color="black", lw=0.8)
    axes.set_xlabel("measured", fontsize=8)
    axes.set_ylabel("predicted", fontsize=8)
    if gpus is not None:
        axes.legend(fontsize=7)
    if ends[1] > 2.0 * ends[0]:
        axes.loglog(base=2)
    _plain(axes)


def _steps(axes: Axes, points: tuple[DecodePoint, ...], curve: StepCurve) -> None:
    for context in sorted({point.kv_tokens / point.batch for point in points}):
        colour = COLOURS(float(CONTEXTS(max(context, 1.0))))
        own = [point for point in points if point.kv_tokens / point.batch == context]
        batches, steps_s = np.array(sorted((point.batch, point.step_s) for point in own)).T
        axes.plot(batches, steps_s * 1e3, "o", ms=2.2, color=colour)
        sizes = np.geomspace(batches[0], batches[-1], 40)
        steps = [curve.decode_s(float(size)) + curve.per_kv_token_s * context * float(size) for size in sizes]
        axes.plot(sizes, np.array(steps) * 1e3, color=colour, lw=0.8)
    axes.loglog(base=2)
    times = [point.step_s * 1e3 for point in points]
    axes.set_ylim(min(times) / LEAST_SPAN, max(times) * LEAST_SPAN)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    _plain(axes)


def _plain(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PLAIN)
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=6)
