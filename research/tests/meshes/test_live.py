"""The live bench without engines: its batches, its scale and its figures."""

import json
from pathlib import Path

import pytest
from treadle_cli.exits import UsageProblem
from treadle_sim.workloads.workload import Step, TrajectoryWork, groups

from treadle_bench.bench import BenchOptions
from treadle_bench.live.measure import (
    BENCH,
    MEAN_GEN_TOKENS,
    MEAN_TOOL_S,
    NAMES,
    PROMPTS,
    SAMPLES,
    TOLD,
    compare,
    make_epochs,
    measure,
    scale_of,
)


@pytest.fixture
def works() -> list[TrajectoryWork]:
    """80 prompts of two samples; a prompt's lengths grow with its number, and its steps have 100 or
    110 tokens."""
    return [
        TrajectoryWork(
            f"p{number}", sample, 1_000, (Step(100 + 10 * sample, 50, 1.5),) * (6 + number // 2)
        )
        for number in range(80)
        for sample in range(2)
    ]


def test_a_batch_is_scaled_to_a_cpu_and_an_epoch_samples_the_same_prompts_again(
    works: list[TrajectoryWork],
) -> None:
    first, second = make_epochs(works, "trace", "even", seed=0, count=2)
    assert len(first.trajectories) == len(second.trajectories) == PROMPTS * SAMPLES
    assert set(groups(first.trajectories)) == set(groups(second.trajectories))
    assert first.trajectories != second.trajectories
    mean_tokens = sum(work.gen_tokens for work in first.trajectories) / len(first.trajectories)
    assert mean_tokens == pytest.approx(MEAN_GEN_TOKENS, rel=0.05)
    tool_s = sum(step.tool_s for work in first.trajectories for step in work.steps) / len(
        first.trajectories
    )
    assert tool_s == pytest.approx(MEAN_TOOL_S, rel=0.05)


def test_one_prompt_of_a_skewed_batch_is_much_longer_than_the_others(
    works: list[TrajectoryWork],
) -> None:
    (batch,) = make_epochs(works, "trace", "skewed", seed=0, count=1)
    shortest, *_, second, longest = sorted(
        sum(work.gen_tokens for work in of) / len(of) for of in groups(batch.trajectories).values()
    )
    assert longest > 1.5 * second > 1.5 * shortest


def test_joined_turns_keep_their_tokens_and_their_tools_seconds() -> None:
    work = TrajectoryWork("p", 0, 1_000, tuple(Step(100, 50, 2.0) for _ in range(7)))
    scale = scale_of([work])
    assert scale.turns == 2
    scaled = scale.apply(work)
    assert len(scaled.steps) == 4
    assert scaled.gen_tokens == pytest.approx(MEAN_GEN_TOKENS, abs=4)
    assert sum(step.tool_s for step in scaled.steps) == pytest.approx(MEAN_TOOL_S)


def test_a_ratio_is_of_the_baseline_of_least_median(tmp_path: Path) -> None:
    live = {
        "treadle": [10.0, 10.0, 10.0],
        "pinned": [12.0, 15.0, 11.0],
        "sticky": [13.0, 14.0, 9.0],
    }
    live["router"] = [20.0, 20.0, 20.0]
    cell = compare(live, {name: [5.0] for name in (*NAMES, TOLD)})
    assert (cell["best_baseline"], cell["ratio"], cell["spread"], cell["simulated_ratio"]) == (
        "pinned",
        1.2,
        [1.1, 1.5],
        1.0,
    )
    assert (cell["pinned_s"], cell["treadle_s"]) == (12.0, 10.0)
    figures = {"cells": [{"trace": "tau", "skew": "even", **cell}], "repeats": 3, "seed": 0}
    figures |= {"slots": 5, "pass_s": 0.02}
    BENCH.write(figures, tmp_path)
    assert (
        "| tau | even | 12.0 | 13.0 | 20.0 | 10.0 | **1.20 (1.10–1.50)** | 1.00 | 1.00 |"
        in (tmp_path / "live.md").read_text()
    )
    assert json.loads((tmp_path / "live.json").read_text()) == figures


async def test_it_needs_the_folder_of_traces() -> None:
    with pytest.raises(UsageProblem, match="needs --data"):
        await measure(BenchOptions())
