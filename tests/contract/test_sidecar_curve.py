"""The sidecar measures its engine's decode curve: by a probe while nothing runs, and from the steps
that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.conditions import until
from support.engine_steps import Step, run_step, step_request, ticket
from support.facts import hear
from support.fake_scheduler import FakeScheduler
from support.fake_servicer import Port
from support.fake_sglang import CONTEXT, FakeSglang, expected, fake_sglang
from support.sidecar_in_process import Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from treadle_sidecar import probe
from treadle_sidecar.probe import CONTEXTS, ROUNDS, TOKENS

T = 20.0
PROBE_S = 30.0  # no probe of these tests takes so long
BATCHES = (1, 2, 4)  # alone, half, and all of four slots


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler()  # type: ignore[abstract]
    async with Port(add_SchedulerServiceServicer_to_server, fake) as fake.address:
        yield fake


@asynccontextmanager
async def slow_engine(nats_url: str, **options: Any) -> AsyncIterator[tuple[Sidecar, FakeSglang]]:
    """Its first probe is under way: one sequence of 64 tokens, which would take ten seconds."""
    async with (
        fake_sglang(token_s=1.0) as engine,
        sidecar(nats_url, engine.url, probe_s=PROBE_S, slots=4, **options) as side,
    ):
        await until(lambda: probes(engine))
        yield side, engine


def probes(engine: FakeSglang) -> list[dict[str, Any]]:
    """The requests of probes that the engine got."""
    return [each for each in engine.requests if str(each.get("rid")).endswith("-probe")]


async def serve(side: Sidecar, steps: int, tokens: int = 40) -> None:
    """Steps of some trajectories, all at once."""
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    async with asyncio.TaskGroup() as group:
        for index in range(steps):
            prompt = list(range(5 + index, 50 + 9 * index))
            group.create_task(run_step(side.stub, step_request(ticket("e0"), prompt, sampling)))


async def curve_of(side: Sidecar) -> engine_pb2.DecodeCurve:
    return (
        await side.stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=T)
    ).info.decode_curve


def renewed(scheduler: FakeScheduler) -> Sequence[engine_pb2.DecodeCurve]:
    """The curves of all renewals, unset ones too."""
    return [request.decode_curve for request in scheduler.requests("RenewEngineLease")]


def step_s(scheduler: FakeScheduler) -> float:
    """A step of four sequences of 100 tokens by the curve of the last renewal; 0 while there is
    none."""
    return sum(
        each.base_s + 4 * each.per_sequence_s + 400 * each.per_kv_token_s
        for each in renewed(scheduler)[-1:]
    )


async def test_an_engine_is_registered_with_the_curve_of_its_probe(
    nats_url: str, engine: FakeSglang, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is too slow for long prompts. Result: the scheduler has a curve from the first
    moment; the probe was as small as documented, shared a prompt a round, and was no step to
    anybody."""
    monkeypatch.setattr(probe, "PREFILL_S", 0.0)
    async with sidecar(
        nats_url, engine.url, scheduler=scheduler.address, probe_s=PROBE_S, slots=4
    ) as side:
        facts = await hear(side.runtime.bus)
        await until(lambda: scheduler.requests("RegisterEngine"))
        curve = scheduler.requests("RegisterEngine")[0].info.decode_curve
        assert curve.base_s + curve.per_sequence_s > 0.0
        assert curve.prefill_tokens_per_s > 0.0
        assert min(curve.per_kv_token_s, curve.prefill_pair_s) >= 0.0
        assert await curve_of(side) == curve
        await until(lambda: step_s(scheduler) > 0.0)

        sent = probes(engine)
        sizes = [len(request["input_ids"]) for request in sent]
        rounds = [BATCHES, *([(1,)] * (ROUNDS - 1))]
        assert sizes == [
            context
            for batches in rounds
            for context in CONTEXTS
            for batch in batches
            for _ in range(batch)
        ]
        prompts = {
            tuple(request["input_ids"])
            for request in sent
            if len(request["input_ids"]) == max(CONTEXTS)
        }
        assert len(prompts) == ROUNDS
        assert all(
            any(
                list(prompt[: len(request["input_ids"])]) == request["input_ids"]
                for prompt in prompts
            )
            for request in sent
        )
        assert {request["sampling_params"]["max_new_tokens"] for request in sent} == {TOKENS}
        assert {request["cache_salt"] for request in sent} == {engine.weight_version}
        load = await side.load()
        assert (load.running_steps, load.waiting_steps, load.decode_tokens_per_s) == (0, 0, 0.0)
        assert facts == []


