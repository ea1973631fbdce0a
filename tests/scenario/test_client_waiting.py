"""What counts against the deadline of a step: a step that runs and brings nothing, and no wait in
line."""

import asyncio

import grpc
import pytest
import treadle
from support.conditions import until
from support.fake_engine import Script, token_at
from support.fake_servicer import Gate, Refusal
from support.mesh_in_process import generate, one_trajectory

PROMPT = [1, 2, 3]
TOKENS = [token_at(PROMPT, index) for index in range(4)]
STEP_S = 1.0  # a busy machine lets a running step wait for less
HELD = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "STEP_HELD", retry_after_s=STEP_S / 4)
FULL = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=STEP_S / 4)
TIMEOUTS = treadle.Timeouts(step_s=STEP_S, cleanup_s=STEP_S)


class OneStart(Gate):
    """Lets one attempt start, and holds the next."""

    async def pass_through(self) -> None:
        await super().pass_through()
        self.close()


@pytest.mark.parametrize(("method", "refusal"), [("ScheduleStep", HELD), ("Generate", FULL)])
async def test_a_step_that_waits_for_a_ticket_or_for_a_place_in_the_queue_ends_well(
    method: str, refusal: Refusal
) -> None:
    async with one_trajectory("e0", prompt=PROMPT, timeouts=TIMEOUTS) as (mesh, t):
        servicer = mesh.scheduler if method == "ScheduleStep" else mesh.engines["e0"]
        servicer.refuse_next(method, *[refusal] * 6)
        assert await generate(t, 4) == TOKENS


@pytest.mark.parametrize("preempt_at", [None, 2])
async def test_a_step_in_the_queue_of_an_engine_waits_for_as_long_as_the_sidecar_answers(
    preempt_at: int | None,
) -> None:
    """Before its first token, and preempted; the sidecar is asked each time that `step_s` has
    passed."""
    async with one_trajectory("e0", prompt=PROMPT, timeouts=TIMEOUTS) as (mesh, t):
        engine = mesh.engines["e0"]
        engine.script, engine.slot = Script(preempt_at=preempt_at), OneStart()
        if preempt_at is None:
            engine.slot.close()
        reading = asyncio.ensure_future(generate(t, 4))
        await until(lambda: len(engine.requests("GetLoad")) >= 2)
        engine.slot.open()
        assert await reading == TOKENS
        assert len(engine.requests("Generate")) == 1


async def test_a_step_in_the_queue_of_a_sidecar_that_hangs_goes_to_another_engine() -> None:
    async with one_trajectory(prompt=PROMPT, timeouts=TIMEOUTS) as (mesh, t):
        mesh.engines["e0"].slot.close()
        mesh.engines["e0"].loads.close()
        assert await generate(t, 4) == TOKENS
        assert t.steps[0].engine_ids == ("e0", "e1")


async def test_a_step_that_brings_tokens_or_whose_caller_takes_its_time_may_take_longer() -> None:
    async with one_trajectory("e0", prompt=PROMPT, timeouts=TIMEOUTS) as (_, t):
        async for _ in t.generate(treadle.Sampling(max_new_tokens=4)):
            await asyncio.sleep(STEP_S)
        assert t.steps[0].token_ids == TOKENS


@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_running_step_without_progress_fails_and_is_aborted(hold_at: int) -> None:
    async with one_trajectory("e0", prompt=PROMPT, timeouts=TIMEOUTS) as (mesh, t):
        engine = mesh.engines["e0"]
        engine.script = Script(hold_at=hold_at)
        with pytest.raises(
            treadle.TreadleError, match="turn 0 has brought no token on e0 for 1 s"
        ) as stalled:
            await generate(t, 4)
        assert (stalled.value.code, stalled.value.reason) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "STEP_STALLED",
        )
        assert engine.aborted == ["k-1"]
        assert await generate(t, 4) == TOKENS


async def test_a_step_that_waits_in_line_can_be_left() -> None:
    async with one_trajectory("e0", prompt=PROMPT, timeouts=TIMEOUTS) as (mesh, t):
        engine = mesh.engines["e0"]
        engine.slot.close()
        reading = asyncio.ensure_future(generate(t, 4))
        await until(lambda: engine.slot.waiting)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: not engine.slot.waiting)
        assert engine.aborted == ["k-1"]
        engine.slot.open()
        assert await generate(t, 4) == TOKENS
