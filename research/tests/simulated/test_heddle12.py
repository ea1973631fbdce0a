"""Heddle's Figure 12: what a cell holds, who wins in it and why, and that page and picture need the
JSON alone."""

import asyncio
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from treadle_sim.systems import BASELINES, TREADLE, VERL
from treadle_sim.workloads.workload import Step, TrajectoryWork, write_traces

from treadle_bench.bench import BenchOptions
from treadle_bench.command import BENCHES
from treadle_bench.heddle12.measure import merge_seeds
from treadle_bench.heddle12.page import check_aims, where_it_loses
from treadle_bench.rollouts import Job, batch_for, find_bound, play_all

ONE_GPU = 1 / 64
CELL_KEYS = {"workload", "model", "policy", "bound_by", "spread"} | {
    f"ratio_to_{name}" for name in ("best_baseline", "verl", "slime", "oracle", "bound", "heddle")
}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "short.jsonl"
    steps = [
        (Step(20 + 9 * index, 30, 0.2), Step(10 * (1 + index % 5), 0, 0.1)) for index in range(12)
    ]
    write_traces(
        file,
        [
            TrajectoryWork(f"p{index // 3}", index % 3, 100, each)
            for index, each in enumerate(steps)
        ],
    )
    return file


async def test_a_cell_holds_every_ratio_and_no_policy_beats_the_bound(
    traces: Path, tmp_path: Path
) -> None:
    drawn = tmp_path / "drawn"
    options = BenchOptions(repeats=2, traces=traces, scale=ONE_GPU, workers=1, pictures=drawn)
    found = await BENCHES["heddle12"].run(options)
    assert [cell["model"] for cell in found["cells"]] == ["Qwen3-8B", "Qwen3-14B", "Qwen3-32B"]
    for cell in [*found["cells"], *found["dense_cells"]]:
        assert cell.keys() >= CELL_KEYS
        own = {"heddle", "treadle", "treadle-whole-turns", "oracle"}
        assert set(cell["policy"]) == {system.name for system in BASELINES} | own
        assert cell["ratio_to_bound"] <= 1.0
        assert (
            cell["spread"]["ratio_to_verl"][0]
            <= cell["ratio_to_verl"]
            <= cell["spread"]["ratio_to_verl"][1]
        )
        assert cell["ratio_to_best_baseline"] <= min(cell["ratio_to_verl"], cell["ratio_to_slime"])
    assert json.loads((drawn / "heddle12.json").read_text()) == json.loads(json.dumps(found))

    BENCHES["heddle12"].write(json.loads((drawn / "heddle12.json").read_text()), tmp_path / "again")
    for file in ("heddle12.md", "heddle12.png"):
        assert (tmp_path / "again" / file).read_bytes() == (drawn / file).read_bytes()


async def test_processes_of_their_own_give_what_this_one_gives() -> None:
    batch = batch_for("coding", "Qwen3-8B", ONE_GPU, 0, BenchOptions())
    jobs = [Job(batch, TREADLE), Job(batch, VERL, 1)]
    here, there = [
        await play_all(jobs, BenchOptions(workers=workers), "jobs") for workers in (1, 2)
    ]
    for job in jobs:
        assert (here[job].makespan_s, here[job].last) == (there[job].makespan_s, there[job].last)


def test_tools_bind_where_most_of_the_longest_trajectory_is_tools(tmp_path: Path) -> None:
    for tool_s, expected in ((100.0, "tools"), (0.0, "tail")):
        file = tmp_path / f"{expected}.jsonl"
        steps = [Step(3_000 if at < 2 else 5, 0, tool_s) for at in range(12)]
        write_traces(
            file,
            [TrajectoryWork(f"p{at // 2}", at % 2, 10, (step,)) for at, step in enumerate(steps)],
        )
        bound = find_bound(batch_for("traces", "Qwen3-8B", ONE_GPU, 0, BenchOptions(traces=file)))
        assert bound["bound_by"] == expected
        assert bound["bound_s"] >= bound["alone_s"] > bound["work_s"]


