"""`bench real`: a cell of public traces, what another seed plays again, and what tools and hosts are made of."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from treadle_sim.systems import BASELINES, ORACLE, PAUSING, TREADLE, VERL

from treadle_bench.bench import BenchOptions
from treadle_bench.real.measure import _batch, _jobs_of, _make_cell, _play_again, least_prefill_tokens
from treadle_bench.rollouts import Batch, Job, Played, find_bound, play_all, setting_of

RUN = {"model": "m", "service": "postgres", "success": True, "turns": 4, "out_tokens": 400, "censored": None}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with four runs of one source."""
    (tmp_path / "mcpmark").mkdir()
    rows = [{**RUN, "prompt_id": f"t{n}", "sample": 1, "in_tokens": 9_800 + 900 * n} for n in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "mcpmark" / "runs.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return tmp_path


async def test_a_cell_compares_treadle_with_every_baseline_at_its_best_degree(data: Path) -> None:
    batch = _batch("mcpmark", 2, 0.1, 0.1, 0, data)
    assert (batch.prompts, batch.trajectories) == (1, 16)
    jobs = _jobs_of(batch)
    cell = _make_cell(batch, await play_all(jobs, BenchOptions(workers=1), "a cell"))
    own = {TREADLE.name, ORACLE.name}
    assert set(cell["policy"]) == {system.name for system in BASELINES} | own
    assert cell["ratio_to_best_baseline"] == min(cell["policy"][name] for name in cell["degree"]) / cell["treadle_s"]
    assert cell["ratio_to_bound"] <= 1.0
    assert cell["bound_s"] == find_bound(batch)["bound_s"]
    assert set(cell["recomputed"]) == set(cell["policy"])
    assert min(cell["recomputed"].values()) >= 0.01


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


def test_another_seed_plays_the_best_degree_of_each_baseline_and_all_that_came_near_the_best() -> None:
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
    assert [job.system for job in again[-2:]] == [TREADLE, ORACLE]
