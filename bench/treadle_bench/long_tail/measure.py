"""How long a batch waits for its longest: the maximum of K log-normal lengths, by a formula and by drawing.

Lengths of mean 1 and coefficient of variation c have s = sqrt(ln(1 + c²)) on the log scale. The formula that is taught
says that the longest of K is about exp(s sqrt(2 ln K) - s²/2). Keys: `rows` holds for each K and c the formula, what
was printed of it, the drawn mean of the maximum (a median over repeats, with their range), its exact value by an
integral, and the maximum's own percentiles; `claims` what else is said of such lengths, recomputed; `workloads` the
same for the lengths of this project's workloads, or of a trace file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from treadle_cli.report.palette import COLOURS, FAINT, GRID, INK
from treadle_sim.workloads.parametric import SAMPLES, WORKLOADS, make
from treadle_sim.workloads.workload import TrajectoryWork, groups, read_traces

from treadle_bench.bench import Bench, BenchOptions

GROUP_SIZES = (4, 16, 64, 256)
VARIATIONS = (0.5, 1.0, 2.0)
# What was published for the formula, in means.
PRINTED: Mapping[tuple[int, float], float] = {
    (4, 0.5): 2.0, (4, 1.0): 2.8, (4, 2.0): 3.7,
    (16, 0.5): 2.7, (16, 1.0): 5.0, (16, 2.0): 8.9,
    (64, 0.5): 3.5, (64, 1.0): 7.8, (64, 2.0): 17.4,
    (256, 0.5): 4.3, (256, 1.0): 11.3, (256, 2.0): 30.6,
}  # fmt: skip
PRINTED_DIGIT = 0.05  # half of the last digit printed
MAXIMA = 20_000  # drawn for each K and repeat: their mean is then within 1% at c = 2
LONGEST_SHARE = 0.05  # of trajectories, whose share of all tokens is asked for

SERIES = (COLOURS["prefill"], COLOURS["decode"], COLOURS["queue"])
PANELS = {0.5: "mild", 1.0: "reasoning", 2.0: "open-ended"}
WIDTH_IN, HEIGHT_IN, DPI = 9.0, 4.4, 150


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError."""
    drawn = {
        k: [_log_maxima(k, np.random.default_rng([options.seed, repeat, k])) for repeat in range(options.repeats)]
        for k in GROUP_SIZES
    }
    rows = [_row(k, c, drawn[k]) for k in GROUP_SIZES for c in VARIATIONS]
    found = {"rows": rows, "claims": _claims(options), "workloads": _workloads(options)}
    if options.pictures is not None:
        draw(rows, options.pictures / "long-tail.png")
    return found


def log_sigma(c: float) -> float:
    """Standard deviation of the log of a log-normal length with coefficient of variation `c`."""
    return math.sqrt(math.log1p(c * c))


def formula(k: int, c: float) -> float:
    """About the longest of `k`, in means."""
    s = log_sigma(c)
    return math.exp(s * math.sqrt(2.0 * math.log(k)) - 0.5 * s * s)


