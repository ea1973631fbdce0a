"""How long a batch waits for its longest trajectory: the maximum of K log-normal lengths, by a
formula and by sampling.

Lengths of mean 1 and coefficient of variation c have s = sqrt(ln(1 + c²)) on the log scale. A
published formula says that the longest of K is about exp(s sqrt(2 ln K) - s²/2). Keys: `rows`, for
each K and c: the formula, its published value, the sampled mean of the maximum (median and range
over repeats), its exact value by an integral, and percentiles of the maximum. `claims`: other
published statements, computed. `workloads`: the same for the lengths of this project's workloads,
or of a trace file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from treadle_cli.report.style import COLOURS, INK
from treadle_core.rollouts.tail import expected_longest, lengths_of, log_sigma, longest_by_formula
from treadle_sim.workloads.parametric import SAMPLES, WORKLOADS, make
from treadle_sim.workloads.workload import TrajectoryWork, groups, read_traces

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.pictures import sheet, style
from treadle_bench.summary import range_of, rounded

GROUP_SIZES = (4, 16, 64, 256)
VARIATIONS = (0.5, 1.0, 2.0)
# The published values of the formula, in means.
PRINTED: Mapping[tuple[int, float], float] = {
    (4, 0.5): 2.0,
    (4, 1.0): 2.8,
    (4, 2.0): 3.7,
    (16, 0.5): 2.7,
    (16, 1.0): 5.0,
    (16, 2.0): 8.9,
    (64, 0.5): 3.5,
    (64, 1.0): 7.8,
    (64, 2.0): 17.4,
    (256, 0.5): 4.3,
    (256, 1.0): 11.3,
    (256, 2.0): 30.6,
}
PRINTED_DIGIT = 0.05  # half of the last published digit
MAXIMA = 20_000  # sampled for each K and repeat: their mean is then within 1% at c = 2
LONGEST_SHARE = 0.05  # fraction of trajectories whose share of all tokens is computed
DIGITS = 3
MEANS = (1, 2, 4, 8, 16, 32)  # ticks of the picture

Floats = np.ndarray[Any, np.dtype[np.float64]]


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError."""
    sampled = {
        k: [
            _log_maxima(k, np.random.default_rng([options.seed, repeat, k]))
            for repeat in range(options.repeats)
        ]
        for k in GROUP_SIZES
    }
    rows = [_row(k, c, sampled[k]) for k in GROUP_SIZES for c in VARIATIONS]
    if options.traces is not None:
        batches = {options.traces.name: [read_traces(options.traces)]}
    else:
        batches = {
            name: [make(name, seed=seed).trajectories for seed in options.seeds]
            for name in WORKLOADS
        }
    workloads = [_describe(name, of_name) for name, of_name in batches.items()]
    found = {"rows": rows, "claims": _check_claims(options), "workloads": workloads}
    if options.pictures is not None:
        draw(rows, options.pictures / "long-tail.png")
    return found


