"""Long turns of treadle.Client: several calls for the scheduler, one step for the caller."""

import asyncio
from functools import partial

import grpc
import pytest
import treadle
from support.conditions import until
from support.fake_engine import Script, token_at
from support.fake_servicer import Refusal
from support.mesh_in_process import FakeMesh, generate, one_trajectory

PROMPT = [11, 12, 13]
CALL, COUNT = 4, 10
SAMPLING = treadle.Sampling(max_new_tokens=COUNT)
TOO_LONG = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", fields=("context_tokens",))

in_calls = partial(one_trajectory, prompt=PROMPT, call_tokens=CALL)


def expected(prompt: list[int], count: int, most: int = CALL) -> list[int]:
    """The only possible output: each call goes on from all that came before it."""
    output: list[int] = []
    while len(output) < count:
        here = [*prompt, *output]
        output += [token_at(here, index) for index in range(min(most, count - len(output)))]
    return output


WHOLE = expected(PROMPT, COUNT)


def asked(mesh: FakeMesh) -> list[tuple[int, int, int, str]]:
    requests = mesh.scheduler.requests("ScheduleStep")
    return [(r.turn, r.context_tokens, r.max_new_tokens, r.replaces_ticket_id) for r in requests]


async def test_a_long_turn_is_several_calls_for_the_scheduler_and_one_step_for_the_caller() -> None:
    async with in_calls() as (mesh, t):
        chunks = [chunk async for chunk in t.generate(SAMPLING)]
        assert [chunk.offset for chunk in chunks] == [0, 2, 4, 6, 8]
        assert [token for chunk in chunks for token in chunk.token_ids] == WHOLE
        [step] = t.steps
        assert (step.turn, step.token_ids, step.finish_reason) == (0, WHOLE, "length")
        assert step.version_spans == (treadle.VersionSpan("0", 0, COUNT),)
        assert step.engine_ids == ("e0", "e1", "e0")
        assert [span.kind for span in step.spans] == ["queue", "prefill", "decode"] * 3
        assert t.loss_mask == [0, 0, 0, *[1] * COUNT]
        context = list(t.tokens)
        await generate(t, 3)
        assert t.steps[1].token_ids == expected(context, 3)
        assert asked(mesh) == [(0, 3, 4, ""), (1, 7, 4, ""), (2, 11, 2, ""), (3, 13, 3, "")]
        times = [r.tool_time.ToNanoseconds() for r in mesh.scheduler.requests("ScheduleStep")]
        assert times[:3] == [0, 0, 0]
        assert times[3] > 0


@pytest.mark.parametrize(
    ("most", "stop"), [(0, ()), (COUNT, ()), (1_000, ()), (CALL, ("</tool>",))]
)
async def test_a_turn_within_the_limit_or_with_a_stop_string_is_one_call(
    most: int, stop: tuple[str, ...]
) -> None:
    """A stop string could lie across two calls."""
    async with one_trajectory("e0", prompt=PROMPT, call_tokens=most) as (mesh, t):
        await generate(t, COUNT, stop=stop)
        assert asked(mesh) == [(0, 3, COUNT, "")]


async def test_the_cap_of_a_trajectory_ends_the_last_call() -> None:
    async with in_calls("e0", max_total_tokens=6) as (mesh, t):
        assert await generate(t, COUNT) == expected(PROMPT, 6)
        assert asked(mesh) == [(0, 3, 4, ""), (1, 7, 2, "")]


@pytest.mark.parametrize("lose_at", [0, 2, 4])
async def test_an_engine_lost_in_the_middle_of_a_later_call_costs_that_call_alone(
    lose_at: int,
) -> None:
    """The second call loses its engine before its first token, in the middle, and with its last
    word."""
    async with in_calls() as (mesh, t):
        mesh.engines["e1"].script = Script(lose_at=lose_at)
        assert await generate(t, COUNT) == WHOLE
        assert t.steps[0].finish_reason == "length"
        again = [] if lose_at == CALL else [(1, 7, 4, "k-2")]
        assert asked(mesh) == [(0, 3, 4, ""), (1, 7, 4, ""), *again, (2, 11, 2, "")]


