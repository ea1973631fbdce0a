"""Attempts that begin while their tickets are on their way: at most one request a step, nothing lost, no slot held."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest
from support.conditions import until, until_said
from support.engine_steps import Step, run_step, step_request, ticket
from support.facts import hear
from support.fake_sglang import FakeSglang, expected
from support.rpc import refusal_of
from support.sidecar_in_process import Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2
from treadle_sidecar import early

PROMPT = list(range(10, 74))
LENGTH, ABORTED = engine_pb2.FINISH_REASON_LENGTH, engine_pb2.FINISH_REASON_ABORTED
T = 20.0
FOR_EVER_S = 1e6


def step(count: int, prompt: list[int] = PROMPT, trajectory_id: str = "t", **options: Any) -> Any:
    """A step of `count` tokens. options: of its ticket."""
    sampling = SamplingParams(max_new_tokens=count, temperature=0.0)
    return step_request(ticket("e0", trajectory_id=trajectory_id, **options), prompt, sampling)


async def begin(side: Sidecar, request: engine_pb2.GenerateRequest) -> bool:
    """Tell the sidecar of the step; whether it began."""
    told = engine_pb2.BeginStepRequest(
        trajectory_id=request.ticket.trajectory_id,
        turn=request.ticket.turn,
        prompt=request.prompt,
        sampling=request.sampling,
    )
    return (await side.stub.BeginStep(told, timeout=T)).begun


async def load(side: Sidecar) -> tuple[int, int]:
    """Running and waiting steps."""
    said = await side.load()
    return said.running_steps, said.waiting_steps


async def until_idle(side: Sidecar, engine: FakeSglang) -> None:
    """Return once nothing runs there."""
    await until(lambda: engine.running == 0)
    await until_said(partial(load, side), lambda said: said == (0, 0))


@pytest.fixture
async def side(nats_url: str, engine: FakeSglang) -> AsyncIterator[Sidecar]:
    """Of one slot."""
    async with sidecar(nats_url, engine.url, slots=1) as side:
        yield side


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt waits for its step as long as it takes."""
    monkeypatch.setattr(early, "KEPT_S", FOR_EVER_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("ahead", [0, 1, 20])
async def test_a_step_goes_on_with_what_began_before_its_ticket(side: Sidecar, engine: FakeSglang, ahead: int) -> None:
    """The ticket comes before the first token, or after `ahead` tokens. Result: one request, whole, told once."""
    facts = await hear(side.runtime.bus, "step_queued", "step_started", "step_finished")
    request = step(30)
    engine.prefill_s = 0.0 if ahead else 0.2
    assert await begin(side, request)
    await until(lambda: engine.sampled >= ahead and engine.steps == 1)
    assert not facts
    result = await run_step(side.stub, request)
    finished = result.require_whole()
    assert (finished.reason, result.tokens.tolist()) == (LENGTH, expected(PROMPT, 30))
    assert engine.steps == 1
    assert not engine.aborts
    await until(lambda: len(facts) == 2)
    assert [type(fact).__name__ for fact in facts] == ["StepStarted", "StepFinished"]
    assert {fact.step.ticket_id for fact in facts} == {request.ticket.ticket_id}
    assert await load(side) == (0, 0)


async def test_what_no_step_claims_is_aborted_and_its_slot_is_free(side: Sidecar, engine: FakeSglang) -> None:
    facts = await hear(side.runtime.bus, "step_started", "step_finished")
    engine.hang()
    assert await begin(side, step(3000))
    assert await load(side) == (1, 0)
    engine.go_on()
    await until_idle(side, engine)
    assert len(engine.aborts) >= 1
    assert engine.sampled < 3000
    (await run_step(side.stub, step(5))).require_whole()
    await until(lambda: len(facts) == 2)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "other", [{"prompt": [7, 8, 9]}, {"turn": 1}, {"count": 6}], ids=["prompt", "turn", "sampling"]
)
async def test_a_step_that_differs_from_what_began_runs_anew(
    side: Sidecar, engine: FakeSglang, other: dict[str, Any]
) -> None:
    told: dict[str, Any] = {"count": 3000, "prompt": PROMPT, "turn": 0}
    assert await begin(side, step(**told))
    request = step(**{**told, "count": 5, **other})
    result = await run_step(side.stub, request)
    result.require_whole()
    assert result.tokens.tolist() == expected(other.get("prompt", PROMPT), other.get("count", 5))
    assert engine.steps == 2
    await until_idle(side, engine)


@pytest.mark.usefixtures("patient")
async def test_nothing_begins_where_the_step_would_wait_or_is_here(nats_url: str, engine: FakeSglang) -> None:
    async with sidecar(nats_url, engine.url, slots=2) as side:
        assert await begin(side, step(3000, trajectory_id="u"))
        assert not await begin(side, step(3000, trajectory_id="u")), "it has begun already"
        running = Step(side.stub, step(3000))
        await running.until_tokens(1)
        assert not await begin(side, step(3000)), "a step of the trajectory runs"
        assert not await begin(side, step(5, trajectory_id="v")), "no slot is free"
        await side.stub.Pause(engine_pb2.PauseRequest(request_id="p", mode=engine_pb2.PAUSE_MODE_ABORT), timeout=T)
        assert engine.running == 0
        assert not await begin(side, step(5)), "the engine is paused"
        assert (await running).require_whole().reason == ABORTED
        assert await load(side) == (0, 0)
        assert engine.most_running == 2


