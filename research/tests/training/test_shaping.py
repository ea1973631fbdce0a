"""`bench shaping`: a quick run has every cell, its page needs the JSON alone, and the fit is a line
between points."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from treadle_sim.engine_model import EngineModel, StepCurve

from treadle_bench.bench import BenchOptions
from treadle_bench.shaping import patches
from treadle_bench.shaping.agentic import BOUNDS, bound_rows, measure_latency, measure_redundancy
from treadle_bench.shaping.measure import BENCH, play
from treadle_bench.shaping.page import judge_targets, page_values
from treadle_bench.shaping.training import (
    ABLATION,
    DARTS,
    GPUS,
    LARGE,
    MODES,
    PUBLISHED_RATIO,
    RATE,
    TAIL,
    VERL,
    Job,
    cells,
    fit_imitation,
    in_mode,
    play_job,
    row_of,
)

RESULTS = Path(__file__).resolve().parents[2] / "results"
SHARE = 0.125


def test_the_fit_is_where_the_published_speedup_lies_between_two_that_were_played() -> None:
    found = fit_imitation(
        {(RATE, 0.0): 1.2, (RATE, 1.0): 1.4, (RATE, 2.0): 1.6, (2 * RATE, 0.0): 1.3}
    )
    assert found["imitation"] == pytest.approx(1.0 + (PUBLISHED_RATIO - 1.4) / 0.2)
    assert found["reached"]
    assert found["gradient"] == [[RATE, 1.2], [2 * RATE, 1.3]]
    never = fit_imitation({(RATE, 0.0): 1.2, (RATE, 1.0): 1.3, (RATE, 2.0): 1.25})
    assert (never["imitation"], never["reached"]) == (1.0, False)
    already = fit_imitation({(RATE, 0.0): 1.5, (RATE, 1.0): 1.6})
    assert (already["imitation"], already["reached"]) == (0.0, True)


def test_the_modes_differ_in_what_the_policy_learns_from() -> None:
    job = Job(LARGE, GPUS, DARTS, 0)
    off, gradient, imitation = (in_mode(job, mode, 0.7) for mode in MODES)
    assert (off.rate, gradient.imitation, imitation.imitation) == (0.0, 0.0, 0.7)
    assert gradient.rate == imitation.rate == RATE
    assert {scheme.name for scheme in ABLATION} == set(cells([0])["ablation"])


def test_a_row_compares_a_scheme_with_verl_of_the_same_seeds() -> None:
    jobs = [
        [Job(LARGE, GPUS, scheme, seed, share=SHARE) for seed in (0, 1)] for scheme in (TAIL, VERL)
    ]
    done = {job: play_job(job) for of in jobs for job in of}
    row = row_of("ablation", TAIL.name, "off", (jobs[0], jobs[1]), done)
    speedups = [
        done[verl]["seconds"] / done[tail]["seconds"] for tail, verl in zip(*jobs, strict=True)
    ]
    assert row["speedup"] == pytest.approx(np.mean(speedups), abs=1e-3)
    assert row["spread"] == pytest.approx(sorted(speedups), abs=1e-3)
    assert row["deferred"] > 0.0 and row["sampled_over_trained_tokens"] > 1.0
    assert done[jobs[1][0]]["kept_samples"] == 1.0


def test_static_batches_take_the_sum_of_their_longest() -> None:
    model = EngineModel(
        "toy",
        "toy",
        1,
        64,
        3 * (250 + patches.LIMIT_TOKENS),
        1,
        StepCurve((1.0,), (0.01,), 0.0, 0, 0, 0),
    )
    lengths = np.array([10, 50, 20, 100, 5])
    assert patches.static_s(model, [lengths], 1) == pytest.approx(0.01 * (50 + 100) + 2 * 0.01)
    assert patches.static_s(model, [lengths], 2) == pytest.approx(
        max(0.01 * (20 + 1), 0.01 * (100 + 1))
    )


def test_a_cap_and_paged_batches_shorten_a_rollout() -> None:
    rows = {row["name"]: row for row in patches.measure_patches([0], SHARE)}
    assert list(rows) == list(patches.ROWS)
    assert rows[patches.STATIC]["relative"] == 1.0
    assert (
        rows[patches.CAPPED]["seconds"]
        < rows[patches.PAGED]["seconds"]
        < rows[patches.STATIC]["seconds"]
    )
    assert rows[patches.DYNAMIC]["kept"] < 1.0 == rows[patches.CAPPED]["kept"]
    assert 0.0 < rows[patches.CAPPED]["cut_successes"] < 0.15
    assert rows[patches.DYNAMIC_ALONE]["cut_successes"] == 0.0


def test_batch_level_turns_and_missing_redundancy_cost_time() -> None:
    assert measure_latency((5.0, 5.0), 0, SHARE)["ratio"] > 1.2
    sizes = ((1.0, 8), (1.0, 12), (1.5, 12))
    plain, larger, more = (measure_redundancy(*each, 0, SHARE)["seconds"] for each in sizes)
    assert max(larger, more) < plain
    rows = bound_rows({(bound,): [{"step_s": 10.0 / bound}] for bound in BOUNDS})
    assert [row["speedup"] for row in rows] == pytest.approx(list(BOUNDS))


async def test_calls_in_child_processes_give_what_calls_here_give() -> None:
    calls: dict[int, tuple[Any, ...]] = {number: (float(number),) for number in (1, 4)}
    options = BenchOptions(progress=Console(quiet=True))
    assert await play(math.sqrt, calls.items(), options, "roots") == {1: 1.0, 4: 2.0}
    assert await play(math.sqrt, calls.items(), replace(options, workers=1), "roots") == {
        1: 1.0,
        4: 2.0,
    }


def test_the_page_says_which_targets_are_missed_and_where_a_scheme_loses(tmp_path: Path) -> None:
    figures = json.loads((RESULTS / "shaping.json").read_text())
    values = page_values(figures)
    assert set(values["tables"]["ablation"]) == {scheme.name for scheme in ABLATION}
    assert values["order"]["tail batching"] > 2.0 * values["order"]["verl"] == 2.0
    best = max(of["off"]["speedup"] for of in values["tables"]["ablation"].values())
    assert all(f"({best:.2f})" in values["ahead"][ours]["off"][0] for ours in values["ahead"])
    worse = {
        **figures,
        "patches_vs_static": 0.5,
        "cells": [{**row, "speedup": 0.9} for row in figures["cells"]],
    }
    assert judge_targets(worse)[-2][1:] == ("0.500", "not reached")
    assert len(page_values(worse)["losses"]) == len(figures["cells"])
    replace(BENCH, draw=None).write(worse, tmp_path)
    assert "- ablation, DARTS, off: 0.90" in (tmp_path / "shaping.md").read_text()
