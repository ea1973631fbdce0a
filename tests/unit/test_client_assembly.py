"""One step put together from the events of one or several streams."""

import pytest
from treadle.common.v1 import tokens_pb2
from treadle.engine.v1 import engine_pb2
from treadle.errors import StreamBroken
from treadle.step import StepAssembly
from treadle.types import VersionSpan, pack_ids, pack_logprobs

LENGTH = engine_pb2.FINISH_REASON_LENGTH


def chunk(
    offset: int, count: int, version: str = "1", logprobs: int | None = None
) -> engine_pb2.TokenChunk:
    return engine_pb2.TokenChunk(
        offset=offset,
        token_ids=tokens_pb2.TokenIds(int32_le=pack_ids(list(range(offset, offset + count)))),
        logprobs=tokens_pb2.Logprobs(
            float32_le=pack_logprobs([-0.5] * (count if logprobs is None else logprobs))
        ),
        weight_version=version,
    )


def finished(
    count: int, *spans: tuple[str, int, int], reason: engine_pb2.FinishReason.ValueType = LENGTH
) -> engine_pb2.StepFinished:
    told = [
        tokens_pb2.VersionSpan(weight_version=v, start_token=a, end_token=b) for v, a, b in spans
    ]
    return engine_pb2.StepFinished(reason=reason, output_tokens=count, version_spans=told)


def begun() -> StepAssembly:
    step = StepAssembly(turn=3, now=0.0)
    step.set_engine("e0")
    step.enter("prefill", 1.0)
    return step


def test_times_are_queue_until_admitted_prefill_until_the_first_token_decode_until_the_end() -> (
    None
):
    step = begun()
    step.add_chunk(chunk(0, 2), 3.0)
    step.add_chunk(chunk(2, 2), 4.0)
    step.preempt(engine_pb2.StepPreempted(output_tokens=4), 5.0)
    step.enter("prefill", 7.0)
    step.add_chunk(chunk(4, 1), 7.5)
    result = step.finish(finished(5, ("1", 0, 5)), 9.0)
    assert [(s.kind, s.start_s, s.end_s, s.engine_id, s.turn) for s in result.spans] == [
        ("queue", 0.0, 1.0, "e0", 3),
        ("prefill", 1.0, 3.0, "e0", 3),
        ("decode", 3.0, 5.0, "e0", 3),
        ("queue", 5.0, 7.0, "e0", 3),
        ("prefill", 7.0, 7.5, "e0", 3),
        ("decode", 7.5, 9.0, "e0", 3),
    ]
    assert (result.queue_s, result.prefill_s, result.decode_s) == (3.0, 2.5, 3.5)
    assert result.preemptions == 1


def test_the_engines_account_of_versions_replaces_that_of_its_chunks_but_not_of_another_engine() -> (
    None
):
    step = begun()
    step.add_chunk(chunk(0, 3, "1"), 2.0)
    step.enter("queue", 3.0)
    step.set_engine("e1")
    step.enter("prefill", 4.0)
    step.add_chunk(chunk(3, 3, "1"), 5.0)
    result = step.finish(finished(6, ("1", 3, 4), ("2", 4, 6)), 6.0)
    assert result.version_spans == (VersionSpan("1", 0, 4), VersionSpan("2", 4, 6))
    assert result.engine_ids == ("e0", "e1")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (chunk(3, 1), "a gap"),
        (chunk(1, 1), "a repeat"),
        (chunk(2, 2, logprobs=1), "2 tokens with 1 logprobs"),
    ],
)
def test_a_chunk_that_does_not_join_is_an_error(message: engine_pb2.TokenChunk, says: str) -> None:
    step = begun()
    step.add_chunk(chunk(0, 2), 2.0)
    with pytest.raises(StreamBroken, match=says):
        step.add_chunk(message, 3.0)
    assert step.token_ids == [0, 1]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (finished(3, ("1", 0, 3)), "counts 3"),
        (finished(2, ("1", 0, 1)), "cover 1 of 2"),
        (finished(2, ("1", 1, 2)), "gap or overlap at token 0"),
        (finished(2, ("1", 0, 2), ("2", 1, 2)), "gap or overlap at token 2"),
        (finished(2), "cover 0 of 2"),
        (finished(2, ("1", 0, 2), reason=engine_pb2.FINISH_REASON_UNSPECIFIED), "finish reason 0"),
    ],
)
def test_a_last_word_that_does_not_agree_is_an_error(
    message: engine_pb2.StepFinished, says: str
) -> None:
    step = begun()
    step.add_chunk(chunk(0, 2), 2.0)
    with pytest.raises(StreamBroken, match=says):
        step.finish(message, 3.0)


def test_a_preemption_that_counts_other_tokens_is_an_error() -> None:
    step = begun()
    step.add_chunk(chunk(0, 2), 2.0)
    with pytest.raises(StreamBroken, match="preempted after 5"):
        step.preempt(engine_pb2.StepPreempted(output_tokens=5), 3.0)
