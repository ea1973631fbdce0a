"""The simulated engine: what one sequence takes; slots, KV, caches and failures."""

import numpy as np
import pytest
from support.simulated import KV_BYTES_PER_TOKEN, SLOW, LoneEngine, decode_s, engine_step
from treadle_core.engine_queue.preemptive_queue import DEFAULT_MIN_RUN_TOKENS
from treadle_sim.batch import EngineStep


def test_one_sequence_takes_what_the_curve_says() -> None:
    alone = LoneEngine()

    alone.run((0.0, engine_step("a", 1_000, 500), 0.0))

    assert alone.finished["a"] == pytest.approx(
        SLOW.prefill_s(1_000, 0) + decode_s(1_000, 500), rel=1e-9
    )
    assert alone.engine.busy_s == pytest.approx(alone.finished["a"], rel=1e-9)


def test_no_more_than_the_slots_run_at_once() -> None:
    alone = LoneEngine(slots=2)
    steps = [engine_step(str(i), 100, 100, index=i) for i in range(4)]

    alone.run(*((0.0, one, float(-i)) for i, one in enumerate(steps)))

    assert alone.finished["2"] > alone.finished["0"], "the third had to wait"
    assert steps[0].queue_s == 0.0
    assert steps[2].queue_s == pytest.approx(alone.finished["0"], rel=1e-6)


def test_a_step_of_higher_priority_evicts_the_lowest_at_the_end_of_a_decode_step_and_its_kv_stays() -> (
    None
):
    alone = LoneEngine(slots=1, preempt=True)
    low, high = engine_step("low", 1_000, 400), engine_step("high", 100, 50, index=1)

    alone.run((0.0, low, 1.0), (2.0, high, 9.0))

    began_s = SLOW.prefill_s(1_000, 0)
    ends_s = began_s + np.cumsum(
        [SLOW.decode_s(1) + SLOW.per_kv_token_s * (1_000 + i) for i in range(1, 400)]
    )
    evicted_s = float(ends_s[ends_s > 2.0][0])
    assert alone.preempted == {"low": pytest.approx(evicted_s)}
    assert high.queue_s == pytest.approx(evicted_s - 2.0, rel=1e-9)
    assert alone.finished["high"] == pytest.approx(
        evicted_s + high.prefill_s + high.decode_s, rel=1e-9
    )
    assert alone.finished["high"] < alone.finished["low"]
    assert low.prefilled_tokens == 1_000 + 1, "resumed from the radix tree, but for the last token"
    assert low.queue_s == pytest.approx(high.prefill_s + high.decode_s, rel=1e-6)


def test_a_running_step_is_evicted_as_soon_as_it_has_its_least_tokens() -> None:
    alone = LoneEngine(slots=1, preempt=True)
    high = engine_step("high", 100, 50, index=1)

    alone.run((0.0, engine_step("low", 1_000, 400), 1.0), (0.03, high, 9.0))

    evicted_s = SLOW.prefill_s(1_000, 0) + decode_s(1_000, DEFAULT_MIN_RUN_TOKENS)
    assert high.queue_s == pytest.approx(evicted_s - 0.03, rel=1e-9)


def test_where_kv_is_short_the_next_step_waits_and_the_oldest_cached_context_goes() -> None:
    alone = LoneEngine(kv_tokens=2_000)
    first, second = engine_step("a", 1_200, 100), engine_step("b", 1_200, 100, index=1)

    alone.run((0.0, first, 0.0), (0.0, second, 0.0))

    assert second.queue_s >= first.prefill_s + first.decode_s - 1e-9
    assert alone.engine.cache.peek(0) == 0, "its room was needed"
    assert alone.engine.cache.peek(1) == 1_299
    engine = LoneEngine(kv_tokens=2_000).engine
    for index in range(3):
        engine.cache.put(index, f"p{index}", 500, 900)
    assert [engine.cache.peek(index) for index in range(3)] == [0, 900, 900], (
        "KV that comes takes the oldest's room"
    )