async def test_new_weights_and_a_preemption_in_a_later_call_show_in_the_step() -> None:
    async with in_calls() as (mesh, t):
        mesh.engines["e1"].script = Script(version_from={0: "6", 2: "7"}, preempt_at=2)
        assert await generate(t, COUNT) == WHOLE
        spans = [
            (span.weight_version, span.start_token, span.end_token)
            for span in t.steps[0].version_spans
        ]
        assert spans == [("0", 0, 4), ("6", 4, 6), ("7", 6, 8), ("0", 8, 10)]
        assert t.steps[0].preemptions == 1


@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_step_left_in_a_later_call_keeps_what_was_seen_and_the_next_turn_goes_on(
    hold_at: int,
) -> None:
    async with in_calls() as (mesh, t):
        engine = mesh.engines["e1"]
        engine.script = Script(hold_at=hold_at)
        seen: list[int] = []

        async def read() -> None:
            async for chunk in t.generate(treadle.Sampling(max_new_tokens=COUNT)):
                seen.extend(chunk.token_ids)

        reading = asyncio.ensure_future(read())
        await until(lambda: engine.holding.is_set() and len(seen) == CALL + hold_at)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert engine.aborted == ["k-2"]
        assert (t.tokens, t.steps[0].finish_reason) == (
            [*PROMPT, *WHOLE[: CALL + hold_at]],
            "aborted",
        )
        mesh.scheduler.finished("k-2")
        context = list(t.tokens)
        assert await generate(t, 2) == expected(context, 2)
        assert asked(mesh)[-1] == (2, len(context), 2, "")


async def test_a_step_left_while_its_next_call_waits_for_a_ticket_goes_on_with_that_call() -> None:
    """The first call is done, and for the second there is no engine: the reader leaves.

    Result: the step has the first call's tokens; the next turn takes the call that never had a
    ticket.
    """
    async with in_calls("e0") as (mesh, t):
        stream = t.generate(SAMPLING)
        assert len([await anext(stream), await anext(stream)]) == 2
        engines = dict(mesh.scheduler.engines)
        mesh.scheduler.engines.clear()
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: len(mesh.scheduler.requests("ScheduleStep")) >= 2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert t.steps[0].token_ids == WHOLE[:CALL]
        mesh.scheduler.engines.update(engines)
        context = list(t.tokens)
        assert await generate(t, 2) == expected(context, 2)
        assert asked(mesh)[-1][0] == 1


async def test_a_step_whose_next_call_fits_no_engine_ends_there_as_it_would_in_one_call() -> None:
    async with in_calls("e0") as (mesh, t):
        stream = t.generate(SAMPLING)
        assert len([await anext(stream), await anext(stream)]) == 2
        mesh.scheduler.refuse_next("ScheduleStep", TOO_LONG)
        assert [chunk async for chunk in stream] == []
        assert (t.steps[0].token_ids, t.steps[0].finish_reason) == (WHOLE[:CALL], "length")


async def test_a_first_call_that_fits_no_engine_is_an_error() -> None:
    async with in_calls("e0") as (mesh, t):
        mesh.scheduler.refuse_next("ScheduleStep", TOO_LONG)
        with pytest.raises(treadle.TreadleError, match="CONTEXT_TOO_LONG"):
            await generate(t, COUNT)
        assert t.steps == []


async def test_a_step_that_fails_in_a_later_call_keeps_nothing_and_runs_again() -> None:
    async with in_calls() as (mesh, t):
        mesh.engines["e1"].script = Script(skip_at=2)
        with pytest.raises(treadle.StreamBroken, match="offset"):
            await generate(t, COUNT)
        assert (t.tokens, t.steps) == (PROMPT, [])
        assert await generate(t, COUNT) == WHOLE
        assert asked(mesh)[2:] == [(1, 3, 4, "k-2"), (2, 7, 4, ""), (3, 11, 2, "")]


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="call_tokens"):
        treadle.Client("127.0.0.1:1", call_tokens=-1)
