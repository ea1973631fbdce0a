"""A sidecar judges its engine by progress: one that hangs is lost although it answers questions,
and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.conditions import until
from support.engine_steps import Step, run_step, step_request, ticket
from support.fake_scheduler import FakeScheduler
from support.fake_servicer import Port
from support.fake_sglang import Failure, FakeSglang, expected, fake_sglang
from support.rpc import refused
from support.sidecar_in_process import sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server

PROMPT = list(range(10, 74))
STALL_S = 1.0


@pytest.fixture(autouse=True)
def _impatient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle_core.engine_queue.pace.IDLE_PROBE_S", 0.5)
    monkeypatch.setattr("treadle_core.engine_queue.pace.SUSPECT_PROBE_S", 0.3)
    monkeypatch.setattr("treadle_sidecar.probe.CHECK_S", 0.2)


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler()  # type: ignore[abstract]
    async with Port(add_SchedulerServiceServicer_to_server, fake) as fake.address:
        yield fake


def greedy(count: int, prompt: list[int] = PROMPT, **options: Any) -> engine_pb2.GenerateRequest:
    return step_request(
        ticket("e0", **options), prompt, SamplingParams(max_new_tokens=count, temperature=0.0)
    )


async def test_a_hung_engine_is_given_back_and_its_steps_end_at_once_until_it_goes_on(
    nats_url: str, engine: FakeSglang, scheduler: FakeScheduler
) -> None:
    """The engine hangs while one step runs and one waits; it answers all questions that SGLang
    answers without its scheduler process. Result: both steps end with ENGINE_LOST, after the tokens
    that were sampled; no step is taken and the lease is given back; once the engine generates again
    it is registered again."""
    async with sidecar(
        nats_url,
        engine.url,
        scheduler=scheduler.address,
        slots=1,
        engine_stall_s=STALL_S,
        decode_base_s=0.01,
    ) as side:
        await until(lambda: scheduler.leases)
        running = Step(side.stub, greedy(3000))
        await running.until_tokens(5)
        waiting = Step(side.stub, greedy(3000))
        await side.until_waiting(1)
        engine.hang()
        for step in (running, waiting):
            with refused("ENGINE_LOST", grpc.StatusCode.UNAVAILABLE):
                await step
        received = running.seen.tokens.tolist()
        assert received == expected(PROMPT, len(received))
        await until(lambda: scheduler.requests("DeregisterEngine") and not scheduler.leases)
        with refused("ENGINE_LOST", says="no progress"):
            await run_step(side.stub, greedy(5))

        await asyncio.sleep(3 * STALL_S)  # polls are answered all the time
        assert not scheduler.leases
        engine.go_on()
        await side.until_engine_is(True)
        await until(lambda: scheduler.leases)
        (await run_step(side.stub, greedy(5))).require_whole()


async def test_a_preempted_step_keeps_its_tokens_when_its_engine_hangs(
    nats_url: str, engine: FakeSglang
) -> None:
    async with sidecar(
        nats_url, engine.url, slots=1, engine_stall_s=STALL_S, decode_base_s=0.01
    ) as side:
        low = Step(side.stub, greedy(3000, priority=1.0))
        await low.until_tokens(21)
        high = Step(side.stub, greedy(3000, [5], priority=5.0))
        await until(lambda: low.seen.preempted and len(high.seen.tokens))
        engine.hang()
        for step in (low, high):
            with refused("ENGINE_LOST", grpc.StatusCode.UNAVAILABLE):
                await step
        received = low.seen.tokens.tolist()
        assert len(received) > 20
        assert received == expected(PROMPT, len(received))
        engine.go_on()


async def test_an_engine_that_hangs_while_it_is_idle_is_found_by_a_probe(
    nats_url: str, engine: FakeSglang
) -> None:
    async with sidecar(nats_url, engine.url, engine_stall_s=STALL_S) as side:
        engine.hang()
        await side.until_engine_is(False)
        engine.go_on()
        await side.until_engine_is(True)


async def test_no_probe_comes_while_steps_make_progress_or_the_engine_is_paused(
    nats_url: str, engine: FakeSglang
) -> None:
    async with sidecar(nats_url, engine.url) as side:
        await until(lambda: engine.probes)
        step = Step(side.stub, greedy(400))
        await step.until_tokens(1)
        before = engine.probes
        await until(lambda: not engine.running)
        assert engine.probes == before
        await step

        mode = engine_pb2.PAUSE_MODE_KEEP
        await side.stub.Pause(engine_pb2.PauseRequest(request_id="p", mode=mode), timeout=10)
        before = engine.probes
        await asyncio.sleep(2.0)
        assert engine.probes == before


async def test_an_engine_that_reads_a_long_prompt_is_not_lost(nats_url: str) -> None:
    """By its curve the prompt takes 4 s, longer than an engine may be silent otherwise."""
    curve: dict[str, Any] = {"decode_base_s": 0.01, "prefill_tokens_per_s": 100.0}
    async with (
        fake_sglang() as engine,
        sidecar(nats_url, engine.url, engine_stall_s=STALL_S, **curve) as side,
    ):
        engine.prefill_s = 4.0
        prompt = [7] * 400
        assert (await run_step(side.stub, greedy(5, prompt))).tokens.tolist() == expected(prompt, 5)


async def test_an_engine_that_loads_weights_is_neither_lost_nor_probed(
    nats_url: str, engine: FakeSglang, scheduler: FakeScheduler
) -> None:
    """Result: the lease is kept, steps wait, and the sidecar's own health, which Kubernetes asks,
    is SERVING."""
    async with sidecar(
        nats_url, engine.url, scheduler=scheduler.address, engine_stall_s=STALL_S
    ) as side:
        engine.load_s = 4.0
        request = engine_pb2.UpdateWeightsRequest(
            request_id="u", model_path="/m", weight_version="v2"
        )
        update = asyncio.ensure_future(side.stub.UpdateWeights(request, timeout=20))
        await until(lambda: engine.loading)
        probes = engine.probes
        step = Step(side.stub, greedy(5))
        async with grpc.aio.insecure_channel(side.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while engine.loading:
                assert engine.probes == probes
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                assert (await side.load()).engine_healthy
                await asyncio.sleep(0.05)
        await update
        assert (await step).require_whole().version_spans[0].weight_version == "v2"
        assert not scheduler.requests("DeregisterEngine")


FAILURES = [
    Failure("http", 500),
    Failure("http", 503),
    Failure("http", 401),
    Failure("event", 500),
    Failure("abort", 503),
]
REFUSALS = [Failure("http", 400), Failure("event", 400), Failure("abort", 400)]


async def test_an_engine_that_fails_at_once_is_lost_for_its_steps_and_given_back(
    nats_url: str, engine: FakeSglang, scheduler: FakeScheduler
) -> None:
    """In each way of SGLang. Result: the step may go on elsewhere, the lease is given back at once,
    since a probe fails too, and the engine is registered again once a probe gets its tokens."""
    async with sidecar(nats_url, engine.url, scheduler=scheduler.address) as side:
        for failure in FAILURES:
            await until(lambda: scheduler.leases)
            engine.failure = failure
            with refused("ENGINE_LOST", grpc.StatusCode.UNAVAILABLE, says="the engine fails"):
                await run_step(side.stub, greedy(5))
            await until(lambda: not scheduler.leases)
            engine.failure = None
            await side.until_engine_is(True)


async def test_a_request_that_the_engine_finds_at_fault_is_refused_and_the_engine_stays(
    nats_url: str, engine: FakeSglang
) -> None:
    async with sidecar(nats_url, engine.url) as side:
        for engine.failure in REFUSALS:
            with refused(
                "ENGINE_REFUSED", grpc.StatusCode.FAILED_PRECONDITION, says="engine fails"
            ):
                await run_step(side.stub, greedy(5))
        engine.failure = None
        assert (await side.load()).engine_healthy
        (await run_step(side.stub, greedy(5))).require_whole()


async def test_a_request_that_upsets_its_engine_ends_no_other_step_there(
    nats_url: str, engine: FakeSglang
) -> None:
    """One prompt alone makes the engine fail. Result: its step may go on elsewhere, another step
    goes on here, and the engine is not given up."""
    async with sidecar(nats_url, engine.url) as side:
        engine.failure, engine.fails = Failure("http", 500), lambda body: 666 in body["input_ids"]
        other = Step(side.stub, greedy(100))
        await other.until_tokens(1)
        for _ in range(3):
            with refused("ENGINE_LOST"):
                await run_step(side.stub, greedy(5, [5, 666]))
        await until(lambda: engine.probes)
        (await other).require_whole()
        assert (await side.load()).engine_healthy


async def test_an_engine_whose_streams_bring_nothing_is_lost_although_it_answers_requests(
    nats_url: str, engine: FakeSglang
) -> None:
    """Requests in one piece are answered all the time. Result: the engine is lost until streams
    bring tokens again."""
    async with sidecar(nats_url, engine.url, engine_stall_s=STALL_S, decode_base_s=0.01) as side:
        step = Step(side.stub, greedy(3000))
        await step.until_tokens(5)
        engine.is_mute = True
        with refused("ENGINE_LOST", says="no progress"):
            await step
        probes = engine.probes
        await until(lambda: engine.probes >= probes + 2)
        assert not (await side.load()).engine_healthy
        engine.is_mute = False
        await side.until_engine_is(True)
        (await run_step(side.stub, greedy(5))).require_whole()
