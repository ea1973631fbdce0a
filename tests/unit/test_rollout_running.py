"""Tokens of running trajectories over a real rollout service: pushed, streamed, taken back,
ended."""

import asyncio
from array import array
from collections.abc import AsyncIterator

import grpc
import pytest
from support.conditions import until
from support.finished_trajectories import (
    CALL_S,
    PROMPT_TOKENS,
    RolloutCalls,
    finished,
    rollout_service,
)
from support.rpc import refusal_of
from treadle.common.v1.tokens_pb2 import Logprobs, TokenIds
from treadle.rollout.v1 import rollout_pb2 as pb
from treadle_rollout.running import TOKEN_BYTES

LAST = 7  # of the tokens of finished(): three of the prompt and four sampled


@pytest.fixture
async def calls(nats_url: str) -> AsyncIterator[RolloutCalls]:
    async with rollout_service(nats_url) as calls:
        yield calls


def stretch(
    trajectory_id: str,
    start: int,
    end: int,
    *,
    prompt_id: str = "p0",
    sample: int = 0,
    first_id: int = 0,
) -> pb.TokenChunk:
    """Tokens [start, end) of finished(trajectory_id), or others from first_id on."""
    whole = finished(trajectory_id, prompt_id, sample, sampled=max(end - PROMPT_TOKENS, 1))
    ids = array("i", range(first_id + start, first_id + end))
    return pb.TokenChunk(
        trajectory_id=trajectory_id,
        prompt_id=prompt_id,
        sample=sample,
        start_token=start,
        tokens=TokenIds(int32_le=ids.tobytes()),
        loss_mask=whole.loss_mask[start:end],
        logprobs=Logprobs(float32_le=whole.logprobs.float32_le[4 * start : 4 * end]),
    )


async def push(calls: RolloutCalls, chunk: pb.TokenChunk) -> tuple[int, bool]:
    answer = await calls.stub.PushTokens(
        pb.PushTokensRequest(rollout_id="r", chunk=chunk), timeout=CALL_S
    )
    return answer.next_token, answer.wanted


class Reading:
    """A reader of the rollout's tokens, put together as a trainer would."""

    def __init__(self, calls: RolloutCalls, **how: int) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.starts: list[int] = []
        self.ended: dict[str, pb.TokensEnded] = {}
        self._stream = calls.stub.StreamTokens(
            pb.StreamTokensRequest(rollout_id="r", **how), timeout=CALL_S
        )
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._stream:
            if event.HasField("ended"):
                assert event.ended.trajectory_id not in self.ended
                self.ended[event.ended.trajectory_id] = event.ended
                continue
            chunk, known = event.chunk, self.tokens.setdefault(event.chunk.trajectory_id, [])
            assert chunk.trajectory_id not in self.ended
            assert chunk.start_token <= len(known), "a gap"
            self.starts.append(chunk.start_token)
            known[chunk.start_token :] = array("i", chunk.tokens.int32_le)


async def test_a_reader_gets_what_is_there_and_what_comes_and_how_it_ended(
    calls: RolloutCalls,
) -> None:
    """One of two samples is kept: the first is pushed in two parts and kept, its sibling ends with
    the group."""
    await calls.create(samples=2, keep=1)
    assert await push(calls, stretch("a", 0, 4)) == (4, True)
    reading = Reading(calls)
    await until(lambda: reading.tokens.get("a") == [0, 1, 2, 3])
    assert await push(calls, stretch("a", 4, LAST)) == (LAST, True)
    assert await push(calls, stretch("b", 0, 5, sample=1)) == (5, True)
    await until(lambda: len(reading.tokens.get("b", [])) == 5)
    await calls.submit(finished("a"))
    await reading.task  # the rollout is over
    assert reading.tokens == {"a": list(range(LAST)), "b": list(range(5))}
    assert reading.starts == [0, 4, 0]
    assert reading.ended["a"].kept
    assert (reading.ended["b"].kept, reading.ended["b"].drop_reason) == (
        False,
        pb.DROP_REASON_GROUP_SETTLED,
    )
    assert await push(calls, stretch("b", 5, 6, sample=1)) == (0, False)