@pytest.mark.usefixtures("patient")
async def test_a_step_with_a_ticket_gets_the_slot_of_one_without(side: Sidecar, engine: FakeSglang) -> None:
    assert await begin(side, step(3000))
    result = await run_step(side.stub, step(20, prompt=[5], trajectory_id="other", priority=-5.0))
    assert result.require_whole().reason == LENGTH
    assert engine.most_running == 1
    assert len(engine.aborts) >= 1
    await until_idle(side, engine)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("mode", [engine_pb2.PAUSE_MODE_ABORT, engine_pb2.PAUSE_MODE_KEEP])
async def test_a_pause_takes_off_what_has_begun_and_the_step_runs_after_it(
    side: Sidecar, engine: FakeSglang, mode: engine_pb2.PauseMode.ValueType
) -> None:
    request = step(30)
    engine.token_s = 0.05
    assert await begin(side, request)
    await until(lambda: engine.sampled > 1)
    paused = await side.stub.Pause(engine_pb2.PauseRequest(request_id="p", mode=mode), timeout=T)
    assert (paused.aborted_steps, paused.kept_steps, engine.running) == (0, 0, 0)
    engine.token_s = 0.002
    late = Step(side.stub, request)
    await side.until_waiting(1)
    await side.stub.Resume(engine_pb2.ResumeRequest(request_id="r"), timeout=T)
    result = await late
    result.require_whole()
    assert result.tokens.tolist() == expected(PROMPT, 30)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("claimed", [True, False])
async def test_an_engine_that_dies_after_a_step_began(side: Sidecar, engine: FakeSglang, claimed: bool) -> None:
    """Result: a claimed step ends as on any lost engine; in both cases the next one runs, once the engine is back."""
    request = step(3000)
    assert await begin(side, request)
    await until(lambda: engine.sampled > 0)
    running = Step(side.stub, request) if claimed else None
    if running is not None:
        await running.until_tokens(1)
    await engine.stop()
    if running is not None:
        assert (await refusal_of(running))[:2] == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
        assert running.seen.tokens.tolist() == expected(PROMPT, len(running.seen.tokens))
    await side.until_engine_is(False)
    await engine.start()
    await side.until_engine_is(True)
    (await run_step(side.stub, step(5, turn=1))).require_whole()
    await until_idle(side, engine)


async def test_an_engine_that_hangs_after_a_step_began_holds_no_slot_for_it(nats_url: str, engine: FakeSglang) -> None:
    async with sidecar(nats_url, engine.url, slots=1, engine_stall_s=1.0, decode_base_s=0.01) as side:
        engine.hang()
        assert await begin(side, step(3000))
        await side.until_engine_is(False)
        assert await load(side) == (0, 0)
        engine.go_on()
        await side.until_engine_is(True)
        (await run_step(side.stub, step(5))).require_whole()
        await until_idle(side, engine)


@pytest.mark.usefixtures("patient")
async def test_a_claimed_step_is_aborted_and_evicted_like_any_other(nats_url: str, engine: FakeSglang) -> None:
    async with sidecar(nats_url, engine.url, slots=1, min_run_tokens=1) as side:
        low = step(400, priority=1.0)
        assert await begin(side, low)
        running = Step(side.stub, low)
        await running.until_tokens(3)
        (await run_step(side.stub, step(5, prompt=[5], trajectory_id="high", priority=9.0))).require_whole()
        await running.until_tokens(30)
        asked = engine_pb2.AbortRequest(request_id="a", ticket_id=low.ticket.ticket_id)
        answer = await side.stub.Abort(asked, timeout=T)
        result = await running
        finished = result.require_whole()
        assert (finished.reason, finished.preemptions) == (ABORTED, 1)
        assert finished.output_tokens == answer.output_tokens
        assert result.tokens.tolist() == expected(PROMPT, finished.output_tokens)
        await until_idle(side, engine)


@pytest.mark.usefixtures("patient")
async def test_a_step_that_is_aborted_with_its_ticket_leaves_nothing_on_the_engine(
    side: Sidecar, engine: FakeSglang
) -> None:
    """The engine is slow to its first token. Result: the step ends once the engine has ended the request."""
    engine.prefill_s = 0.3
    request = step(3000)
    assert await begin(side, request)
    running = Step(side.stub, request)
    asked = engine_pb2.AbortRequest(request_id="a", ticket_id=request.ticket.ticket_id)
    await until(lambda: running.seen.started)
    await side.stub.Abort(asked, timeout=T)
    assert engine.running == 0
    assert (await running).require_whole().reason == ABORTED
    assert await load(side) == (0, 0)
