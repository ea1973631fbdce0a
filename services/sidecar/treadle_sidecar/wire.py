"""Assemble the sidecar of one engine."""

import time
from functools import partial
from pathlib import Path
from typing import cast

from treadle.engine.v1 import engine_pb2
from treadle.engine.v1.engine_pb2_grpc import add_EngineServiceServicer_to_server
from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from treadle_core.engine_queue.pace import EngineProgress, EngineWork, MeasuredCurve
from treadle_core.engine_queue.preemptive_queue import QueuePolicy
from treadle_runtime.fields import timestamp
from treadle_runtime.http.sglang import EngineClient, open_session
from treadle_runtime.idempotency import RequestRecords
from treadle_runtime.identity import SealCheck
from treadle_runtime.server import Runtime, Wiring

from treadle_sidecar import convert
from treadle_sidecar.config import SidecarSettings
from treadle_sidecar.engine.watch import EngineNotes, EngineWatch, engine_lost
from treadle_sidecar.metrics import counting, watch_load
from treadle_sidecar.prefixes import Prefixes
from treadle_sidecar.probe import CurveProbe, GenerationProbe
from treadle_sidecar.registration import Registration, SchedulerClock
from treadle_sidecar.runner import Contexts, StepRunner
from treadle_sidecar.servicer import EngineServicer, TicketBook
from treadle_sidecar.weights import Weights


async def wire(runtime: Runtime) -> Wiring:
    settings = cast(SidecarSettings, runtime.settings)
    declared = convert.declared_curve(settings)
    measured = MeasuredCurve(declared)
    progress = EngineProgress(settings.engine_stall_s)
    notes = EngineNotes(EngineWork(measured.take), progress)
    session = open_session(settings.engine_key.get_secret_value())
    engine = EngineClient(settings.engine_url, session, observer=notes)
    watch = EngineWatch(engine, progress, measured.known)
    clock = SchedulerClock()
    contexts = Contexts()
    facts = convert.StepFacts(settings.engine_id, settings.tell_tokens)
    policy = QueuePolicy(
        slots=settings.slots,
        capacity=settings.queue_limit,
        preempt=settings.preempt,
        hysteresis=settings.hysteresis,
        min_run_tokens=settings.min_run_tokens,
    )
    runner = StepRunner(
        engine,
        watch,
        runtime.bus,
        facts,
        contexts,
        policy,
        measured.known,
        clock.now,
        counting(runtime.metrics),
    )
    storage = Path(settings.kv_storage_dir) if settings.kv_storage_dir else None
    prefixes = Prefixes(engine, watch, contexts, storage, settings.export_wait_s, runtime.channel)
    weights = Weights(engine, watch, runner, prefixes, runtime.bus, facts, settings.push_timeout_s)

    def curve() -> engine_pb2.DecodeCurve | None:
        return convert.curve_message(measured.known())

    async def info() -> engine_pb2.EngineInfo:
        if watch.profile is None:
            raise engine_lost(watch.problem)
        address = settings.advertise or await runtime.listening
        return convert.engine_info(
            settings, watch.profile, address, runner.queue.policy.slots, curve()
        )

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
            measured_at=timestamp(clock.now()),
            clock_ahead_s=clock.ahead_s,
            engine_healthy=watch.healthy,
            asleep_tags=sorted(watch.profile.asleep) if watch.profile else (),
        )

    watch_load(runtime.metrics, load)

    # Records of this engine's own: sidecars share a NATS, and the same request id may go to several
    # of them.
    name = "".join(char if char.isalnum() or char == "-" else "_" for char in settings.engine_id)
    records = await RequestRecords.open(runtime.bus, f"sidecar_{name}")
    seals = SealCheck() if runtime.certificates else None
    servicer = EngineServicer(
        *(runner, TicketBook(settings.engine_id, seals), prefixes, weights, records),
        *(load, info, clock.now),
    )

    probe = CurveProbe(engine, watch, runner, measured, settings.probe_s)
    tasks = [
        watch.run,
        runner.run,
        weights.run,
        GenerationProbe(engine, watch, runner, progress).run,
    ]
    if declared:
        probe.first_over.set()
    else:
        tasks.append(probe.run)
    if settings.scheduler:
        scheduler = SchedulerServiceStub(runtime.follow(settings.scheduler, "scheduler"))
        tasks.append(
            Registration(
                *(scheduler, watch, info, load, curve, probe.first_over, runtime.stopping),
                *(seals, clock),
            ).run
        )
    return Wiring(
        services={
            "treadle.engine.v1.EngineService": partial(
                add_EngineServiceServicer_to_server, servicer
            )
        },
        tasks=tasks,
        close=engine.close,
    )
