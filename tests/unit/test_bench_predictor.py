"""`bench predictor` on a trace file, with a real small backbone."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.tiny_backbone import tiny_backbone
from treadle_cli.bench import BENCHES, BenchOptions
from treadle_cli.problems import UsageProblem
from treadle_sim.trace_file import write_traces
from treadle_sim.workload import Step, TrajectoryWork


def works(prompts: int = 60) -> list[TrajectoryWork]:
    rng = np.random.default_rng(0)
    made = []
    for prompt in range(prompts):
        for sample in range(2):
            steps = [
                Step(int(tokens), 20, 0.1, "look", "found") for tokens in rng.integers(5, 400, int(rng.integers(1, 6)))
            ]
            made.append(TrajectoryWork(f"p{prompt}", sample, 50, tuple(steps), prompt="Find it."))
    return made


async def test_every_estimator_is_scored_at_each_step_and_drawn(tmp_path: Path) -> None:
    write_traces(tmp_path / "own.jsonl", works())
    options = BenchOptions(
        traces=tmp_path / "own.jsonl", pictures=tmp_path / "out", model=str(tiny_backbone(tmp_path / "backbone"))
    )
    found = await BENCHES["predictor"].measured(options)
    assert {row["estimator"] for row in found["rows"]} == {
        *("history", "siblings", "boosted", "numbers", "prompt-only", "learned", "oracle")
    }
    assert {row["data"] for row in found["rows"]} == {"own.jsonl"}
    assert {"recall_top10", "pearson", "pearson_log", "pinball", "coverage_80"} <= found["rows"][0].keys()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("predictor.json", "predictor.md", "predictor.png")
    }
    assert json.loads((tmp_path / "out" / "predictor.json").read_text()) == found


async def test_without_trajectories_it_says_what_it_needs() -> None:
    with pytest.raises(UsageProblem, match=r"--traces FILE .* or --data DIR"):
        await BENCHES["predictor"].measured(BenchOptions())


async def test_too_few_trajectories_are_named_and_so_is_a_folder_without_a_model(tmp_path: Path) -> None:
    write_traces(tmp_path / "own.jsonl", works(4))
    backbone = str(tiny_backbone(tmp_path / "backbone"))
    with pytest.raises(UsageProblem, match="4 prompts are too few for 5 folds"):
        await BENCHES["predictor"].measured(BenchOptions(traces=tmp_path / "own.jsonl", model=backbone))
    with pytest.raises(UsageProblem, match="cannot be loaded"):
        await BENCHES["predictor"].measured(BenchOptions(traces=tmp_path / "own.jsonl", model=str(tmp_path)))


async def test_a_backbone_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_traces(tmp_path / "own.jsonl", works(4))
    with pytest.raises(UsageProblem, match="is not there yet: `treadle demo` makes it"):
        await BENCHES["predictor"].measured(BenchOptions(traces=tmp_path / "own.jsonl"))
