"""Long turns of treadle.Client: several calls for the scheduler, one step for the caller."""

import asyncio

import grpc
import pytest
import treadle
from support.conditions import until
from support.fake_engine import Script, token_at
from support.fake_servicer import Refusal
from support.mesh_in_process import FakeMesh, fake_mesh

PROMPT = [11, 12, 13]
CALL, COUNT = 4, 10
SAMPLING = treadle.Sampling(max_new_tokens=COUNT)


def in_calls(prompt: list[int], count: int, most: int = CALL) -> list[int]:
    """The only possible output: each call goes on from all that came before it."""
    output: list[int] = []
    while len(output) < count:
        here = [*prompt, *output]
        output += [token_at(here, index) for index in range(min(most, count - len(output)))]
    return output


async def opened(client: treadle.Client) -> treadle.Trajectory:
    return await client.open(prompt_id="p0", sample=0, prompt=PROMPT)


async def generated(t: treadle.Trajectory, sampling: treadle.Sampling = SAMPLING) -> list[treadle.Chunk]:
    return [chunk async for chunk in t.generate(sampling)]


def asked(mesh: FakeMesh) -> list[tuple[int, int, int, str]]:
    requests = mesh.scheduler.requests("ScheduleStep")
    return [(r.turn, r.context_tokens, r.max_new_tokens, r.replaces_ticket_id) for r in requests]


async def test_a_long_turn_is_several_calls_for_the_scheduler_and_one_step_for_the_caller() -> None:
    async with fake_mesh() as mesh, mesh.client(call_tokens=CALL) as client:
        t = await opened(client)
        chunks = await generated(t)
        assert [chunk.offset for chunk in chunks] == [0, 2, 4, 6, 8]
        assert [token for chunk in chunks for token in chunk.token_ids] == in_calls(PROMPT, COUNT)
        [step] = t.steps
        assert (step.turn, step.token_ids, step.finish_reason) == (0, in_calls(PROMPT, COUNT), "length")
        assert step.version_spans == (treadle.VersionSpan("0", 0, COUNT),)
        assert step.engine_ids == ("e0", "e1", "e0")
        assert [span.kind for span in step.spans] == ["queue", "prefill", "decode"] * 3
        assert t.loss_mask == [0, 0, 0, *[1] * COUNT]
        context = list(t.tokens)
        await generated(t, treadle.Sampling(max_new_tokens=3))
        assert t.steps[1].token_ids == in_calls(context, 3)
        assert asked(mesh) == [(0, 3, 4, ""), (1, 7, 4, ""), (2, 11, 2, ""), (3, 13, 3, "")]
        times = [r.tool_time.ToNanoseconds() for r in mesh.scheduler.requests("ScheduleStep")]
        assert times[:3] == [0, 0, 0]
        assert times[3] > 0


@pytest.mark.parametrize("most", [0, COUNT, 1_000])
async def test_a_turn_within_the_limit_is_one_call(most: int) -> None:
    async with fake_mesh("e0") as mesh, mesh.client(call_tokens=most) as client:
        t = await opened(client)
        await generated(t)
        assert asked(mesh) == [(0, 3, COUNT, "")]


async def test_a_turn_that_stops_at_a_string_is_one_call_as_the_string_could_lie_across_two() -> None:
    async with fake_mesh("e0") as mesh, mesh.client(call_tokens=CALL) as client:
        t = await opened(client)
        await generated(t, treadle.Sampling(max_new_tokens=COUNT, stop=("</tool>",)))
        assert asked(mesh) == [(0, 3, COUNT, "")]


async def test_the_cap_of_a_trajectory_ends_the_last_call() -> None:
    async with fake_mesh("e0") as mesh, mesh.client(call_tokens=CALL) as client:
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT, max_total_tokens=6)
        await generated(t)
        assert t.steps[0].token_ids == in_calls(PROMPT, 6)
        assert asked(mesh) == [(0, 3, 4, ""), (1, 7, 2, "")]


@pytest.mark.parametrize("lose_at", [0, 2, 4])
async def test_an_engine_lost_in_the_middle_of_a_later_call_costs_that_call_alone(lose_at: int) -> None:
    """The second call loses its engine before its first token, in the middle, and with its last word."""
    async with fake_mesh() as mesh, mesh.client(call_tokens=CALL) as client:
        mesh.engines["e1"].script = Script(lose_at=lose_at)
        t = await opened(client)
        await generated(t)
        assert t.steps[0].token_ids == in_calls(PROMPT, COUNT)
        assert t.steps[0].finish_reason == "length"
        again = [] if lose_at == CALL else [(1, 7, 4, "k-2")]
        assert asked(mesh) == [(0, 3, 4, ""), (1, 7, 4, ""), *again, (2, 11, 2, "")]