def _log_maxima(k: int, rng: np.random.Generator) -> Floats:
    """Maxima of `k` standard normals: the same sample serves every c."""
    return np.array([rng.standard_normal((MAXIMA // 20, k)).max(axis=1) for _ in range(20)]).ravel()


def _row(k: int, c: float, sampled: Sequence[Floats]) -> dict[str, Any]:
    longest = [lengths_of(maxima, c) for maxima in sampled]
    means = [float(each.mean()) for each in longest]
    expected = float(np.median(means))
    by_formula, printed = longest_by_formula(k, c), PRINTED[k, c]
    p10, p50, p90 = np.quantile(np.concatenate(longest), (0.1, 0.5, 0.9)).tolist()
    row = {
        "k": k,
        "c": c,
        "formula": by_formula,
        "printed": printed,
        "printed_is_formula": abs(by_formula - printed) <= PRINTED_DIGIT + 1e-9,
        "expected_max": expected,
        "expected_max_range": range_of(means, DIGITS),
        "expected_max_exact": expected_longest(k, c),
        "max_p10": p10,
        "max_p50": p50,
        "max_p90": p90,
        "formula_over_expected": by_formula / expected,
    }
    return rounded(row, DIGITS)


def _check_claims(options: BenchOptions) -> dict[str, Any]:
    normal = NormalDist()
    edge = normal.inv_cdf(1.0 - LONGEST_SHARE)
    rng = np.random.default_rng([options.seed, 32])
    maxima = {k: _log_maxima(k, rng) for k in (16, 32)}

    def compare(larger: tuple[int, float], smaller: tuple[int, float]) -> dict[str, float]:
        means = [float(lengths_of(maxima[k], c).mean()) for k, c in (larger, smaller)]
        by_formula = longest_by_formula(*larger) / longest_by_formula(*smaller)
        return rounded({"formula": by_formula, "expected": means[0] / means[1]}, DIGITS)

    return {
        "k_16_to_32_at_c_1": compare((32, 1.0), (16, 1.0)),
        "c_1_to_2_at_k_16": compare((16, 2.0), (16, 1.0)),
        # The share of tokens in the longest of a log-normal: P(z > edge - s).
        "tokens_in_the_longest_5pct": {
            str(c): round(1.0 - normal.cdf(edge - log_sigma(c)), DIGITS) for c in VARIATIONS
        },
    }


def _describe(name: str, batches: Sequence[Sequence[TrajectoryWork]]) -> dict[str, Any]:
    """Medians over batches: the longest of a prompt's samples, and of the whole batch, over the
    mean of all.

    `c` is that of the whole batch; the formula's value is for groups of the batch's mean size,
    rounded.
    """
    figures = []
    for works in batches:
        tokens = np.array([work.gen_tokens for work in works], np.float64)
        mean, c = float(tokens.mean()), float(tokens.std() / tokens.mean())
        longest = [max(work.gen_tokens for work in group) for group in groups(works).values()]
        size = round(len(works) / len(longest))
        figures.append(
            {
                "c": c,
                "group_size": size,
                "formula": longest_by_formula(size, c) if size > 1 else 1.0,
                "longest_of_group": float(np.mean(longest)) / mean,
                "longest_of_all": float(tokens.max()) / mean,
                "longest_over_median": float(tokens.max() / np.median(tokens)),
            }
        )
    medians = {key: float(np.median([each[key] for each in figures])) for key in figures[0]}
    return {"workload": name, "trajectories": len(batches[0]), **rounded(medians, DIGITS)}


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the picture."""
    title = "A batch waits for its longest: the maximum of K log-normal lengths"
    note = (
        "Line: sampled mean; band: 10th to 90th percentile. Dashes: exp(s√(2 ln K) − s²/2); "
        "dots: as published."
    )
    names = {0.5: "mild", 1.0: "reasoning", 2.0: "open-ended"}
    with sheet(title, note, file, height_in=4.4, top=0.74, width_in=9.0) as figure:
        panels = figure.subplots(1, len(VARIATIONS), sharey=True)
        figure.subplots_adjust(left=0.065, bottom=0.13, wspace=0.08)
        for axes, (c, name), part in zip(
            panels, names.items(), ("prefill", "decode", "queue"), strict=True
        ):
            _panel(axes, [row for row in rows if row["c"] == c], COLOURS[part])
            style(axes, f"c = {c:g}: {name}")
        panels[0].set_ylabel("longest, in mean lengths")
        panels[1].set_xlabel(f"trajectories waited for, K (a prompt has {SAMPLES})")


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]], colour: str) -> None:
    of = {key: [row[key] for row in rows] for key in rows[0]}
    axes.fill_between(of["k"], of["max_p10"], of["max_p90"], color=colour, alpha=0.18, linewidth=0)
    axes.plot(of["k"], of["expected_max"], color=colour, linewidth=2)
    axes.plot(of["k"], of["formula"], color=INK, linewidth=1, linestyle="--")
    axes.plot(of["k"], of["printed"], "o", color=INK, markersize=3.5)
    for at in zip(of["k"], of["expected_max"], strict=True):
        axes.annotate(
            f"{at[1]:.1f}", at, xytext=(0, -11), textcoords="offset points", ha="center", size=8
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(GROUP_SIZES, map(str, GROUP_SIZES))
    axes.set_yticks(MEANS, map(str, MEANS))
    axes.set_xlim(GROUP_SIZES[0] * 0.75, GROUP_SIZES[-1] * 1.33)


BENCH = Bench(
    "long-tail",
    "The longest of K log-normal lengths: a formula that is taught, against drawing. Takes "
    "seconds.",
    measure,
    decides=("core/treadle_core/rollouts",),
)
