"""Heddle's Figure 4: when trajectories end under verl, as a part of the time that the last one takes.

verl as the paper runs it: pinned, engines of one GPU, Qwen3-14B. `rows` for each workload: `max_over_median` of the
times at which trajectories end, its range over seeds, and `at`, the part of the longest time by which 1% to 100% of
the trajectories had ended (first seed). `tokens_max_over_median`: the same of their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from treadle_sim.systems import VERL

from treadle_bench.options import BenchOptions
from treadle_bench.page import MACHINE, command, paragraph, point, ratio, seconds, table
from treadle_bench.pictures import SERIES, figure_with, tidy
from treadle_bench.rollouts import ACCELERATOR, Job, batch_for, play_all, setting, workloads

NAME = "heddle4"
LLM = "Qwen3-14B"
DEGREE = 1
PAPER_RATIO = 4.0  # "over 4 times", of its coding agent
PERCENT = range(1, 101)
DIGITS = 4


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises TraceFileError, OSError."""
    scale = options.scale or 1.0
    seeds = [options.seed + repeat for repeat in range(options.repeats)]
    batches = {name: [batch_for(name, LLM, scale, seed, options) for seed in seeds] for name in workloads(options)}
    jobs = [Job(batch, VERL, DEGREE, curve=True) for of_name in batches.values() for batch in of_name]
    done = dict(zip(jobs, await play_all(jobs, options, NAME), strict=True))
    rows = []
    for name, of_name in batches.items():
        runs = [done[Job(batch, VERL, DEGREE, curve=True)] for batch in of_name]
        ratios = [one.makespan_s / one.p50_s for one in runs]
        tokens = [np.array([work.gen_tokens for work in setting(batch).workload.trajectories]) for batch in of_name]
        rows.append(
            {
                "workload": name,
                "makespan_s": round(median(one.makespan_s for one in runs), DIGITS),
                "max_over_median": round(median(ratios), DIGITS),
                "spread": [round(min(ratios), DIGITS), round(max(ratios), DIGITS)],
                "tokens_max_over_median": round(median(float(each.max() / np.median(each)) for each in tokens), DIGITS),
                "at": np.round(np.percentile(runs[0].finished_s, PERCENT) / runs[0].makespan_s, DIGITS).tolist(),
            }
        )
    first = next(iter(batches.values()))[0]
    return {
        "model": LLM,
        "accelerator": ACCELERATOR,
        "gpus": first.gpus,
        "trajectories": first.trajectories,
        "scale": scale,
        "seeds": seeds,
        "repeats": options.repeats,
        "rows": rows,
    }


def page(found: Mapping[str, Any]) -> Iterator[str]:
    yield "# heddle4: the last trajectory against the others"
    yield ""
    yield from paragraph(
        f"`{command(NAME, found)}`, on {MACHINE}. {LLM}, {found['trajectories']:,} trajectories on {found['gpus']}",
        f"{found['accelerator']} GPUs, an engine each, under verl.",
    )
    yield "![share of trajectories that have ended](heddle4.png)"
    yield ""
    yield from table(
        ["", "rollout, s", "last over median, time (range over seeds)", "longest over median, tokens"],
        (
            [
                row["workload"],
                seconds(row["makespan_s"]),
                ratio(row["max_over_median"], row["spread"]),
                ratio(row["tokens_max_over_median"]),
            ]
            for row in found["rows"]
        ),
    )
    yield ""
    yield from point(f"The paper reads over {PAPER_RATIO:g} times off its coding agent; its curve is a picture only.")
    yield from point(
        "Batches shrink as trajectories end and steps get faster: the last is later by less than it is longer.",
    )


def draw(found: Mapping[str, Any], file: Path) -> None:
    note = f"Share of trajectories that have ended, by time over the last one's. verl, {LLM}, {found['gpus']} GPUs."
    with figure_with("The last trajectory against the others", note, file, height_in=4.0, top=0.80) as figure:
        axes = figure.subplots()
        for row, colour in zip(found["rows"], SERIES, strict=False):
            label = f"{row['workload']}: the last takes {row['max_over_median']:.1f} times the median"
            axes.plot(row["at"], np.array(PERCENT) / 100.0, color=colour, linewidth=2.0, label=label)
        axes.axvline(1.0 / PAPER_RATIO, color="#6B7280", linestyle=":", linewidth=1.2)
        axes.annotate(
            "the paper's median lies left of here",
            (1.0 / PAPER_RATIO, 0.03),
            (4, 0),
            size=8,
            color="#6B7280",
            textcoords="offset points",
        )
        axes.set_xlim(0, 1.01)
        axes.set_ylim(0, 1.01)
        axes.set_xlabel("time / the last trajectory's")
        axes.legend(frameon=False, loc="lower right")
        tidy(axes)