async def test_a_change_of_weights_between_calls_shows_in_the_version_spans() -> None:
    async with fake_mesh() as mesh, mesh.client(call_tokens=CALL) as client:
        mesh.engines["e1"].script = Script(version_from={0: "6", 2: "7"})
        t = await opened(client)
        await generated(t)
        assert t.steps[0].version_spans == (
            treadle.VersionSpan("0", 0, 4),
            treadle.VersionSpan("6", 4, 6),
            treadle.VersionSpan("7", 6, 8),
            treadle.VersionSpan("0", 8, 10),
        )


async def test_a_preemption_in_a_later_call_is_counted_and_loses_nothing() -> None:
    async with fake_mesh() as mesh, mesh.client(call_tokens=CALL) as client:
        mesh.engines["e1"].script = Script(preempt_at=2)
        t = await opened(client)
        await generated(t)
        assert t.steps[0].token_ids == in_calls(PROMPT, COUNT)
        assert t.steps[0].preemptions == 1


@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_step_left_in_a_later_call_keeps_what_was_seen_and_the_next_turn_goes_on(hold_at: int) -> None:
    async with fake_mesh() as mesh, mesh.client(call_tokens=CALL) as client:
        engine = mesh.engines["e1"]
        engine.script = Script(hold_at=hold_at)
        t = await opened(client)
        reading = asyncio.ensure_future(generated(t))
        await until(engine.holding.is_set)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert engine.aborted == ["k-2"]
        seen = in_calls(PROMPT, COUNT)[: CALL + hold_at]
        assert (t.tokens, t.steps[0].finish_reason) == ([*PROMPT, *seen], "aborted")
        mesh.scheduler.finished("k-2")
        context = list(t.tokens)
        await generated(t, treadle.Sampling(max_new_tokens=2))
        assert t.steps[1].token_ids == in_calls(context, 2)
        assert asked(mesh)[-1] == (2, len(context), 2, "")


async def test_a_step_left_while_its_next_call_waits_for_a_ticket_goes_on_with_that_call() -> None:
    """The first call is done, and for the second there is no engine: the reader leaves.

    Result: the step has the first call's tokens; the next turn takes the call that never had a ticket.
    """
    async with fake_mesh("e0") as mesh, mesh.client(call_tokens=CALL) as client:
        t = await opened(client)
        stream = t.generate(SAMPLING)
        assert len([await anext(stream), await anext(stream)]) == 2
        engines = dict(mesh.scheduler.engines)
        mesh.scheduler.engines.clear()
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: len(mesh.scheduler.requests("ScheduleStep")) >= 2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert t.steps[0].token_ids == in_calls(PROMPT, CALL)
        mesh.scheduler.engines.update(engines)
        context = list(t.tokens)
        await generated(t, treadle.Sampling(max_new_tokens=2))
        assert t.steps[1].token_ids == in_calls(context, 2)
        assert asked(mesh)[-1][0] == 1


async def test_a_step_whose_next_call_fits_no_engine_ends_there_as_it_would_in_one_call() -> None:
    async with fake_mesh("e0") as mesh, mesh.client(call_tokens=CALL) as client:
        t = await opened(client)
        stream = t.generate(SAMPLING)
        assert len([await anext(stream), await anext(stream)]) == 2
        too_long = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", fields=("context_tokens",))
        mesh.scheduler.refuse_next("ScheduleStep", too_long)
        assert [chunk async for chunk in stream] == []
        assert (t.steps[0].token_ids, t.steps[0].finish_reason) == (in_calls(PROMPT, CALL), "length")


async def test_a_first_call_that_fits_no_engine_is_an_error() -> None:
    async with fake_mesh("e0") as mesh, mesh.client(call_tokens=CALL) as client:
        t = await opened(client)
        too_long = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", fields=("context_tokens",))
        mesh.scheduler.refuse_next("ScheduleStep", too_long)
        with pytest.raises(treadle.TreadleError, match="CONTEXT_TOO_LONG"):
            await generated(t)
        assert t.steps == []


async def test_a_step_that_fails_in_a_later_call_keeps_nothing_and_runs_again() -> None:
    async with fake_mesh() as mesh, mesh.client(call_tokens=CALL) as client:
        mesh.engines["e1"].script = Script(skip_at=2)
        t = await opened(client)
        with pytest.raises(treadle.StreamBroken, match="offset"):
            await generated(t)
        assert (t.tokens, t.steps) == (PROMPT, [])
        await generated(t)
        assert t.steps[0].token_ids == in_calls(PROMPT, COUNT)
        assert asked(mesh)[2:] == [(1, 3, 4, "k-2"), (2, 7, 4, ""), (3, 11, 2, "")]


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="call_tokens"):
        treadle.Client("127.0.0.1:1", call_tokens=-1)
