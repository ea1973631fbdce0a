"""`bench predictor` on a trace file, with a real small backbone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tiny_backbone import tiny_backbone
from treadle_cli.exits import UsageProblem
from treadle_learned import scores
from treadle_learned.moments import replay
from treadle_learned.scores import Asked, truth
from treadle_learned.transcript import Transcript, Turn
from treadle_sim.workloads.workload import Step, TrajectoryWork, write_traces

from treadle_bench.bench import BenchOptions
from treadle_bench.command import BENCHES
from treadle_bench.predictor import latency as predictor_latency
from treadle_bench.predictor.measure import draw_prompts, measure_regrets


def works(prompts: int = 60) -> list[TrajectoryWork]:
    rng = np.random.default_rng(0)
    made = []
    for number in range(2 * prompts):
        sizes = rng.integers(5, 400, int(rng.integers(1, 6))).tolist()
        steps = tuple(Step(tokens, 20, 0.1, "look", "found") for tokens in sizes)
        made.append(TrajectoryWork(f"p{number // 2}", number % 2, 50, steps, prompt="Find it."))
    return made


@pytest.mark.timeout(300)  # it fits every estimator on every fold, and starts a service
async def test_every_estimator_is_scored_at_each_step_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "RESAMPLES", 20)
    monkeypatch.setattr(predictor_latency, "REQUESTS", 12)
    monkeypatch.setattr(predictor_latency, "WARM_UP", 4)
    write_traces(tmp_path / "own.jsonl", works())
    model, out = str(tiny_backbone(tmp_path / "backbone")), tmp_path / "out"
    options = BenchOptions(repeats=1, traces=tmp_path / "own.jsonl", pictures=out, model=model)
    found = await BENCHES["predictor"].run(options)
    assert {row["estimator"] for row in found["rows"]} == {
        *("history", "siblings", "boosted", "numbers", "prompt-only", "learned", "chosen", "oracle")
    }
    assert {row["data"] for row in found["rows"]} == {"own.jsonl"}
    keys = (
        "recall_top10",
        "pearson",
        "pearson_log",
        "pinball",
        "coverage_80",
        "below_p10",
        "below_p50",
        "below_p90",
    )
    for row in found["rows"]:
        assert {*keys, *(f"{key}_interval" for key in keys)} <= row.keys()
        low, high = row["regret_range"]
        assert low <= row["regret"] <= high
        assert row["regret"] == 0.0 or row["estimator"] != "oracle"
    assert 0.0 < found["p50_ms"] <= found["p99_ms"]
    assert found["latency_requests"] + found["latency_others"] == 12
    assert found["latency_requests"] > 0
    (data,) = found["data"]
    assert (data["name"], data["trajectories"], data["prompts"]) == ("own.jsonl", 120, 60)
    assert data["step_texts"] and data["prompt_texts"]
    assert {path.name for path in out.iterdir()} == {
        "predictor.json",
        "predictor.md",
        "predictor.png",
    }
    assert json.loads((out / "predictor.json").read_text()) == found


def test_prompts_are_drawn_whole_and_by_the_seed() -> None:
    every = works()
    some = draw_prompts(every, 10, seed=1)
    drawn = {work.prompt_id for work in some}
    assert len(drawn) == 10
    assert some == [work for work in every if work.prompt_id in drawn]
    assert some == draw_prompts(every, 10, seed=1) != draw_prompts(every, 10, seed=2)
    assert draw_prompts(every, 0, seed=1) == draw_prompts(every, 60, seed=1) == every


def test_who_says_the_truth_backwards_costs_time_in_every_fold() -> None:
    every = [
        TrajectoryWork(f"p{at}", 0, 50, (Step(100 * (at + 1), 5, 0.1),) * 2) for at in range(96)
    ]
    told = [
        Transcript(work.prompt_id, "r", work.prompt_id, 50, (Turn(work.gen_tokens),))
        for work in every
    ]
    moments = [moment for moment in replay(told) if moment.turn == 0]
    moments.sort(key=lambda moment: moment.index)
    asked = Asked(
        moments,
        told,
        {"oracle": truth(moments), "backwards": truth(moments)[::-1]},
        parts=np.arange(96) % 2,
    )
    found = measure_regrets(every, asked, [0, 1])
    assert found["oracle"] == [0.0, 0.0]
    assert min(found["backwards"]) > 0.05


async def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no default backbone
    write_traces(tmp_path / "own.jsonl", works(4))
    few = BenchOptions(traces=tmp_path / "own.jsonl")
    for options, words in (
        (BenchOptions(), r"--traces FILE .* or --data DIR"),
        (
            replace(few, model=str(tiny_backbone(tmp_path / "backbone"))),
            "4 prompts are too few for 5 folds",
        ),
        (replace(few, model=str(tmp_path)), "cannot be loaded"),
        (few, "is not there yet: `treadle demo` makes it"),
    ):
        with pytest.raises(UsageProblem, match=words):
            await BENCHES["predictor"].run(options)
