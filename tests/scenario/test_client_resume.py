"""Scenarios of a step whose stream breaks, against fakes behind real servers: the caller's iterator
goes on, or says why not."""

import asyncio
from functools import partial

import grpc
import pytest
import treadle
from support.conditions import until
from support.fake_engine import Script, logprob_at, token_at
from support.fake_servicer import Refusal
from support.mesh_in_process import FakeMesh, generate, one_trajectory
from treadle.generation import MAX_FRUITLESS_LOSSES

PROMPT = [5, 6, 7, 8]
COUNT = 12
SAMPLING = treadle.Sampling(max_new_tokens=COUNT)

started = partial(one_trajectory, prompt=PROMPT)


def assert_whole(t: treadle.Trajectory) -> None:
    step = t.steps[-1]
    assert step.token_ids == [token_at(PROMPT, i) for i in range(COUNT)]
    assert step.logprobs == [logprob_at(i) for i in range(COUNT)]
    assert t.tokens == PROMPT + step.token_ids
    assert [(s.start_token, s.end_token) for s in step.version_spans] == [(0, COUNT)]


@pytest.mark.parametrize("how", ["the engine says that it is lost", "the engine's process dies"])
async def test_a_stream_broken_in_the_middle_goes_on_at_another_engine(how: str) -> None:
    """The engine is lost after 4 of 12 tokens.

    Result: one iterator, 12 tokens, none twice and none missing; the second ticket names the first
    and the tokens received.
    """
    async with started() as (mesh, t):
        mesh.engines["e0"].script = Script(die_at=4) if "dies" in how else Script(lose_at=4)
        assert await generate(t, COUNT) == [token_at(PROMPT, i) for i in range(COUNT)]
        assert_whole(t)
        assert t.steps[0].engine_ids == ("e0", "e1")
        assert [s.kind for s in t.spans] == [
            "queue",
            "prefill",
            "decode",
            "queue",
            "prefill",
            "decode",
        ]
        assert [s.engine_id for s in t.spans] == ["e0", "e0", "e0", "e1", "e1", "e1"]
        first, second = mesh.scheduler.requests("ScheduleStep")
        assert (first.turn, second.turn) == (0, 0)
        assert (second.replaces_ticket_id, second.resumed_tokens) == ("k-1", 4)
        [resumed] = mesh.engines["e1"].requests("Generate")
        assert len(resumed.resumed_output.int32_le) == 4 * 4
        assert resumed.sampling.max_new_tokens == COUNT
        await t.close()
        assert not mesh.scheduler.open_trajectories


async def test_an_engine_lost_before_its_first_token_costs_nothing() -> None:
    async with started() as (mesh, t):
        await mesh.engine_ports["e0"].stop()  # the scheduler has not noticed yet
        await generate(t, COUNT)
        assert_whole(t)
        assert mesh.scheduler.requests("ScheduleStep")[1].replaces_ticket_id == "k-1"


EXPIRED = Refusal(grpc.StatusCode.PERMISSION_DENIED, "TICKET_EXPIRED")
ELSEWHERE = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "TICKET_WRONG_ENGINE")


@pytest.mark.parametrize("refusal", [EXPIRED, ELSEWHERE], ids=lambda refusal: refusal.reason)
async def test_a_ticket_that_the_engine_no_longer_takes_is_replaced(refusal: Refusal) -> None:
    async with started("e0") as (mesh, t):
        mesh.engines["e0"].refuse_next("Generate", refusal)
        await generate(t, COUNT)
        assert_whole(t)
        first, second = mesh.scheduler.requests("ScheduleStep")
        assert (first.replaces_ticket_id, second.replaces_ticket_id) == ("", "k-1")
        assert second.engine_refused


