"""`treadle bench grpo` without engines: what it makes of the records of runs, and its page."""

import json
from pathlib import Path
from typing import Any

import pytest

from treadle_bench.grpo.measure import (
    BENCH,
    CAP,
    FULL,
    SETTINGS,
    UNSHAPED,
    Cell,
    compare,
    interval,
    make_figures,
    read_run,
)

STEPS = 12


def write_run(folder: Path, *, reward: float, rollout_s: float, staleness: int = 0) -> Path:
    """Records as examples/grpo writes them: rewards rise by 0.01 a step from `reward`; the first
    step is slow."""
    for name, count in (("steps", STEPS), ("evaluations", 2)):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            record = {
                "step": index,
                "reward": reward + 0.01 * index,
                "trained": [f"{index}-{n}" for n in range(4)],
                "trained_tokens": 30.0,
                "staleness": staleness,
                "mean_staleness": staleness / 2,
                "drift": {"k3": 1e-6, "clip_fraction": 0.0, "mean_abs": 1e-4},
                "rollout_s": rollout_s + 100.0 * (index == 0),
                "reward_s": 0.5,
                "train_s": 1.0,
                "sync_s": 0.25,
                "step_s": rollout_s + 2.0 + 100.0 * (index == 0),
                "started": 6,
                "kept": 4,
                "failed": [],
                "tokens": [10, 20, 60],
                "longest_tokens": 60,
            }
            (folder / name / f"{index:04}.json").write_text(json.dumps(record))
    return folder


def all_runs(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Return a run of every cell. Shaped rollouts take half as long and have 0.02 more reward; seeds
    differ by 0.1 s."""
    runs = []
    for seed in range(seeds):
        for bound, shaping in SETTINGS:
            cell = Cell(bound, shaping, seed)
            shaped = shaping != UNSHAPED
            made = write_run(
                folder / cell.name,
                reward=0.4 + 0.02 * shaped,
                rollout_s=(4.0 + 0.1 * seed) / (2.0 if shaped else 1.0),
                staleness=bound,
            )
            runs.append(read_run(made, cell))
    return runs


def test_a_run_is_summarized_over_its_windows_and_without_its_first_step(tmp_path: Path) -> None:
    found = read_run(
        write_run(tmp_path / "run", reward=0.4, rollout_s=3.0, staleness=1), Cell(1, UNSHAPED, 0)
    )
    assert found["reward_first"] == pytest.approx(0.42)
    assert found["reward_last"] == pytest.approx(0.49)
    assert (found["rollout_s"], found["step_s"], found["sync_s"]) == (3.0, 5.0, 0.25)
    assert (found["max_staleness"], found["steps"], found["held_out"]) == (1, STEPS, [0.4, 0.41])
    assert found["sampled_tokens"] == {"mean": 30.0, "longest": 60.0}


def test_shaped_runs_are_compared_with_unshaped_ones_of_their_seed(tmp_path: Path) -> None:
    runs = [run for run in all_runs(tmp_path, seeds=3) if run["bound"] == 1]
    found = compare(runs, CAP)
    assert found["rollout_ratio"] == pytest.approx(2.0)
    assert found["reward_difference"] == pytest.approx(0.02)
    assert found["held_out_difference"] == pytest.approx(0.02)
    assert 1.0 < found["step_ratio"] < 2.0
    assert compare([run for run in runs if run["shaping"] == CAP], CAP) == {}


def test_an_interval_is_that_of_students_t() -> None:
    low, high = interval([1.0, 2.0, 3.0])
    assert (low + high) / 2 == pytest.approx(2.0)
    assert (high - low) / 2 == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert interval([0.5]) == [0.5, 0.5]


def test_the_page_names_what_rises_what_does_not_and_where_shaping_loses(tmp_path: Path) -> None:
    runs = all_runs(tmp_path / "runs", seeds=2)
    for run in runs:
        if (run["bound"], run["shaping"]) == (2, CAP):
            run["reward_last"], run["rollout_s"] = run["reward_first"], 9.0
    figures = make_figures({"size": vars(FULL), "seeds": [0, 1]}, runs, None)
    assert figures["max_staleness"] == 2
    assert figures["rollout_s"] == pytest.approx(4.05)
    assert figures["shaped"]["rollout_ratio"] == pytest.approx(2.0)
    BENCH.write(figures, tmp_path / "out")
    page = (tmp_path / "out" / "grpo.md").read_text()
    assert "not in: bound 2, length cap" in page
    assert "rollouts were no shorter in bound 2, length cap" in page
    assert "No trained token was older than its run's bound" in page
    runs[0]["max_staleness"] = 1
    BENCH.write(make_figures({"size": vars(FULL), "seeds": [0, 1]}, runs, None), tmp_path / "out")
    assert (
        "**A trained token was older than its run's bound**"
        in (tmp_path / "out" / "grpo.md").read_text()
    )
    assert (tmp_path / "out" / "grpo.png").stat().st_size > 10_000
