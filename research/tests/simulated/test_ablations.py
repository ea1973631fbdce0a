"""The simulated figures that exchange one part, Heddle's tables, and RollArt's affinity."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from treadle_core.actions import StartMigration
from treadle_core.events import MoveEnded, ToolFinished
from treadle_core.model import EngineSpec
from treadle_sim.engine_model import engine_model
from treadle_sim.workloads.workload import Step, TrajectoryWork, write_traces

from treadle_bench.ablations.measure import ORDERINGS, PLACEMENTS
from treadle_bench.affinity.measure import (
    BLOCK,
    COMPUTE,
    DECODE_HEAVY,
    LLM,
    PREFILL_HEAVY,
    draw_works,
    interleave,
    prefill_over_decode,
    route,
    work_s,
)
from treadle_bench.bench import BenchOptions
from treadle_bench.command import BENCHES
from treadle_bench.heddle_tables.measure import MoveLog

ONE_GPU = 1 / 64


@pytest.fixture
def tiny(tmp_path: Path) -> BenchOptions:
    file = tmp_path / "tiny.jsonl"
    steps = [(Step(10 + 7 * index, 20, 0.1), Step(5, 0, 0.1)) for index in range(8)]
    write_traces(
        file,
        [TrajectoryWork(f"p{index // 2}", index % 2, 50, each) for index, each in enumerate(steps)],
    )
    return BenchOptions(
        repeats=2, traces=file, scale=ONE_GPU, workers=1, pictures=tmp_path / "drawn"
    )


@pytest.mark.parametrize("name", ["heddle4", "heddle14", "heddle15", "heddle16"])
async def test_a_figure_writes_what_it_needs_to_be_drawn_again(
    name: str, tiny: BenchOptions, tmp_path: Path
) -> None:
    found = await BENCHES[name].run(tiny)
    assert tiny.pictures is not None
    assert json.loads((tiny.pictures / f"{name}.json").read_text()) == json.loads(json.dumps(found))
    assert all(value > 0.0 for row in found["rows"] for value in row.get("ratio_to", {}).values())
    BENCHES[name].write(found, tmp_path / "again")
    assert (tmp_path / "again" / f"{name}.md").read_bytes() == (
        tiny.pictures / f"{name}.md"
    ).read_bytes()
    assert (tmp_path / "again" / f"{name}.png").stat().st_size > 0


async def test_the_simulator_is_timed_on_the_batch_that_it_names(tiny: BenchOptions) -> None:
    found = await BENCHES["simulator"].run(replace(tiny, repeats=1))
    assert (found["gpus"], found["trajectories"]) == (1, 96)
    assert found["s"] == max(row["s"] for row in found["rows"] if row["system"] == "treadle") > 0.0


async def test_the_tables_measure_every_cell(tiny: BenchOptions) -> None:
    found = await BENCHES["heddle-tables"].run(replace(tiny, repeats=1))
    assert [row["model"] for row in found["rows"]] == ["Qwen3-8B", "Qwen3-14B", "Qwen3-32B"]
    for row in found["rows"]:
        assert row["tool_s"] == pytest.approx(0.1)
        assert min(row["placement_ms"], row["resources_ms"], row["predict_s"]) > 0.0


def test_the_ablations_exchange_the_part_that_they_name_and_no_other() -> None:
    ours, _ = ORDERINGS["progressive"]
    for name, (system, degree) in ORDERINGS.items():
        same = replace(system.policy, ordering=ours.policy.ordering, preempt=ours.policy.preempt)
        # that one does not reserve either, and says so
        assert (same == ours.policy) == ("no room held" not in name)
        assert (system.allocated, degree) == (ours.allocated, 0)
    planned, _ = PLACEMENTS["planned"]
    for system, degree in PLACEMENTS.values():
        assert system.policy.ordering is planned.policy.ordering
        assert (system.predictor, degree) == (planned.predictor, 1)


def test_a_move_is_masked_where_it_ends_before_its_tool_call() -> None:
    log = MoveLog()
    engine = EngineSpec("e0", "e0")
    for name in ("early", "late", "lost"):
        log(
            1.0,
            ToolFinished("another"),
            [StartMigration(name, name, engine, engine, 0, 1.0, "", True, 9.0)],
        )
    log(1.5, MoveEnded("early", "m1", moved=True), [])
    log(2.0, ToolFinished("late"), [])
    log(3.0, MoveEnded("late", "m2", moved=True), [])
    log(3.0, MoveEnded("lost", "m3", reason="took too long"), [])
    assert (log.asked, log.seconds, log.early) == (3, [0.5, 2.0], 1)


def test_work_that_reads_goes_to_the_compute_bound_pool() -> None:
    tasks = {"reads": PREFILL_HEAVY, "writes": DECODE_HEAVY}
    now, before = (
        {name: draw_works(kind, 6, 0, name, epoch=epoch) for name, kind in tasks.items()}
        for epoch in (0, 1)
    )
    assert prefill_over_decode(now["reads"]) > 10.0 > 1.0 > prefill_over_decode(now["writes"])
    split = route([*now["reads"], *now["writes"]], [*before["reads"], *before["writes"]])
    reads = [
        work.prompt_id.startswith("reads") for work in split if work.hardware_tags == (COMPUTE,)
    ]
    assert any(reads)
    assert all(reads) or sum(reads) == len(now["reads"])  # the better suited first


def test_work_costs_what_the_curve_says_of_a_full_batch() -> None:
    model = engine_model(LLM, COMPUTE, 1, 4)
    work = TrajectoryWork("p", 0, 100, (Step(10, 50, 0.0), Step(20, 0, 0.0)))
    curve = model.curve
    decode = 10 * (curve.decode_s(4.0) / 4.0 + curve.per_kv_token_s * 100)
    decode += 20 * (curve.decode_s(4.0) / 4.0 + curve.per_kv_token_s * 160)
    assert work_s(work, model) == pytest.approx(
        curve.prefill_s(100, 0) + curve.prefill_s(50, 110) + decode
    )


def test_tasks_by_turns_lose_no_trajectory() -> None:
    works = [
        draw_works(kind, 5, 0, name) for name, kind in (("a", PREFILL_HEAVY), ("b", DECODE_HEAVY))
    ]
    mixed = interleave(works)
    assert sorted(map(id, mixed)) == sorted(id(work) for each in works for work in each)
    assert {work.prompt_id[0] for work in mixed[:BLOCK]} == {"a"}
    assert mixed[BLOCK].prompt_id[0] == "b"


async def test_affinity_compares_every_system_under_every_routing(tmp_path: Path) -> None:
    options = BenchOptions(repeats=1, scale=0.01, workers=1, pictures=tmp_path)
    found = await BENCHES["affinity"].run(options)
    assert {row["task"]: row["suited"] for row in found["alone"]} == {
        "prefill-heavy": "H800",
        "decode-heavy": "H20",
    }
    ratios = {(row["system"], row["routing"]): row["ratio"] for row in found["mixed"]}
    assert len(ratios) == 3 * 3
    assert {ratio for (_, routing), ratio in ratios.items() if routing == "unrouted"} == {1.0}
    read = [row["read_per_written"] for row in found["sweep"]]
    assert read == sorted(read)
    assert (tmp_path / "affinity.png").stat().st_size > 0
