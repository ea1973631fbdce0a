"""What a step gathers: tokens, version spans, phases; and stop strings around a cut."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1.engine_pb2 import StepFinished
from treadle_runtime.fields import seconds
from treadle_runtime.http.sglang import EngineChunk
from treadle_sidecar.step import LENGTH, STOP, SplitStops, StepOrder, StepRecord


def order(prompt: int = 10, resumed: int = 0) -> StepOrder:
    ids = array("i", range(prompt))
    return StepOrder(
        "k", "t", 0, 0.0, ids, array("i", range(resumed)), SamplingParams(max_new_tokens=100)
    )


def spans_of(finished: StepFinished) -> list[tuple[str, int, int]]:
    return [
        (span.weight_version, span.start_token, span.end_token) for span in finished.version_spans
    ]


def test_phases_follow_each_other_and_add_up_to_the_steps_time() -> None:
    record = StepRecord(order(), now=100.0, wall=5000.0)
    assert seconds(record.start_attempt(101.0).queue_time) == 1.0
    record.add_tokens(EngineChunk([1], [-0.1], "", "v1", 0), 103.0)
    record.add_tokens(EngineChunk([2, 3], [-0.1, -0.2], "", "v1", 0), 104.0)
    record.correct_spans([("v1", 0, 3)])
    record.preempt("other", 105.0)
    assert record.start_attempt(109.0).attempt == 1
    record.add_tokens(EngineChunk([4], [-0.3], "", "v1", 8), 109.5)
    finished = record.finish(LENGTH, 110.0)

    timing = finished.timing
    assert [seconds(part) for part in (timing.queue, timing.prefill, timing.decode)] == [
        5.0,
        2.5,
        2.5,
    ]
    assert (seconds(timing.accepted_at), seconds(timing.finished_at)) == (5000.0, 5010.0)
    assert (
        finished.preemptions,
        finished.resumed_prompt_tokens,
        finished.resumed_cached_tokens,
    ) == (1, 13, 8)
    assert spans_of(finished) == [("v1", 0, 4)]


def test_a_wait_is_told_by_its_cause_and_all_waits_are_the_queue() -> None:
    """In the queue until 101, paused until 103, in the queue until 104; evicted at 106; paused from
    107 to 110."""
    record = StepRecord(order(), now=100.0, wall=0.0)
    record.wait(101.0, paused=True)
    record.wait(103.0, paused=False)
    assert seconds(record.start_attempt(104.0).queue_time) == 4.0
    record.wait(105.0, paused=True)  # it runs
    record.preempt("other", 106.0)
    record.wait(107.0, paused=True)
    record.wait(110.0, paused=False)
    assert seconds(record.start_attempt(112.0).queue_time) == 6.0

    timing = record.finish(STOP, 113.0).timing
    assert [seconds(part) for part in (timing.queue, timing.preempted, timing.weights)] == [
        10.0,
        3.0,
        5.0,
    ]
    assert seconds(timing.prefill) == 3.0


def test_the_engines_own_spans_replace_what_the_chunks_said() -> None:
    """A trainer updates the engine in place: a chunk may still carry the old version, the engine's
    account is exact."""
    record = StepRecord(order(resumed=5), now=0.0, wall=0.0)
    record.start_attempt(0.0)
    record.add_tokens(EngineChunk([1, 2], [0.0, 0.0], "", "v1", 0), 1.0)
    record.correct_spans([("v1", 0, 2)])
    record.preempt("", 2.0)
    record.start_attempt(3.0)
    record.add_tokens(EngineChunk([3, 4, 5], [0.0] * 3, "", "v1", 0), 4.0)
    record.add_tokens(EngineChunk([6], [0.0], "", "v2", 0), 5.0)
    record.correct_spans([("v1", 0, 1), ("v2", 1, 4)])
    assert spans_of(record.finish(STOP, 6.0)) == [("v1", 5, 8), ("v2", 8, 11)]


@pytest.mark.parametrize(
    "account",
    [
        [("v2", 0, 2)],
        [("v2", 1, 3)],
        [("v2", 0, 2), ("v3", 1, 3)],
        [("v2", 0, 1), ("v3", 2, 3)],
        [("v2", 0, 4), ("v3", 4, 3)],
    ],
)
def test_an_account_that_does_not_cover_the_attempt_is_left_aside(
    account: list[tuple[str, int, int]],
) -> None:
    record = StepRecord(order(), now=0.0, wall=0.0)
    record.start_attempt(0.0)
    record.add_tokens(EngineChunk([1, 2, 3], [0.0] * 3, "", "v1", 0), 1.0)
    record.correct_spans(account)
    assert spans_of(record.finish(STOP, 2.0)) == [("v1", 0, 3)]


@given(
    st.text("ab", max_size=30),
    st.lists(st.integers(1, 3), max_size=30),
    st.integers(0, 30),
    st.text("ab", min_size=1, max_size=5),
)
def test_a_split_stop_string_is_found_where_the_whole_text_has_it(
    text: str, chunks: list[int], cut_at: int, stop: str
) -> None:
    """Against a search of the whole text: only a match that spans the cut is this code's to
    find."""
    cut_at = min(cut_at, len(text))
    before, after = text[:cut_at], text[cut_at:]
    if stop in before:
        return  # the engine has ended the step then
    stops = SplitStops([stop], before)
    begins = text.find(stop)
    spans = 0 <= begins < cut_at
    found_after = None
    position = 0
    for size in [*chunks, len(text)]:
        piece = after[position : position + size]
        position += len(piece)
        if piece and found_after is None and stops.completes(piece):
            found_after = position
    assert (found_after is not None) == spans
    if found_after is not None:
        assert cut_at + found_after >= begins + len(stop)


def test_before_any_cut_nothing_is_found() -> None:
    stops = SplitStops(["stop"])
    assert not stops.completes("st")
    assert not stops.completes("op"), "the engine sees this one itself"
    assert not stops.completes(" st")
    stops.cut()
    assert stops.completes("op")
