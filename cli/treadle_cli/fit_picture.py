"""Draw a fitted curve against what was measured of the engine, as a PNG file."""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from treadle_sim.engine_model import StepCurve
from treadle_sim.fitting import DecodePoint, MeasuredEngine

DPI = 100
# least extent of the time axis around the points, so that noise of a per cent is no visible trend
LEAST_SPAN = 1.3
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
COLOURS = colormaps["viridis"]
CONTEXTS = LogNorm(256, 32_768)
DEGREE_COLOURS = {1: "#777777", 2: "#4477aa", 4: "#228833", 8: "#ee6677"}


def draw_measured(measured: MeasuredEngine, path: Path) -> None:
    """Draw decode steps and prefills of one live engine, with their fit."""
    figure = Figure((10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    curve = measured.engine.curve
    draw_steps(left, measured.decode, curve)
    left.set_title(f"{measured.engine.name}: ms of a decode step by batch", fontsize=9)
    figure.colorbar(
        ScalarMappable(CONTEXTS, COLOURS), ax=left, label="tokens of context a sequence"
    )
    if measured.prefill:
        seen = np.array([point.seconds for point in measured.prefill])
        predicted = np.array(
            [curve.prefill_s(point.new_tokens, point.cached_tokens) for point in measured.prefill]
        )
        draw_requests(right, seen * 1e3, predicted * 1e3)
    right.set_title("a prefill, ms", fontsize=9)
    figure.savefig(path, dpi=DPI)


def draw_requests(
    axes: Axes, measured: np.ndarray, predicted: np.ndarray, gpus: np.ndarray | None = None
) -> None:
    """Draw predicted times over measured ones, with the diagonal, a colour for each degree."""
    degrees = gpus if gpus is not None else np.ones(measured.size, dtype=int)
    for degree in np.unique(degrees):
        at = degrees == degree
        axes.plot(
            measured[at],
            predicted[at],
            "o",
            ms=3,
            color=DEGREE_COLOURS[int(degree)],
            label=f"x{degree}",
        )
    ends = [
        float(min(measured.min(), predicted.min())),
        float(max(measured.max(), predicted.max())),
    ]
    axes.plot(ends, ends, color="black", lw=0.8)
    axes.set_xlabel("measured", fontsize=8)
    axes.set_ylabel("predicted", fontsize=8)
    if gpus is not None:
        axes.legend(fontsize=7)
    if ends[1] > 2.0 * ends[0]:
        axes.loglog(base=2)
    _plain(axes)


def draw_steps(axes: Axes, points: tuple[DecodePoint, ...], curve: StepCurve) -> None:
    """Draw the steps of a curve over the batch and those measured, a line for each context."""
    for context in sorted({point.kv_tokens / point.batch for point in points}):
        colour = COLOURS(float(CONTEXTS(max(context, 1.0))))
        own = [point for point in points if point.kv_tokens / point.batch == context]
        batches, steps_s = np.array(sorted((point.batch, point.step_s) for point in own)).T
        axes.plot(batches, steps_s * 1e3, "o", ms=2.2, color=colour)
        sizes = np.geomspace(batches[0], batches[-1], 40)
        steps = [
            curve.decode_s(float(size)) + curve.per_kv_token_s * context * float(size)
            for size in sizes
        ]
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
