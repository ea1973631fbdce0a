"""`bench real`: a cell of public traces, its page, what another seed plays again, what tools and
hosts are made of."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from treadle_cli.exits import UsageProblem
from treadle_sim.systems import ORACLE, PAUSING, TREADLE, VERL

from treadle_bench.bench import BenchOptions
from treadle_bench.real.measure import (
    BASELINES,
    BENCH,
    SIBLINGS,
    _batch,
    _jobs_of,
    _play_again,
    least_prefill_tokens,
    measure,
    play_cell,
)
from treadle_bench.real.page import check_aims, explain_loss
from treadle_bench.rollouts import Batch, Job, Played, find_bound, setting_of

RUN = {
    "model": "m",
    "service": "postgres",
    "success": True,
    "turns": 4,
    "out_tokens": 400,
    "censored": None,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with four runs of one source."""
    (tmp_path / "mcpmark").mkdir()
    rows = [
        {**RUN, "prompt_id": f"t{n}", "sample": 1, "in_tokens": 9_800 + 900 * n} for n in range(4)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "mcpmark" / "runs.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return tmp_path


async def test_a_cell_compares_treadle_with_every_baseline_and_its_page_needs_the_json_alone(
    data: Path, tmp_path: Path
) -> None:
    batches = [_batch("mcpmark", 2, 0.1, 0.1, seed, data) for seed in (0, 1)]
    assert (batches[0].prompts, batches[0].trajectories) == (1, 16)
    assert {job.degree for job in _jobs_of(batches[0])} == {0, 2}
    cell = await play_cell("mcpmark", 0.1, batches, BenchOptions(workers=1))
    assert set(cell["policy"]) == {
        system.name for system in (*BASELINES, TREADLE, SIBLINGS, ORACLE)
    }
    assert (cell["trace"], cell["load"], cell["tools"], cell["gpus"], cell["seeds"]) == (
        "mcpmark",
        0.1,
        0.1,
        2,
        [0, 1],
    )
    assert cell["best_baseline"] in cell["degree"]
    low, high = cell["spread"]["ratio_to_best_baseline"]
    assert low <= cell["ratio_to_best_baseline"] <= high
    assert cell["ratio_to_bound"] <= 1.0
    assert 0.0 < cell["kv_demand"] < 1.0
    assert set(cell["p50_s"]) == set(cell["recomputed"]) == set(cell["policy"])
    assert min(cell["recomputed"].values()) >= 0.01

    figures = {
        "accelerator": "H200",
        "model": "Qwen3-14B",
        "seeds": [0, 1],
        "scale": None,
        "missing": 47,
        "cells": [cell],
    }
    figures |= {"least": cell["ratio_to_best_baseline"], "geomean": cell["ratio_to_best_baseline"]}
    BENCH.write(figures, tmp_path)
    assert json.loads((tmp_path / "real.json").read_text()) == figures
    assert (
        "| mcpmark | 2 GPUs, 0.1 a slot, tools × 0.1 | 16 |" in (tmp_path / "real.md").read_text()
    )
    assert "**47 of 48 cells are not played yet**" in (tmp_path / "real.md").read_text()
    assert (tmp_path / "real.png").stat().st_size > 0


async def test_a_large_cell_plays_one_seed_and_equals_that_seed_alone(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = _batch("mcpmark", 2, 0.1, 1.0, 0, data)
    options = BenchOptions(workers=1)
    alone = await play_cell("mcpmark", 0.1, [batch], options)
    assert alone["bound_s"] == pytest.approx(find_bound(batch)["bound_s"], abs=1e-3)
    monkeypatch.setattr("treadle_bench.real.measure.MOST_FOR_ALL_SEEDS", 15)
    both = await play_cell("mcpmark", 0.1, [batch, replace(batch, seed=1)], options)
    assert both | {"took_s": 0.0} == alone | {"took_s": 0.0}


async def test_a_run_goes_on_where_it_was_stopped_and_writes_after_each_cell(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle_bench.real.measure.SOURCES", {"mcpmark": "mcpmark"})
    monkeypatch.setattr("treadle_bench.real.measure.LOADS", (0.1,))
    monkeypatch.setattr("treadle_bench.real.measure.GPUS", (2,))
    options = BenchOptions(repeats=1, data=data, pictures=tmp_path, workers=1)
    found = await measure(options)
    assert json.loads((tmp_path / "real.json").read_text()) == found
    assert found["missing"] == 0
    assert [(cell["trace"], cell["tools"]) for cell in found["cells"]] == [
        ("mcpmark", 1.0),
        ("mcpmark", 0.1),
    ]

    kept, lacking = found["cells"][0] | {"treadle_s": 7.0}, found["cells"][1]
    again = await measure(replace(options, earlier={**found, "cells": [kept]}))
    assert again["cells"][0] == kept
    assert again["cells"][1] | {"took_s": 0.0} == lacking | {"took_s": 0.0}
    with pytest.raises(UsageProblem, match=r"--resume: seeds is \[0\] there and \[1\] here"):
        await measure(replace(options, seed=1, earlier=found))


async def test_it_needs_the_folder_of_traces() -> None:
    with pytest.raises(UsageProblem, match="needs --data"):
        await measure(BenchOptions())


def test_tools_take_their_share_and_hosts_keep_theirs(data: Path) -> None:
    whole, fast = (setting_of(_batch("mcpmark", 2, 0.1, share, 0, data)) for share in (1.0, 0.1))
    for one, other in zip(whole.workload.trajectories, fast.workload.trajectories, strict=True):
        assert other.tool_s == pytest.approx(0.1 * one.tool_s)
        assert other.gen_tokens == one.gen_tokens
    assert all(model.host_kv_tokens == 2 * model.kv_tokens for model in whole.models)


def test_any_rollout_prefills_each_prompt_once_and_what_tools_say(data: Path) -> None:
    batch = _batch("mcpmark", 2, 0.1, 1.0, 0, data)
    works = setting_of(batch).workload.trajectories
    prompts = {work.prompt_id: work.prompt_tokens for work in works}
    said = sum(work.final_context_tokens - work.prompt_tokens - work.gen_tokens for work in works)
    last = sum(work.steps[-1].obs_tokens for work in works)
    turns = sum(len(work.steps) - 1 for work in works)
    assert least_prefill_tokens(batch) == sum(prompts.values()) + said - last + turns


def test_another_seed_plays_the_best_degree_of_each_baseline_and_all_that_came_near_the_best() -> (
    None
):
    first = Batch("mcpmark", "m", 8, 1, 0)
    nothing = Played(0.0, 0.0, 0.0, "", 0, 0, {}, {}, 0, 0.0, None)  # type: ignore[arg-type]
    found = {Job(first, TREADLE): replace(nothing, makespan_s=1.0)}
    for system in BASELINES:
        for degree, seconds in ((2, 200.0), (4, 130.0), (8, 140.0)):
            found[Job(first, system, degree)] = replace(nothing, makespan_s=seconds)
    found[Job(first, VERL, 4)] = replace(nothing, makespan_s=100.0)
    found[Job(first, VERL, 2)] = replace(nothing, makespan_s=114.0)
    second = replace(first, seed=1)
    again = _play_again(second, found)
    assert {job.batch for job in again} == {second}
    assert {job.degree for job in again if job.system is VERL} == {2, 4}
    assert {job.degree for job in again if job.system is PAUSING} == {4}
    assert [job.system for job in again[:3]] == [TREADLE, SIBLINGS, ORACLE]


def _cell(
    ratio: float, told: float, bound: float, *, kv: float = 0.5, by: str = "work"
) -> dict[str, Any]:
    last = {"queue_s": 1.0, "prefill_s": 2.0, "decode_s": 3.0, "tool_s": 400.0}
    ratios = {
        "ratio_to_best_baseline": ratio,
        "ratio_to_oracle": told,
        "ratio_to_bound": bound,
        "recomputed_ratio": 1.0,
    }
    return {**ratios, "kv_demand": kv, "bound_by": by, "best_baseline": "verl", "last": last}


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (_cell(0.95, 0.94, 0.94), "verl is faster by 5.3%, within 2% of the bound"),
        (_cell(0.95, 0.90, 0.50), "because of the predictor's error:"),
        (_cell(0.95, 0.97, 0.50), "because of the plan and of the predictor's error"),
        (_cell(0.95, 1.00, 0.50), "told every length, Treadle is no faster"),
    ],
)
def test_the_page_says_who_is_faster_and_why(cell: dict[str, Any], says: str) -> None:
    assert says in explain_loss(cell)
    assert explain_loss(cell | {"ratio_to_best_baseline": 1.0}) == ""


def test_the_page_counts_the_cells_that_reach_each_aim() -> None:
    cells = [
        _cell(1.5, 0.9, 0.8, kv=2.0),
        _cell(1.3, 1.1, 0.95, kv=2.0, by="tools"),
        _cell(0.9, 1.0, 0.8),
    ]
    assert [reached for _aim, reached in check_aims({"cells": cells, "geomean": 1.2})] == [
        "2 of 3 cells (0.90–1.50)",
        "1.20; 1.42 if every rollout ended on its bound",
        "1 of 2 cells (1.30–1.50); 1.60 if every rollout ended on its bound, which leaves room "
        "for 1.4 in 1",
        "2 of 3 cells (0.90–1.10)",
        "3 of 3 cells (1.00–1.00)",
    ]
