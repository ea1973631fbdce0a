"""The max-of-K table and the descriptions of workloads, held to what is known of them."""

import json
import math
from pathlib import Path

import pytest
from treadle_core.rollouts.tail import expected_longest, longest_by_formula
from treadle_sim.workloads.workload import Step, TrajectoryWork

from treadle_bench.bench import BenchOptions
from treadle_bench.long_tail.measure import PRINTED, PRINTED_DIGIT, VARIATIONS, measure
from treadle_bench.workloads.measure import describe, within_prompt


def work(prompt_id: str, sample: int, *gen_tokens: int) -> TrajectoryWork:
    return TrajectoryWork(prompt_id, sample, 100, tuple(Step(each, 10, 0.5) for each in gen_tokens))


@pytest.mark.parametrize(("k", "c"), PRINTED)
def test_the_formula_gives_what_was_printed_and_lies_above_the_mean_maximum(
    k: int, c: float
) -> None:
    assert longest_by_formula(k, c) == pytest.approx(PRINTED[k, c], abs=PRINTED_DIGIT)
    assert 1.2 * expected_longest(k, c) < longest_by_formula(k, c) < 1.7 * expected_longest(k, c)


def test_the_longer_of_two_is_as_the_closed_form_has_it() -> None:
    """E max of two log-normals of mean 1: 2 P(z < s / sqrt 2)."""
    for c in VARIATIONS:
        s = math.sqrt(math.log1p(c * c))
        assert expected_longest(2, c) == pytest.approx(1.0 + math.erf(s / 2.0), rel=1e-9)
        assert expected_longest(1, c) == pytest.approx(1.0, rel=1e-9)


async def test_what_is_drawn_agrees_with_the_integral(tmp_path: Path) -> None:
    found = await measure(BenchOptions(repeats=2, pictures=tmp_path))
    assert len(found["rows"]) == len(PRINTED)
    for row in found["rows"]:
        assert row["expected_max"] == pytest.approx(row["expected_max_exact"], rel=0.03)
        assert row["max_p10"] < row["max_p50"] < row["max_p90"]
    assert json.loads(json.dumps(found)) == found
    assert (tmp_path / "long-tail.png").stat().st_size > 10_000


def test_the_share_within_prompts_is_none_without_repeats_and_all_where_prompts_are_alike() -> None:
    assert within_prompt([work("p", 0, 5), work("q", 0, 50)]) is None
    assert (
        within_prompt([work("p", 0, 5), work("p", 1, 5), work("q", 0, 50), work("q", 1, 50)]) == 0.0
    )
    assert (
        within_prompt([work("p", 0, 5), work("p", 1, 50), work("q", 0, 5), work("q", 1, 50)]) == 1.0
    )
    assert within_prompt([work("p", 0, 5), work("p", 1, 5)]) == 0.0


def test_a_description_counts_what_is_held_and_what_is_read() -> None:
    found = describe([work("p", 0, 20, 30), work("q", 0, 50)])
    # prompt, 50 generated, the first answer: nobody reads the last
    assert found["context_tokens"]["max"] == 160.0
    assert found["prefill_over_decode"] == pytest.approx((160 + 150 - 100) / 100)
    assert (found["steps_mean"], found["tool_s_mean"]) == (1.5, 0.5)
    json.dumps(found)
