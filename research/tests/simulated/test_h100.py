"""`treadle bench h100`: its work, its rules and what its figures are made of. The measuring itself
needs a GPU."""

import gzip
from collections import Counter
from pathlib import Path

import pytest
from support.fake_sglang import FakeSglang, fake_sglang
from treadle_cli.exits import UsageProblem
from treadle_core.model import DecodeCurve
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload

from treadle_bench.bench import BenchOptions
from treadle_bench.h100.engine import RawEngine, add_declared, open_session
from treadle_bench.h100.measure import compare_plays, measure, read_reference
from treadle_bench.h100.rollouts import LEAST, PINNED, describe_play, make_epochs, play_raw


def test_a_batch_has_the_means_that_were_asked_for_and_epochs_share_its_prompts() -> None:
    works = [
        TrajectoryWork(f"p{number}", 0, 1_000, (Step(100 + number, 400, 1.5),) * (6 + number // 2))
        for number in range(40)
    ]
    first, second = make_epochs(works, 5, 4, 3, 300, 1_500, 2.0, seed=0, count=2)
    each = first.trajectories
    assert len(each) == 20
    assert {work.prompt_id for work in each} == {work.prompt_id for work in second.trajectories}
    assert sum(work.gen_tokens for work in each) / 20 == pytest.approx(300, rel=0.02)
    assert sum(work.final_context_tokens - work.gen_tokens for work in each) / 20 == pytest.approx(
        1_500, rel=0.02
    )
    assert sum(step.tool_s for work in each for step in work.steps) / 20 == pytest.approx(2.0)
    assert sum(len(work.steps) for work in each) / 20 == pytest.approx(3, abs=0.8)


async def test_pinned_trajectories_stay_and_others_go_where_the_fewest_steps_run() -> None:
    """Four trajectories on two engines; the second engine is so slow that it keeps its first
    steps."""
    work = Workload(
        "w",
        tuple(TrajectoryWork(f"p{n}", 0, 20, (Step(3, 4, 0.0), Step(3, 4, 0.0))) for n in range(4)),
    )

    async def steps_of(rule: str, slow_s: float) -> list[int]:
        async with (
            fake_sglang() as first,
            fake_sglang(token_s=slow_s) as second,
            open_session() as http,
        ):
            ends_s = await play_raw(
                [RawEngine(http, engine.url) for engine in (first, second)], work, rule, "salt"
            )
            assert len(ends_s) == 4
            assert sum(lengths(first).values()) + sum(lengths(second).values()) == 8
            return [len(first.requests), len(second.requests)]

    def lengths(engine: FakeSglang) -> Counter[int]:
        return Counter(len(request["input_ids"]) for request in engine.requests)

    assert await steps_of(PINNED, 0.002) == [4, 4]
    assert await steps_of(LEAST, 0.3) == [5, 3]


def test_the_tax_is_the_share_of_the_last_tenth() -> None:
    work = Workload("w", (TrajectoryWork("p", 0, 20, (Step(400, 4, 0.0),)),))
    found = describe_play([*[5.0] * 9, 20.0], work)
    assert found == {"makespan_s": 20.0, "mean_s": 6.5, "tokens_per_s": 20.0, "straggler_tax": 0.75}


def test_a_ratio_is_of_the_best_baseline_in_the_same_play_and_the_first_epoch_does_not_count() -> (
    None
):
    def play(epoch: int, name: str, makespan_s: float) -> dict[str, object]:
        rest = {"mean_s": 1.0, "tokens_per_s": 1.0, "straggler_tax": 0.1}
        return {"epoch": epoch, "name": name, "makespan_s": makespan_s, **rest}

    plays = [play(0, "treadle", 99.0), play(1, "treadle", 10.0), play(1, "pinned", 12.0)]
    assert compare_plays(plays)["ratio"] == pytest.approx(1.2)
    plays += [
        play(1, "least", 11.0),
        play(2, "treadle", 10.0),
        play(2, "pinned", 30.0),
        play(2, "least", 9.0),
    ]
    found = compare_plays(plays)
    assert (found["best_baseline"], found["spread"]) == ("least", [0.9, 1.1])
    with pytest.raises(ValueError, match="nothing to compare"):
        compare_plays(plays[:2])


def test_rows_say_what_the_declared_curve_says() -> None:
    curve = DecodeCurve(0.01, 0.001, 1e-6, 1_000.0, 1e-6)
    decode, prefill = add_declared([{"batch": 10, "kv_tokens": 5_000}], [{"tokens": 1_000}], curve)
    assert decode[0]["declared_ms"] == pytest.approx(25.0)
    assert prefill[0]["declared_s"] == pytest.approx(1.5)


def test_the_reference_is_of_one_model_on_one_card(tmp_path: Path) -> None:
    assert read_reference(tmp_path) == {}
    file = tmp_path / "engine_aiconfigurator" / "DERIVED_decode_ms_per_token.csv.gz"
    file.parent.mkdir()
    rows = [
        "h100_sxm,sglang,Qwen3-8B,1,4,1024,6.4",
        "h100_sxm,sglang,Qwen3-8B,2,4,1024,3.4",
        "h100_sxm,vllm,Qwen3-8B,1,4,1024,7",
    ]
    file.write_bytes(
        gzip.compress(
            "\n".join(["system,engine,model,tp,batch,context,ms_per_token", *rows]).encode()
        )
    )
    assert read_reference(tmp_path) == {"1024/4": 6.4}


async def test_it_needs_the_folder_of_traces() -> None:
    with pytest.raises(UsageProblem, match="needs --data"):
        await measure(BenchOptions())