def _log_maxima(k: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Maxima of `k` standard normals: one draw serves every c."""
    return np.array([rng.standard_normal((MAXIMA // 20, k)).max(axis=1) for _ in range(20)]).ravel()


def expected_maximum(k: int, c: float) -> float:
    """Mean longest of `k`, in means: the integral of exp(s z - s²/2) over the density of the greatest of k normals."""
    s = log_sigma(c)
    z = np.linspace(-9.0, 14.0, 4_601)  # beyond, the integrand is below 1e-12 for every k and c here
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2.0)) for each in z.tolist()])
    density = k * below ** (k - 1) * np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return float(np.trapezoid(np.exp(s * z - 0.5 * s * s) * density, z))


def _row(k: int, c: float, drawn: Sequence[np.ndarray[Any, np.dtype[np.float64]]]) -> dict[str, Any]:
    s = log_sigma(c)
    longest = [np.exp(s * maxima - 0.5 * s * s) for maxima in drawn]
    means = [float(each.mean()) for each in longest]
    expected = float(np.median(means))
    by_formula, printed = formula(k, c), PRINTED[k, c]
    p10, p50, p90 = np.quantile(np.concatenate(longest), (0.1, 0.5, 0.9)).tolist()
    return {
        "k": k,
        "c": c,
        "formula": round(by_formula, 3),
        "printed": printed,
        "printed_is_formula": abs(by_formula - printed) <= PRINTED_DIGIT + 1e-9,
        "expected_max": round(expected, 3),
        "expected_max_range": [round(min(means), 3), round(max(means), 3)],
        "expected_max_exact": round(expected_maximum(k, c), 3),
        "max_p10": round(p10, 3),
        "max_p50": round(p50, 3),
        "max_p90": round(p90, 3),
        "formula_over_expected": round(by_formula / expected, 3),
    }


def _claims(options: BenchOptions) -> dict[str, Any]:
    normal = NormalDist()
    edge = normal.inv_cdf(1.0 - LONGEST_SHARE)
    rng = np.random.default_rng([options.seed, 32])
    maxima = {k: _log_maxima(k, rng) for k in (16, 32)}
    expected = {
        (k, c): float(np.exp(log_sigma(c) * maxima[k] - 0.5 * log_sigma(c) ** 2).mean())
        for k in (16, 32)
        for c in VARIATIONS
    }
    return {
        "k_16_to_32_at_c_1": {
            "formula": round(formula(32, 1.0) / formula(16, 1.0), 3),
            "expected": round(expected[32, 1.0] / expected[16, 1.0], 3),
        },
        "c_1_to_2_at_k_16": {
            "formula": round(formula(16, 2.0) / formula(16, 1.0), 3),
            "expected": round(expected[16, 2.0] / expected[16, 1.0], 3),
        },
        # The share of tokens in the longest of a log-normal: P(z > edge - s).
        "tokens_in_the_longest_5pct": {str(c): round(1.0 - normal.cdf(edge - log_sigma(c)), 3) for c in VARIATIONS},
    }


def _workloads(options: BenchOptions) -> list[dict[str, Any]]:
    if options.traces is not None:
        return [_observed(options.traces.name, [read_traces(options.traces)])]
    return [
        _observed(name, [make(name, seed=options.seed + repeat).trajectories for repeat in range(options.repeats)])
        for name in WORKLOADS
    ]


def _observed(name: str, batches: Sequence[Sequence[TrajectoryWork]]) -> dict[str, Any]:
    """Medians over batches: how the longest of a prompt's samples, and of the whole batch, stand to the mean of all.

    `c` is that of the whole batch; the formula's value is for groups of the batch's mean size, rounded.
    """
    figures = []
    for works in batches:
        tokens = np.array([work.gen_tokens for work in works], np.float64)
        mean = float(tokens.mean())
        of_groups = [[work.gen_tokens for work in group] for group in groups(works).values()]
        size = round(len(works) / len(of_groups))
        c = float(tokens.std() / mean)
        figures.append(
            {
                "c": c,
                "group_size": size,
                "formula": formula(size, c) if size > 1 else 1.0,
                "longest_of_group": float(np.mean([max(group) for group in of_groups])) / mean,
                "longest_of_all": float(tokens.max()) / mean,
                "longest_over_median": float(tokens.max() / np.median(tokens)),
            }
        )
    medians = {key: round(float(np.median([each[key] for each in figures])), 3) for key in figures[0]}
    return {"workload": name, "trajectories": len(batches[0]), **medians}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the PNG."""
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, facecolor="white")
        panels = figure.subplots(1, len(VARIATIONS), sharey=True)
        figure.subplots_adjust(left=0.065, right=0.985, bottom=0.13, top=0.74, wspace=0.08)
        for axes, c, colour in zip(panels, VARIATIONS, SERIES, strict=True):
            _panel(axes, [row for row in rows if row["c"] == c], colour)
            axes.set_title(f"c = {c:g}: {PANELS[c]}", loc="left", size=10, weight="bold")
        panels[0].set_ylabel("longest, in mean lengths")
        panels[1].set_xlabel(f"trajectories waited for, K (a prompt has {SAMPLES})")
        title = "A batch waits for its longest: the maximum of K log-normal lengths"
        figure.text(0.015, 0.935, title, size=13, weight="bold")
        note = (
            "Line: drawn mean; band: 10th to 90th percentile. Dashes: exp(s√(2 ln K) − s²/2); dots: as it was printed."
        )
        figure.text(0.015, 0.875, note, color=FAINT)
        figure.savefig(path)


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]], colour: str) -> None:
    sizes = [row["k"] for row in rows]
    low, high = ([row[key] for row in rows] for key in ("max_p10", "max_p90"))
    axes.fill_between(sizes, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(sizes, [row["expected_max"] for row in rows], color=colour, linewidth=2)
    axes.plot(sizes, [row["formula"] for row in rows], color=INK, linewidth=1, linestyle="--")
    axes.plot(sizes, [row["printed"] for row in rows], "o", color=INK, markersize=3.5)
    for row in rows:
        at = (row["k"], row["expected_max"])
        axes.annotate(f"{at[1]:.1f}", at, xytext=(0, -11), textcoords="offset points", ha="center", size=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(GROUP_SIZES, [str(k) for k in GROUP_SIZES])
    axes.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set_xlim(GROUP_SIZES[0] * 0.75, GROUP_SIZES[-1] * 1.33)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both", colors=FAINT)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


BENCH = Bench(
    "long-tail",
    "The longest of K log-normal lengths: a formula that is taught, against drawing. Takes seconds.",
    measure,
)