@pytest.mark.parametrize("host_bytes_per_s", [50e9, 1e8])
def test_a_context_that_the_engine_forgot_is_read_from_the_host_while_it_computes(
    host_bytes_per_s: float,
) -> None:
    alone = LoneEngine(kv_tokens=2_000, host_kv_tokens=3_000, host_bytes_per_s=host_bytes_per_s)
    steps = [EngineStep(name, at, "p", 200, 1_200, 100, 0.0) for at, name in enumerate("abc")]
    again = [EngineStep(name, at, "p", 200, 1_350, 10, 0.0) for at, name in ((1, "b"), (0, "a"))]

    alone.run(
        *((0.0, step, 0.0) for step in steps),
        *((9.0 * (at + 1), step, 0.0) for at, step in enumerate(again)),
    )

    assert [step.prefilled_tokens for step in again] == [51, 1_150], (
        "the host has room for two contexts"
    )
    load_s = (1_299 - 200) * KV_BYTES_PER_TOKEN / host_bytes_per_s
    assert again[0].prefill_s == pytest.approx(max(SLOW.prefill_s(51, 1_299), load_s), rel=1e-9)


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_returning_step_prefills_only_what_is_new_in_whole_pages_and_a_sibling_finds_the_prompt(
    page_tokens: int,
) -> None:
    alone = LoneEngine(page_tokens=page_tokens)
    again = engine_step("a2", 900, 10, prompt_tokens=500)  # 500 + 100 sampled + 300 observed
    sibling = EngineStep("s", 7, "p0", 500, 500, 10, 0.0)

    alone.run((0.0, engine_step("a1", 500, 100), 0.0), (30.0, again, 0.0), (60.0, sibling, 0.0))

    assert again.prefilled_tokens == 900 - 599 // page_tokens * page_tokens
    assert sibling.prefilled_tokens == 500 - 499 // page_tokens * page_tokens


def test_what_a_failure_cuts_short_counts_as_far_as_it_came() -> None:
    alone = LoneEngine()
    long = engine_step("a", 100_000, 10)
    alone.timeline.at(1.0, alone.engine.fail)
    alone.run((0.0, long, 0.0))

    assert SLOW.prefill_s(100_000, 0) > 2.0
    assert (alone.engine.busy_s, alone.engine.spans) == (1.0, [(0.0, 1.0, -1)])
    assert (long.queue_s, long.prefill_s) == (0.0, 1.0)


def test_an_engine_that_fails_during_an_update_works_as_soon_as_it_is_back() -> None:
    alone = LoneEngine()
    alone.timeline.at(0.5, alone.engine.pause, 30.0)
    alone.timeline.at(1.0, alone.engine.fail)
    alone.run((5.0, engine_step("a", 100, 100), 0.0))
    assert alone.finished["a"] < 10.0


def test_a_step_that_an_update_stopped_is_not_evicted_before_it_runs_again() -> None:
    alone = LoneEngine(slots=1, preempt=True)
    alone.timeline.at(5.0, alone.engine.pause, 3.0)
    alone.run(
        (0.0, engine_step("low", 100, 1_000), 1.0),
        (1.0, engine_step("lowest", 100, 10, index=1), 0.0),
        (6.0, engine_step("high", 100, 100, index=2), 9.0),
    )

    again_s = 8.0 + SLOW.prefill_s(600, 0)  # it has some 500 tokens by then
    assert list(alone.preempted) == ["low"]
    assert alone.preempted["low"] > again_s
    assert sorted(alone.finished, key=alone.finished.__getitem__) == ["high", "low", "lowest"]


def test_between_two_long_prompts_what_ranks_higher_decodes_as_long_as_the_first_one_took() -> None:
    """Two prompts of 20,000 tokens come together, and then one of 1,000. Result: the first answer
    is sampled while the second prompt waits; under a policy without preemption the engine reads
    both prompts before it decodes."""
    ends = {}
    for preempt in (True, False):
        alone = LoneEngine(preempt=preempt)
        first, second = engine_step("first", 20_000, 20), engine_step("second", 20_000, 20, index=1)
        short = engine_step("short", 1_000, 20, index=2)
        alone.run((0.0, first, 3.0), (0.0, second, 2.0), (0.1, short, 1.0))
        ends[preempt] = alone.finished
        if preempt:
            assert second.queue_s == pytest.approx(alone.finished["first"], rel=0.02), (
                "nothing higher decodes then"
            )
            assert alone.finished["short"] < alone.finished["second"]
    read_s = SLOW.prefill_s(20_000, 0)
    assert ends[True]["first"] < 1.6 * read_s < 2.0 * read_s < ends[False]["first"]
    assert max(ends[True].values()) < 1.3 * max(ends[False].values()), (
        "smaller batches decode a little longer"
    )


@pytest.mark.parametrize("preempt", [True, False])
def test_samples_that_come_together_prefill_their_prompt_once_where_the_queue_may_hold_them(
    preempt: bool,
) -> None:
    """While a step decodes, four samples of one prompt and one of another come at once. Result: the
    queue that may preempt lets one of the four read it first; an engine that gets them together
    prefills it four times."""
    alone = LoneEngine(preempt=preempt)
    samples = [EngineStep(f"s{number}", number, "prompt", 600, 600, 20, 0.0) for number in range(4)]
    other = EngineStep("other", 8, "another", 600, 600, 20, 0.0)

    alone.run(
        (0.0, engine_step("first", 100, 500, index=9), 1.0),
        *((1.0, step, 1.0) for step in (*samples, other)),
    )

    assert [step.prefilled_tokens for step in samples] == [
        600,
        *([1] * 3 if preempt else [600] * 3),
    ]
    assert other.queue_s == samples[0].queue_s