async def test_an_engine_that_refuses_one_ticket_after_another_counts_as_lost() -> None:
    """Its clock may be wrong. Result: the scheduler is told, so that it chooses another engine."""
    async with started("e0") as (mesh, t):
        mesh.engines["e0"].refuse_next("Generate", EXPIRED, EXPIRED, ELSEWHERE)
        await generate(t, COUNT)
        assert_whole(t)
        asked = mesh.scheduler.requests("ScheduleStep")
        assert [request.engine_refused for request in asked] == [False, True, False, False]


async def test_a_ticket_that_another_client_has_used_is_not_replaced() -> None:
    async with started("e0") as (mesh, t):
        used = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "TICKET_USED")
        mesh.engines["e0"].refuse_next("Generate", used)
        with pytest.raises(treadle.TreadleError, match="TICKET_USED"):
            await generate(t, COUNT)
        assert len(mesh.scheduler.requests("ScheduleStep")) == 1


async def test_a_full_queue_is_waited_for_as_long_as_it_asks() -> None:
    async with started("e0") as (mesh, t):
        full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.3)
        mesh.engines["e0"].refuse_next("Generate", full)
        await generate(t, COUNT)
        assert_whole(t)
        first, second = (c.time_s for c in mesh.engines["e0"].calls if c.method == "Generate")
        assert second - first >= 0.3


async def test_a_refused_request_is_not_tried_again() -> None:
    async with started("e0") as (mesh, t):
        bad = Refusal(
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", fields=("sampling.top_p",)
        )
        mesh.engines["e0"].refuse_next("Generate", bad)
        with pytest.raises(treadle.TreadleError) as refused:
            await generate(t, COUNT)
        assert refused.value.field_violations == (
            treadle.FieldViolation("sampling.top_p", "is wrong"),
        )
        assert len(mesh.engines["e0"].requests("Generate")) == 1
        assert (t.tokens, t.steps) == (PROMPT, [])
        await generate(t, COUNT)  # the same turn again, naming the ticket that came to nothing
        assert_whole(t)


@pytest.mark.parametrize("script", [Script(skip_at=4), Script(repeat_at=4)], ids=["gap", "repeat"])
async def test_a_gap_or_a_repeated_token_is_an_error_and_stops_the_engine(script: Script) -> None:
    async with started("e0") as (mesh, t):
        mesh.engines["e0"].script = script
        with pytest.raises(treadle.StreamBroken, match="offset"):
            await generate(t, COUNT)
        assert mesh.engines["e0"].aborted == ["k-1"]
        assert (t.tokens, t.loss_mask, t.steps) == (PROMPT, [0] * 4, [])


async def test_a_prompt_that_brings_down_every_engine_fails_its_step_only() -> None:
    """Each engine breaks the stream after admitting the step, before one token.

    Result: the step fails after a few losses rather than going round the mesh for an hour.
    """
    async with started() as (mesh, t):
        for engine in mesh.engines.values():
            engine.script = Script(lose_at=0, times=1000)
        with pytest.raises(treadle.TreadleError) as lost:
            await generate(t, COUNT)
        assert (lost.value.reason, lost.value.retryable) == ("ENGINES_LOST", False)
        assert "5 times in a row" in lost.value.message and "ENGINE_LOST" in lost.value.message
        assert len(mesh.scheduler.requests("ScheduleStep")) == MAX_FRUITLESS_LOSSES


async def test_a_step_whose_last_word_was_lost_with_the_engine_is_complete() -> None:
    async with started("e0") as (mesh, t):
        mesh.engines["e0"].script = Script(lose_at=COUNT)
        await generate(t, COUNT)
        assert t.steps[0].finish_reason == "length"
        assert len(t.steps[0].token_ids) == COUNT


async def close_iterator(mesh: FakeMesh, t: treadle.Trajectory) -> None:
    stream = t.generate(SAMPLING)
    await anext(stream)
    await stream.aclose()


async def break_off(mesh: FakeMesh, t: treadle.Trajectory) -> None:
    async for _ in t.generate(SAMPLING):
        break
    await t.tool("echo", {})


