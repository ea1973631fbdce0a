"""Puts the sidecar together by hand."""

import time
from pathlib import Path
from typing import cast

import grpc.aio
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle_core.steps.queue import QueuePolicy
from treadle_runtime.errors import Unavailable
from treadle_runtime.idempotency import RequestRecords
from treadle_runtime.server import Runtime, Wiring

from treadle_sidecar import convert
from treadle_sidecar.config import SidecarSettings
from treadle_sidecar.engine.client import EngineClient
from treadle_sidecar.engine.watch import EngineWatch
from treadle_sidecar.engine.weights import Weights
from treadle_sidecar.facts import StepFacts
from treadle_sidecar.kv.prefixes import Contexts, Prefixes
from treadle_sidecar.registration import Registration
from treadle_sidecar.servicer import EngineServicer
from treadle_sidecar.steps.runner import StepRunner
from treadle_sidecar.steps.step import TicketBook

SERVICE_NAME = "treadle.engine.v1.EngineService"
RETRY_S = 2.0


async def wire(runtime: Runtime) -> Wiring:
    """Everything around one engine."""
    settings = cast(SidecarSettings, runtime.settings)
    engine = EngineClient(settings.engine_url, settings.engine_stall_s)
    watch = EngineWatch(engine)
    contexts = Contexts()
    facts = StepFacts(runtime.bus, settings.engine_id, settings.tell_tokens)
    policy = QueuePolicy(
        slots=settings.slots,
        capacity=settings.queue_limit,
        preempt=settings.preempt,
        hysteresis=settings.hysteresis,
        min_run_tokens=settings.min_run_tokens,
    )
    runner = StepRunner(engine, watch, facts, contexts, policy)
    storage = Path(settings.kv_storage_dir) if settings.kv_storage_dir else None
    prefixes = Prefixes(engine, watch, contexts, storage, settings.export_wait_s)
    weights = Weights(engine, watch, runner, prefixes, facts)

    async def info() -> engine_pb2.EngineInfo:
        if watch.profile is None:
            raise Unavailable("ENGINE_LOST", "the engine has not answered yet", retry_after_s=RETRY_S)
        address = settings.advertise or await runtime.listening
        return convert.engine_info(settings, watch.profile, address, runner.queue.policy.slots)

    def load() -> engine_pb2.Load:
        now = time.monotonic()
        return engine_pb2.Load(
            running_steps=runner.queue.running,
            waiting_steps=runner.queue.waiting,
            slot_limit=runner.queue.policy.slots,
            kv_tokens_used=watch.kv_tokens_used,
            kv_tokens_capacity=watch.profile.kv_tokens if watch.profile else 0,
            decode_tokens_per_s=runner.meter.tokens_per_s(now),
            paused=runner.queue.paused,
            weight_version=watch.profile.weight_version if watch.profile else "",
            oldest_wait_s=runner.oldest_wait_s,
            measured_at=convert.timestamp(time.time()),
            engine_healthy=watch.healthy,
        )

    # Records of this engine's own: sidecars share a NATS, and the same request id may go to several of them.
    records = await RequestRecords.open(runtime.bus, f"sidecar_{_bucket_name(settings.engine_id)}")
    servicer = EngineServicer(
        runner=runner,
        tickets=TicketBook(settings.engine_id),
        contexts=contexts,
        prefixes=prefixes,
        weights=weights,
        records=records,
        load=load,
        info=info,
        channel=runtime.channel,
    )

    def add(server: grpc.aio.Server) -> None:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)

    tasks = [watch.run, runner.run]
    if settings.scheduler:
        registration = Registration(runtime.channel(settings.scheduler), watch, info, load, runtime.stopping)
        tasks.append(registration.run)
    return Wiring(services={SERVICE_NAME: add}, tasks=tasks, close=engine.close)


def _bucket_name(engine_id: str) -> str:
    return "".join(char if char.isalnum() or char == "-" else "_" for char in engine_id)
