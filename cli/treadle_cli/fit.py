"""Run `treadle fit`: fit an engine's curve to a profile that was measured on a live engine.

The fitting is `treadle_sim.fitting`; the words are a template, fit_profile.md.j2.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from rich.markdown import Markdown
from treadle_sim.engine_model import StepCurve
from treadle_sim.fitting import DecodePoint, MeasuredEngine, MeasuredProfileError, fit_measured

from treadle_cli import exits
from treadle_cli.exits import Terminal, UsageProblem, printable
from treadle_cli.options import AsJson, print_json
from treadle_cli.report.style import render

DPI = 100
# least extent of the time axis around the points, so that noise of a per cent is no visible trend
LEAST_SPAN = 1.3
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
COLOURS = colormaps["viridis"]
CONTEXTS = LogNorm(256, 32_768)
DEGREE_COLOURS = {1: "#777777", 2: "#4477aa", 4: "#228833", 8: "#ee6677"}


def fit(
    profile: Annotated[
        Path, typer.Option(help="Profile that was measured on a live engine, see sim/README.md.")
    ],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for figures and picture.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit an engine's curve to what was measured on it, and print how far off it is."""
    with exits.end_with_one_line():
        figures, page = fit_profile(profile, out_folder)
        if as_json:
            print_json(figures)
        else:
            Terminal().print(Markdown(page, hyperlinks=False))


def fit_profile(file: Path, out_folder: Path | None) -> tuple[dict[str, Any], str]:
    """Fit one measured profile, and return it as a JSON object and as a page in Markdown.

    Writes NAME-fit.json and NAME-fit.png to out_folder unless it is None. Raises UsageProblem.
    """
    try:
        measured = fit_measured(json.loads(file.read_text()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, MeasuredProfileError) as error:
        raise UsageProblem(f"{file}: {error}") from error
    errors = {"decode_error": measured.decode_error, "prefill_error": measured.prefill_error}
    figures = {
        "engine": {"name": measured.engine.name, **asdict(measured.engine)},
        **{name: asdict(error) if error else None for name, error in errors.items()},
    }
    if out_folder is not None:
        out_folder.mkdir(parents=True, exist_ok=True)
        (out_folder / f"{file.stem}-fit.json").write_text(json.dumps(figures, indent=1) + "\n")
        draw_measured(measured, out_folder / f"{file.stem}-fit.png")
    return figures, render("treadle_cli", "fit_profile.md.j2", fit=measured)


def draw_measured(measured: MeasuredEngine, path: Path) -> None:
    """Draw decode steps and prefills of one live engine, with their fit."""
    figure = Figure((10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    curve = measured.engine.curve
    draw_steps(left, measured.decode, curve)
    title = printable(f"{measured.engine.name}: ms of a decode step by batch")
    left.set_title(title, fontsize=9, parse_math=False)
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