async def cancel_the_reader(mesh: FakeMesh, t: treadle.Trajectory) -> None:
    reading = asyncio.ensure_future(generate(t, COUNT))
    # the reader has them, not the engine only
    await until(lambda: len(t.tokens_from(0, COUNT)[0]) == len(PROMPT) + 2)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def close_from_another_task(mesh: FakeMesh, t: treadle.Trajectory) -> None:
    reading = asyncio.ensure_future(generate(t, COUNT))
    # the reader has them, not the engine only
    await until(lambda: len(t.tokens_from(0, COUNT)[0]) == len(PROMPT) + 2)
    await t.close(outcome="cancelled")
    assert len(await reading) == 2


@pytest.mark.parametrize(
    "leave", [close_iterator, break_off, cancel_the_reader, close_from_another_task]
)
async def test_a_step_left_early_is_aborted_on_its_engine_and_keeps_the_tokens_seen(
    leave: object,
) -> None:
    """The engine holds after 2 of 12 tokens; the caller leaves in one way or another.

    Result: the engine is told and runs nothing any more; the two tokens are in the trajectory; the
    next turn works.
    """
    assert callable(leave)
    async with started("e0") as (mesh, t):
        engine = mesh.engines["e0"]
        engine.script = Script(hold_at=2)
        await leave(mesh, t)
        assert engine.aborted == ["k-1"]
        await until(lambda: not engine.running)
        assert t.tokens == [*PROMPT, token_at(PROMPT, 0), token_at(PROMPT, 1)]
        assert t.steps[0].finish_reason == "aborted"
        if t.outcome is None:
            mesh.scheduler.finished("k-1")
            t.observe([9])
            assert len(await generate(t, COUNT)) == COUNT
            assert [s.turn for s in t.steps] == [0, 1]


async def test_closing_from_another_task_does_not_wait_for_a_ticket_that_does_not_come() -> None:
    """One task waits for an engine where there is none; another closes the trajectory.

    Result: both end; the scheduler hears of the end.
    """
    async with started() as (mesh, t):
        mesh.scheduler.engines.clear()
        reading = asyncio.ensure_future(generate(t, COUNT))
        await until(lambda: mesh.scheduler.requests("ScheduleStep"))
        await t.close(outcome="cancelled")
        assert await reading == []
        assert t.steps == []
        assert not mesh.scheduler.open_trajectories


async def test_observing_right_after_a_break_comes_after_the_tokens_seen() -> None:
    async with started("e0") as (mesh, t):
        mesh.engines["e0"].script = Script(hold_at=2)
        async for _ in t.generate(SAMPLING):
            break
        t.observe([9])
        assert t.tokens == [*PROMPT, token_at(PROMPT, 0), token_at(PROMPT, 1), 9]
        await until(lambda: mesh.engines["e0"].aborted == ["k-1"])


async def test_a_step_cancelled_while_it_waits_for_its_ticket_can_be_asked_for_again() -> None:
    """The answer with the ticket is lost, the caller gives up, and asks for the same turn once
    more.

    Result: the scheduler is asked again under the same request_id, so that the lost ticket can be
    named.
    """
    async with started("e0", retry=treadle.RetryPolicy(first_delay_s=60, max_delay_s=60)) as (
        mesh,
        t,
    ):
        mesh.scheduler.refuse_next(
            "ScheduleStep", Refusal(grpc.StatusCode.UNAVAILABLE, "AWAY", after=True)
        )
        reading = asyncio.ensure_future(generate(t, COUNT))
        await until(lambda: mesh.scheduler.requests("ScheduleStep"))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await generate(t, COUNT)
        assert_whole(t)
        first, repeat, second = mesh.scheduler.requests("ScheduleStep")
        assert first.request_id == repeat.request_id != second.request_id
        assert second.replaces_ticket_id == "k-1"