def test_seeds_are_merged_to_medians_with_the_range_of_the_ratios() -> None:
    cells = [
        {
            "model": "m",
            "ratio_to_verl": value,
            "policy": {"verl": 10.0 * value},
            "degree": {"verl": degree},
        }
        for value, degree in ((1.0, 1), (3.0, 4), (2.0, 4))
    ]
    assert merge_seeds(cells) == {
        "model": "m",
        "ratio_to_verl": 2.0,
        "policy": {"verl": 20.0},
        "degree": {"verl": 4},
        "spread": {"ratio_to_verl": [1.0, 3.0]},
    }
    assert merge_seeds(cells[:1])["spread"] is None


def _cell(treadle: float, best: float, oracle: float, bound: float) -> dict[str, Any]:
    return {
        "policy": {
            "verl": best,
            "slime": best + 50.0,
            "heddle": 400.0,
            "treadle": treadle,
            "oracle": oracle,
        },
        "ratio_to": {"verl": best / treadle, "slime": (best + 50.0) / treadle},
        "bound_s": bound,
        "last": {"queue_s": 1.0, "decode_s": 2.0, "tool_s": 3.0},
    }


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (_cell(treadle=100.0, best=150.0, oracle=90.0, bound=80.0), "nowhere"),
        (_cell(treadle=105.0, best=102.0, oracle=104.0, bound=100.0), "nothing to win"),
        (
            _cell(treadle=200.0, best=150.0, oracle=100.0, bound=80.0),
            "because of the predictor's error",
        ),
        (_cell(treadle=200.0, best=150.0, oracle=199.0, bound=80.0), "because of the plan:"),
        (
            _cell(treadle=200.0, best=150.0, oracle=170.0, bound=80.0),
            "of the plan and of the predictor's error",
        ),
    ],
)
def test_the_page_says_who_is_faster_and_why(cell: dict[str, Any], says: str) -> None:
    line = where_it_loses(cell)
    assert says in line
    assert ("verl by" in line) == (cell["policy"]["verl"] < cell["policy"]["treadle"])


def test_a_cancelled_figure_stops_its_processes() -> None:
    async def cancelled() -> None:
        batch = batch_for("coding", "Qwen3-8B", ONE_GPU, 0, BenchOptions())
        jobs = [Job(replace(batch, seed=seed), VERL, 1) for seed in range(40)]
        async with asyncio.timeout(0.2):
            await play_all(jobs, BenchOptions(workers=2), "cancelled")

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert not multiprocessing.active_children()


def test_the_page_counts_the_cells_that_reach_each_aim_and_those_that_do_not() -> None:
    def cell(bound_by: str, best: float, oracle: float, slime: float | None) -> dict[str, Any]:
        policy = {"verl": best, "treadle": 1.0, "oracle": oracle}
        ratios = {
            "best_baseline": "verl",
            "ratio_to_best_baseline": best,
            "ratio_to_oracle": oracle,
        }
        ratios["ratio_at_paper_degree"] = {} if slime is None else {"slime": slime}
        return {"bound_by": bound_by, "bound_s": 0.5, "policy": policy, **ratios}

    rows = check_aims(
        {"gpus": 64, "cells": [cell("tail", 1.6, 0.8, 2.6), cell("work", 0.97, 0.95, None)]}
    )

    assert [row[1:] for row in rows] == [
        ["1 of 1 cells (1.60–1.60)", "1 of 1 cells (2.00–2.00)"],
        ["1 of 2 cells (0.97–1.60)", "2 of 2 cells (1.02–2.00)"],
        ["1 of 2 cells (0.80–0.95)", ""],
        ["1 of 1 cells (2.60–2.60)", ""],
        ["no such cell", ""],
    ]
