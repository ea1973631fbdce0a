"""Heddle's Figure 4: when trajectories end under verl, as a fraction of the time of the last one.

verl as the paper runs it: pinned, engines of one GPU, Qwen3-14B. `rows`, one for each workload:
`max_over_median` of the times at which trajectories end, with its range over seeds; `at`: the
fraction of the makespan by which 1% to 100% of the trajectories had ended (first seed);
`tokens_max_over_median`: longest over median of their lengths.
"""

from pathlib import Path
from typing import Any

import numpy as np
from treadle_cli.report.style import FAINT
from treadle_sim.systems import VERL

from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.pictures import SERIES, sheet, style
from treadle_bench.rollouts import Job, batches_for, header, play_all, setting_of
from treadle_bench.summary import DIGITS, median_of, range_of

LLM = "Qwen3-14B"
DEGREE = 1
PAPER_RATIO = 4.0  # "over 4 times", for its coding agent
PERCENT = range(1, 101)


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError, OSError."""
    scale = options.scale or 1.0
    batches = batches_for(LLM, scale, options)
    done = await play_all(
        (Job(each, VERL, DEGREE) for seeds in batches.values() for each in seeds),
        options,
        "heddle4",
    )
    rows = []
    for name, of_name in batches.items():
        runs = [done[Job(batch, VERL, DEGREE)] for batch in of_name]
        ratios = [one.makespan_s / one.p50_s for one in runs]
        tokens = [
            np.array([work.gen_tokens for work in setting_of(batch).workload.trajectories])
            for batch in of_name
        ]
        rows.append(
            {
                "workload": name,
                "makespan_s": median_of(one.makespan_s for one in runs),
                "max_over_median": median_of(ratios),
                "spread": range_of(ratios),
                "tokens_max_over_median": median_of(
                    float(each.max() / np.median(each)) for each in tokens
                ),
                "at": np.round(
                    np.percentile(runs[0].finished_s, PERCENT) / runs[0].makespan_s, DIGITS
                ).tolist(),
            }
        )
    return header(next(iter(batches.values()))[0], scale, options) | {"rows": rows}


def draw(found: Figures, file: Path) -> None:
    """Write the picture."""
    note = (
        f"Share of trajectories that have ended, by time over the last one's. verl, {LLM}, "
        f"{found['gpus']} GPUs."
    )
    with sheet(
        "The last trajectory against the others", note, file, height_in=4.0, top=0.80
    ) as figure:
        axes = figure.subplots()
        for row, colour in zip(found["rows"], SERIES, strict=False):
            label = (
                f"{row['workload']}: the last takes {row['max_over_median']:.1f} times the median"
            )
            axes.plot(
                row["at"], np.array(PERCENT) / 100.0, color=colour, linewidth=2.0, label=label
            )
        at = 1.0 / PAPER_RATIO
        axes.axvline(at, color=FAINT, linestyle=":", linewidth=1.2)
        words = "the paper's median lies left of here"
        axes.annotate(words, (at, 0.03), (4, 0), size=8, color=FAINT, textcoords="offset points")
        label, legend = "time / the last trajectory's", {"loc": "lower right"}
        style(axes, xlim=(0, 1.01), ylim=(0, 1.01), xlabel=label, legend=legend)


BENCH = Bench(
    "heddle4",
    "Heddle's Figure 4: when trajectories end under verl. Takes about a minute.",
    measure,
    page=lambda found: {"paper_ratio": PAPER_RATIO},
    draw=draw,
)
