"""Assemble the sidecar of one engine."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from treadle.engine.v1 import engine_pb2
from treadle.engine.v1.engine_pb2_grpc import add_EngineServiceServicer_to_server
from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from treadle_core.engine_queue.pace import EngineProgress, EngineWork, MeasuredCurve
from treadle_core.engine_queue.preemptive_queue import QueuePolicy
from treadle_core.model import DecodeCurve
from treadle_runtime.fields import seconds, timestamp
from treadle_runtime.idempotency import RequestRecords
from treadle_runtime.identity import SealCheck
from treadle_runtime.server import Runtime, Wiring
from treadle_runtime.telemetry import Metrics

from treadle_sidecar import convert
from treadle_sidecar.config import SidecarSettings
from treadle_sidecar.engine.client import EngineClient
from treadle_sidecar.engine.watch import EngineWatch, engine_lost
from treadle_sidecar.prefixes import Contexts, Prefixes
from treadle_sidecar.probe import CurveProbe, GenerationProbe
from treadle_sidecar.registration import Registration
from treadle_sidecar.runner import StepRunner
from treadle_sidecar.servicer import EngineServicer, TicketBook
from treadle_sidecar.weights import Weights


async def wire(runtime: Runtime) -> Wiring:
    settings = cast(SidecarSettings, runtime.settings)
    declared, measured = convert.declared_curve(settings), MeasuredCurve()

    def known_curve() -> DecodeCurve | None:
        return declared or measured.declared

    progress = EngineProgress(settings.engine_stall_s)
    engine = EngineClient(settings.engine_url, EngineWork(measured.take), progress)
    watch = EngineWatch(engine, progress, known_curve)
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
        engine, watch, runtime.bus, facts, contexts, policy, known_curve, counting(runtime.metrics)
    )
    storage = Path(settings.kv_storage_dir) if settings.kv_storage_dir else None
    prefixes = Prefixes(engine, watch, contexts, storage, settings.export_wait_s, runtime.channel)
    weights = Weights(engine, watch, runner, prefixes, runtime.bus, facts, settings.push_timeout_s)

    def curve() -> engine_pb2.DecodeCurve | None:
        return convert.curve_message(known_curve())

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
            measured_at=timestamp(time.time()),
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
        runner, TicketBook(settings.engine_id, seals), prefixes, weights, records, load, info
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
                scheduler, watch, info, load, curve, probe.first_over, runtime.stopping, seals
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


def watch_load(metrics: Metrics, load: Callable[[], engine_pb2.Load]) -> None:
    """Report the engine's state in the metrics from now on."""
    gauges = (
        ("running", "step", "Steps that run on the engine", "running_steps"),
        ("waiting", "step", "Steps in the queue in front of the engine", "waiting_steps"),
        ("slots", "step", "Steps that may run at once", "slot_limit"),
        ("oldest_wait", "s", "Wait of the step that waits longest", "oldest_wait_s"),
        ("kv.used", "token", "KV that running steps hold", "kv_tokens_used"),
        ("kv.capacity", "token", "KV that the engine has room for", "kv_tokens_capacity"),
        ("healthy", "engine", "1 while the engine generates, else 0", "engine_healthy"),
    )
    for noun, unit, what, field in gauges:
        metrics.gauge(noun, unit, what, lambda field=field: getattr(load(), field) * 1)


def counting(metrics: Metrics) -> Callable[[engine_pb2.StepFinished], None]:
    """Return a function that counts and times each step that has ended (docs/metrics.md)."""
    step_s = metrics.seconds("step", "Where the time of steps went, by part")
    steps = metrics.total(
        "steps", "step", "Steps by why they ended; one that ended with an error is not among them"
    )
    tokens = metrics.total("tokens", "token", "Sampled tokens")
    cached = metrics.total("cached", "token", "Prompt tokens of steps whose KV was there")
    preemptions = metrics.total("preemptions", "preemption", "Evictions of running steps")
    resumed = metrics.total(
        "resumed", "token", "Tokens that preempted steps sent again, by whether their KV was kept"
    )

    def count(finished: engine_pb2.StepFinished) -> None:
        timing = finished.timing
        waits_s = seconds(timing.preempted) + seconds(timing.weights)
        step_s(max(0.0, seconds(timing.queue) - waits_s), {"part": "queue"})
        for part in ("prefill", "decode", "preempted", "weights"):
            step_s(seconds(getattr(timing, part)), {"part": part})
        steps(
            1,
            {
                "reason": engine_pb2.FinishReason.Name(finished.reason)
                .removeprefix("FINISH_REASON_")
                .lower()
            },
        )
        tokens(sum(span.end_token - span.start_token for span in finished.version_spans))
        cached(finished.cached_tokens)
        preemptions(finished.preemptions)
        resumed(finished.resumed_cached_tokens, {"kv": "kept"})
        resumed(finished.resumed_prompt_tokens - finished.resumed_cached_tokens, {"kv": "lost"})

    return count
