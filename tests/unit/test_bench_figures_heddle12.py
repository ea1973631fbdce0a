"""Heddle's Figure 12 as a bench: what a cell holds, what its page says, and that a picture needs the JSON alone."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from treadle_sim.systems import BASELINES, TREADLE, VERL
from treadle_sim.workloads.workload import Step, TrajectoryWork, write_traces

from treadle_bench.benches import BENCHES
from treadle_bench.heddle12.aims import aims
from treadle_bench.heddle12.measure import merged
from treadle_bench.heddle12.page import where_it_loses
from treadle_bench.options import BenchOptions
from treadle_bench.rollouts import Job, batch_for, floor, play_all

ONE_GPU = 1 / 64
CELL_KEYS = {
    "workload",
    "model",
    "policy",
    "ratio_to_best_baseline",
    "ratio_to_verl",
    "ratio_to_slime",
    "ratio_to_oracle",
    "ratio_to_bound",
    "ratio_to_heddle",
    "bound_by",
    "spread",
}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "short.jsonl"
    steps = [(Step(20 + 9 * index, 30, 0.2), Step(10 * (1 + index % 5), 0, 0.1)) for index in range(12)]
    write_traces(file, [TrajectoryWork(f"p{index // 3}", index % 3, 100, each) for index, each in enumerate(steps)])
    return file


async def test_a_cell_holds_every_ratio_and_no_policy_beats_the_bound(traces: Path, tmp_path: Path) -> None:
    drawn = tmp_path / "drawn"
    options = BenchOptions(repeats=2, traces=traces, scale=ONE_GPU, workers=1, pictures=drawn)
    found = await BENCHES["heddle12"].measured(options)
    assert [cell["model"] for cell in found["cells"]] == ["Qwen3-8B", "Qwen3-14B", "Qwen3-32B"]
    for cell in [*found["cells"], *found["dense_cells"]]:
        assert cell.keys() >= CELL_KEYS
        own = {"heddle", "treadle", "treadle-whole-turns", "oracle"}
        assert set(cell["policy"]) == {system.name for system in BASELINES} | own
        assert cell["ratio_to_bound"] <= 1.0
        assert cell["spread"]["ratio_to_verl"][0] <= cell["ratio_to_verl"] <= cell["spread"]["ratio_to_verl"][1]
        assert cell["ratio_to_best_baseline"] <= min(cell["ratio_to_verl"], cell["ratio_to_slime"])
    assert json.loads((drawn / "heddle12.json").read_text()) == json.loads(json.dumps(found))

    BENCHES["heddle12"].put_down(json.loads((drawn / "heddle12.json").read_text()), tmp_path / "again")
    for file in ("heddle12.md", "heddle12.png"):
        assert (tmp_path / "again" / file).read_bytes() == (drawn / file).read_bytes()


async def test_processes_of_their_own_give_what_this_one_gives() -> None:
    batch = batch_for("coding", "Qwen3-8B", ONE_GPU, 0, BenchOptions())
    jobs = [Job(batch, TREADLE), Job(batch, VERL, 1)]
    here = await play_all(jobs, BenchOptions(workers=1), "here")
    there = await play_all(jobs, BenchOptions(workers=2), "there")
    assert [(one.makespan_s, one.last) for one in here] == [(one.makespan_s, one.last) for one in there]


def test_tools_bind_where_most_of_the_longest_trajectory_is_tools(tmp_path: Path) -> None:
    for name, tool_s, expected in (("slow", 100.0, "tools"), ("fast", 0.0, "tail")):
        file = tmp_path / f"{name}.jsonl"
        tokens = {f"p{index}": 3_000 if index == 0 else 5 for index in range(6)}
        works = [
            TrajectoryWork(prompt, sample, 10, (Step(each, 0, tool_s),))
            for prompt, each in tokens.items()
            for sample in range(2)
        ]
        write_traces(file, works)
        batch = batch_for("traces", "Qwen3-8B", ONE_GPU, 0, BenchOptions(traces=file))
        here = floor(batch)
        assert here.bound_by == expected
        assert here.bound_s == here.alone_s > here.work_s


def test_seeds_are_merged_to_medians_with_the_range_of_the_ratios() -> None:
    cells = [
        {"model": "m", "ratio_to_verl": value, "policy": {"verl": 10.0 * value}, "degree": {"verl": degree}}
        for value, degree in ((1.0, 1), (3.0, 4), (2.0, 4))
    ]
    assert merged(cells) == {
        "model": "m",
        "ratio_to_verl": 2.0,
        "policy": {"verl": 20.0},
        "degree": {"verl": 4},
        "spread": {"ratio_to_verl": [1.0, 3.0]},
    }
    assert merged(cells[:1])["spread"] is None


def _cell(treadle: float, best: float, oracle: float, bound: float) -> dict[str, Any]:
    return {
        "policy": {"verl": best, "slime": best + 50.0, "heddle": 400.0, "treadle": treadle, "oracle": oracle},
        "ratio_to": {"verl": best / treadle, "slime": (best + 50.0) / treadle},
        "bound_s": bound,
        "last": {"queue_s": 1.0, "decode_s": 2.0, "tool_s": 3.0},
    }


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (_cell(treadle=100.0, best=150.0, oracle=90.0, bound=80.0), "to nobody"),
        (_cell(treadle=105.0, best=102.0, oracle=104.0, bound=100.0), "nothing to win"),
        (_cell(treadle=200.0, best=150.0, oracle=100.0, bound=80.0), "by the predictor's error"),
        (_cell(treadle=200.0, best=150.0, oracle=199.0, bound=80.0), "by the plan itself"),
        (_cell(treadle=200.0, best=150.0, oracle=170.0, bound=80.0), "both"),
    ],
)
def test_the_page_says_who_is_faster_and_why(cell: dict[str, Any], says: str) -> None:
    line = where_it_loses(cell)
    assert says in line
    assert ("verl by" in line) == (cell["policy"]["verl"] < cell["policy"]["treadle"])


def test_a_cancelled_figure_stops_its_processes() -> None:
    async def cancelled() -> None:
        batch = batch_for("coding", "Qwen3-8B", ONE_GPU, 0, BenchOptions())
        jobs = [Job(batch, VERL, 1)] * 40
        async with asyncio.timeout(0.2):
            await play_all(jobs, BenchOptions(workers=2), "cancelled")

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())


def test_the_page_counts_the_cells_that_reach_each_aim_and_those_that_do_not() -> None:
    def cell(bound_by: str, best: float, oracle: float, slime: float | None) -> dict[str, Any]:
        policy = {"verl": best, "treadle": 1.0, "oracle": oracle}
        ratios = {"best_baseline": "verl", "ratio_to_best_baseline": best, "ratio_to_oracle": oracle}
        at_paper_degree = {"slime": slime} if slime is not None else {}
        return {
            "bound_by": bound_by,
            "bound_s": 0.5,
            "ratio_to_bound": 0.5,
            "policy": policy,
            "ratio_at_paper_degree": at_paper_degree,
            **ratios,
        }

    lines = list(aims({"gpus": 64, "cells": [cell("tail", 1.6, 0.8, 2.6), cell("work", 0.97, 0.95, None)]}))

    assert lines[2:7] == [
        "| 1.5 times the best baseline where the tail binds | 1 of 1 cells (1.60–1.60) | 1 of 1 cells (2.00–2.00) |",
        "| nowhere below 0.98 times the best baseline | 1 of 2 cells (0.97–1.60) | 2 of 2 cells (1.02–2.00) |",
        "| 0.9 of the planner that is told every length | 1 of 2 cells (0.80–0.95) |  |",
        "| 2.5 times slime at the paper's degree, where the paper has it | 1 of 1 cells (2.60–2.60) |  |",
        "| 2.3 times verl at the paper's degree, where the paper has it | no such cell |  |",
    ]