async def test_a_probe_of_a_fast_engine_has_longer_prompts_after_its_first_round(
    nats_url: str, engine: FakeSglang, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result: the later rounds have prompts as long as the engine takes with room for an output."""
    monkeypatch.setattr(probe, "PREFILL_S", 30.0)
    async with sidecar(nats_url, engine.url, scheduler=scheduler.address, probe_s=PROBE_S, slots=4):
        await until(lambda: scheduler.requests("RegisterEngine"))
        sizes = [len(request["input_ids"]) for request in probes(engine)]
        later = sizes[-len(CONTEXTS) * (ROUNDS - 1) :]
        assert max(sizes[: -len(later)]) == max(CONTEXTS)
        assert max(later) == CONTEXT - 6 - TOKENS
        assert sorted(later[-len(CONTEXTS) :]) == later[-len(CONTEXTS) :]


async def test_without_a_probe_the_curve_is_learned_from_the_steps(
    nats_url: str, engine: FakeSglang, scheduler: FakeScheduler
) -> None:
    """Result: none is registered; once steps have run, renewals bring one, as often the same as the
    engine is."""
    async with sidecar(
        nats_url, engine.url, scheduler=scheduler.address, probe_s=0.0, slots=4
    ) as side:
        await until(lambda: renewed(scheduler))
        assert not scheduler.requests("RegisterEngine")[0].info.HasField("decode_curve")
        assert not scheduler.requests("RenewEngineLease")[-1].HasField("decode_curve")
        await serve(side, steps=6)
        await until(lambda: step_s(scheduler) > 0.0)
        assert not probes(engine)


async def test_an_engine_that_becomes_slow_gets_another_curve(
    nats_url: str, engine: FakeSglang, scheduler: FakeScheduler
) -> None:
    """Result: a renewal brings the slower curve, and the engine is not registered again, which
    would lose its steps."""
    async with sidecar(
        nats_url, engine.url, scheduler=scheduler.address, probe_s=0.0, slots=4
    ) as side:
        await serve(side, steps=4, tokens=60)
        await until(lambda: step_s(scheduler) > 0.0)
        fast_s = step_s(scheduler)
        engine.token_s = max(10 * engine.token_s, 4 * fast_s)
        await serve(side, steps=4, tokens=150)
        await until(lambda: step_s(scheduler) > 2 * fast_s)
        assert len(scheduler.requests("RegisterEngine")) == 1


async def test_a_declared_curve_stays_and_is_not_probed(
    nats_url: str, engine: FakeSglang, scheduler: FakeScheduler
) -> None:
    declared = engine_pb2.DecodeCurve(base_s=0.5, prefill_tokens_per_s=9.0, prefill_pair_s=1e-6)
    given: dict[str, Any] = {
        "decode_base_s": 0.5,
        "prefill_tokens_per_s": 9.0,
        "prefill_pair_s": 1e-6,
    }
    async with sidecar(
        nats_url, engine.url, scheduler=scheduler.address, probe_s=PROBE_S, **given
    ) as side:
        await serve(side, steps=4)
        await until(lambda: len(renewed(scheduler)) >= 2)
        assert scheduler.requests("RegisterEngine")[0].info.decode_curve == declared
        assert all(curve == declared for curve in renewed(scheduler))
        assert not probes(engine)


async def test_a_probe_ends_at_once_when_a_step_comes(
    nats_url: str, scheduler: FakeScheduler
) -> None:
    """Result: the step does not wait for the probe; the probe's request is aborted, no other
    follows, and the engine is registered."""
    async with slow_engine(nats_url, scheduler=scheduler.address) as (side, engine):
        prompt = list(range(5, 60))
        sampling = SamplingParams(max_new_tokens=5, temperature=0.0)
        step = Step(side.stub, step_request(ticket("e0"), prompt, sampling))
        await until(lambda: engine.aborts)
        assert engine.aborts[0] == probes(engine)[0]["rid"]
        assert not step.seen.tokens, (
            "the abort is sent before the step has its first token, which takes a second"
        )
        engine.token_s = 0.001
        assert (await step).tokens.tolist() == expected(prompt, 5)
        await until(lambda: scheduler.requests("RegisterEngine"))
        assert len(probes(engine)) == 1
        assert not scheduler.requests("RegisterEngine")[0].info.HasField("decode_curve")


@pytest.mark.parametrize("mode", [engine_pb2.PAUSE_MODE_KEEP, engine_pb2.PAUSE_MODE_ABORT])
async def test_a_pause_waits_until_the_probe_has_left_the_engine(
    nats_url: str, mode: engine_pb2.PauseMode.ValueType
) -> None:
    async with slow_engine(nats_url) as (side, engine):
        paused = side.stub.Pause(engine_pb2.PauseRequest(request_id="pause", mode=mode), timeout=T)
        await until(lambda: engine.aborts)
        engine.token_s = 0.001
        await paused
        assert not engine._running


async def test_a_probe_is_cut_at_its_limit(nats_url: str, scheduler: FakeScheduler) -> None:
    async with (
        fake_sglang(token_s=0.2) as engine,
        sidecar(nats_url, engine.url, scheduler=scheduler.address, probe_s=0.1),
    ):
        await until(lambda: scheduler.requests("RegisterEngine"))
        assert len(probes(engine)) == 1
        assert engine.aborts[0] == probes(engine)[0]["rid"]


async def test_an_engine_that_dies_in_a_probe_is_probed_no_further_and_is_lost(
    nats_url: str, scheduler: FakeScheduler
) -> None:
    async with slow_engine(nats_url, scheduler=scheduler.address) as (side, engine):
        await engine.stop()
        await side.until_engine_is(False)
        await engine.start()
        await side.until_engine_is(True)
        await until(lambda: scheduler.requests("RegisterEngine"))
        assert len(probes(engine)) == 1