async def test_one_that_waits_for_its_group_is_told_when_the_group_settles(
    calls: RolloutCalls,
) -> None:
    await calls.create(samples=2)
    await push(calls, stretch("a", 0, 4))
    reading = Reading(calls)
    await calls.submit(finished("a"))
    await until(lambda: reading.tokens.get("a") is not None)
    assert not reading.ended
    assert await push(calls, stretch("a", 4, 5)) == (4, False)
    await calls.submit(finished("b", sample=1))
    await reading.task
    assert reading.ended["a"].kept and set(reading.ended) == {"a"}


async def test_other_tokens_take_the_place_of_those_before_and_the_same_ones_are_not_sent_again(
    calls: RolloutCalls,
) -> None:
    await calls.create()
    reading = Reading(calls)
    await push(calls, stretch("a", 0, 6))
    await until(lambda: len(reading.tokens.get("a", [])) == 6)
    assert await push(calls, stretch("a", 2, 6)) == (6, True)  # a repeat
    assert await push(calls, stretch("a", 9, 12)) == (6, True)  # behind a gap
    assert await push(calls, stretch("a", 4, 8, first_id=100)) == (8, True)
    await until(lambda: reading.tokens["a"] == [0, 1, 2, 3, 104, 105, 106, 107])
    assert reading.starts == [0, 4]
    # its first token is there already
    assert await push(calls, stretch("a", 7, 9, first_id=100)) == (9, True)
    await until(lambda: reading.tokens["a"][-1] == 108)
    assert reading.starts == [0, 4, 8]
    reading.task.cancel()


async def test_chunks_have_as_many_tokens_as_asked_for_and_parts_have_prompts_of_their_own(
    calls: RolloutCalls,
) -> None:
    await calls.create(prompts=2)
    even, odd = Reading(calls, part=0, parts=2, min_tokens=5), Reading(calls, part=1, parts=2)
    for end in range(1, 8):
        for prompt_id in ("p0", "p1"):
            await push(calls, stretch(prompt_id, end - 1, end, prompt_id=prompt_id))
    for prompt_id in ("p0", "p1"):
        await calls.submit(finished(prompt_id, prompt_id))
    await asyncio.gather(even.task, odd.task)
    assert even.tokens == {"p0": [0, 1, 2, 3, 4]}, (
        "two more are fewer than five: they come with the batch"
    )
    assert odd.tokens == {"p1": list(range(7))}
    assert set(even.ended) == {"p0"} and set(odd.ended) == {"p1"}


async def test_a_sample_that_begins_again_ends_the_one_before_and_a_cancelled_rollout_ends_all(
    calls: RolloutCalls,
) -> None:
    await calls.create(samples=2)
    reading = Reading(calls)
    await push(calls, stretch("a", 0, 4))
    await push(calls, stretch("again", 0, 4))
    await until(lambda: "a" in reading.ended)
    assert reading.ended["a"].drop_reason == pb.DROP_REASON_CANCELLED
    assert await push(calls, stretch("a", 0, 6)) == (0, False), "its client does not know yet"
    await calls.stub.CancelRollout(
        pb.CancelRolloutRequest(request_id="c", rollout_id="r"), timeout=CALL_S
    )
    await reading.task
    assert set(reading.ended) == {"a", "again"}


async def test_pushes_beyond_the_room_are_refused_and_room_comes_back(nats_url: str) -> None:
    async with rollout_service(nats_url, token_stream_bytes=8 * TOKEN_BYTES) as calls:
        await calls.create(samples=2, keep=1)
        await push(calls, stretch("a", 0, 6))
        refusal = await refusal_of(push(calls, stretch("b", 0, 6, sample=1)))
        assert refusal[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOKENS_FULL")
        await push(calls, stretch("again", 0, 6))  # the first one's room
        await calls.submit(finished("again"))
        await calls.stub.CreateRollout(
            pb.CreateRolloutRequest(
                request_id="d",
                rollout_id="other",
                spec=pb.RolloutSpec(samples_per_prompt=1, prompt_ids=["p0"], max_staleness=-1),
            ),
            timeout=CALL_S,
        )
        request = pb.PushTokensRequest(rollout_id="other", chunk=stretch("c", 0, 8))
        assert (await calls.stub.PushTokens(request, timeout=CALL_S)).next_token == 8
