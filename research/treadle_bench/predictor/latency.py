"""How long a prediction takes: a predictor service with a learned model, called as the scheduler
calls it.

SIDE_BY_SIDE trajectories run at once; their steps end at random, RATE_PER_S of them a second
together. At the end of each step its fact is published, with its texts, and a prediction is
requested at once. Times are those of the caller, over loopback. The service uses what it kept of
earlier steps and what it read ahead, as in a mesh. Its head has learned nothing, which does not
change the time. Predictions before the first step are not counted: no text is known then, and
siblings answer at once.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle_cli.predictor.transcripts import facts_of, prompt_started
from treadle_learned.backbone import Backbone
from treadle_learned.checkpoint import Checkpoint, ModelsFolder, save
from treadle_learned.head import QuantileHead
from treadle_learned.reading import Bounds
from treadle_learned.transcript import Transcript
from treadle_runtime.bus import Bus, open_bus

from treadle_bench.bench import BenchOptions
from treadle_bench.processes import run_service

# the facts of a step's end, and the question after it
Asked = tuple[list[Fact], predictor_pb2.Query]

RATE_PER_S = 4.0
SIDE_BY_SIDE = 16
REQUESTS = 240  # a repeat: one minute
WARM_UP = 40  # steps before them, which are not counted
TOLD_TOKENS = 128  # ids of each text in a fact (`TELL_TOKENS` of a sidecar)
DEADLINE_S = 20.0  # so long that the model answers every question and slow answers are measured too
CALL_S = 60.0
VERSION = "bench"
MS = 1e3


async def measure(
    transcripts: Sequence[Transcript], backbone: Backbone, options: BenchOptions
) -> dict[str, Any]:
    """The figures, none without transcripts of several turns. Raises ProcessError."""
    played = [transcript for transcript in transcripts if len(transcript.turns) > 1]
    if not played:
        return {}
    took_ms: list[float] = []
    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as models:
        _save_untrained_model(backbone, Path(models))
        settings = {
            "MODELS": models,
            "DEADLINE_S": str(DEADLINE_S),
            "THREADS": str(os.cpu_count() or 1),
        }
        async with (
            run_service("predictor", options, **settings) as service,
            open_bus(service.nats_url, "bench") as bus,
            grpc.aio.insecure_channel(service.address) as channel,
        ):
            stub = predictor_pb2_grpc.PredictorServiceStub(channel)
            for number, seed in enumerate(options.seeds, 1):
                options.progress.print(
                    f"latency {number}/{options.repeats}: {REQUESTS} predictions"
                )
                took_ms += await _repeat(played, backbone, bus, stub, seed)
    p50, p99 = np.percentile(took_ms, [50, 99]) if took_ms else (float("nan"), float("nan"))
    return {
        "p50_ms": round(float(p50), 1),
        "p99_ms": round(float(p99), 1),
        "latency_requests": len(took_ms),
        "latency_others": REQUESTS * options.repeats - len(took_ms),
        "latency_per_s": RATE_PER_S,
    }


async def _repeat(
    played: Sequence[Transcript],
    backbone: Backbone,
    bus: Bus,
    stub: predictor_pb2_grpc.PredictorServiceAsyncStub,
    seed: int,
) -> list[float]:
    """Milliseconds of the answers of the learned model to REQUESTS questions."""
    rng = np.random.default_rng(seed)
    steps = _steps(played, backbone, rng, f"bench-{seed}")
    tasks: list[asyncio.Task[float | None]] = []
    due_s = 0.0
    async with asyncio.TaskGroup() as group:
        while len(tasks) < WARM_UP + REQUESTS:
            facts, query = next(steps)
            is_warm = len(tasks) >= WARM_UP
            if query.turn and is_warm:
                due_s += float(rng.exponential(1.0 / RATE_PER_S))
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            for fact in facts:
                await bus.publish(fact)
            if query.turn:
                tasks.append(group.create_task(_time_answer(stub, query)))
                if not is_warm:  # one after the other: the first burst of a rollout is not measured
                    await tasks[-1]
                    due_s = time.perf_counter()
    return [took_ms for task in tasks[WARM_UP:] if (took_ms := task.result()) is not None]


async def _time_answer(
    stub: predictor_pb2_grpc.PredictorServiceAsyncStub, query: predictor_pb2.Query
) -> float | None:
    """Milliseconds of an answer, None where it is not from the learned model."""
    began_s = time.perf_counter()
    answer = await stub.PredictRemaining(
        predictor_pb2.PredictRemainingRequest(query=query), timeout=CALL_S
    )
    took_ms = MS * (time.perf_counter() - began_s)
    return took_ms if answer.prediction.estimator == predictor_pb2.ESTIMATOR_MODEL else None


def _steps(
    played: Sequence[Transcript], backbone: Backbone, rng: np.random.Generator, name: str
) -> Iterator[Asked]:
    """Endless steps of trajectories that run side by side. At the start and end of one the question
    is empty."""
    running: list[Iterator[Asked]] = []
    number = 0
    while True:
        while len(running) < SIDE_BY_SIDE:
            running.append(
                _steps_of(played[int(rng.integers(len(played)))], f"{name}-{number}", backbone)
            )
            number += 1
        at = int(rng.integers(len(running)))
        step = next(running[at], None)
        if step is None:
            running.pop(at)
        else:
            yield step


def _steps_of(transcript: Transcript, name: str, backbone: Backbone) -> Iterator[Asked]:
    own = replace(transcript, trajectory_id=name)
    facts = facts_of(own, backbone.tokenize, most=TOLD_TOKENS)
    yield (
        [next(facts), prompt_started(own, backbone.tokenize, most=TOLD_TOKENS)],
        predictor_pb2.Query(),
    )
    gen_tokens = 0
    for turn, done in enumerate(own.turns, start=1):
        gen_tokens += done.gen_tokens
        query = predictor_pb2.Query(
            trajectory_id=name, prompt_id=own.prompt_id, turn=turn, gen_tokens=gen_tokens
        )
        yield [next(facts)], query
    yield list(facts), predictor_pb2.Query()


def _save_untrained_model(backbone: Backbone, models: Path) -> None:
    head = QuantileHead(backbone.hidden_size).eval()
    checkpoint = Checkpoint(
        VERSION, backbone.name, backbone.fingerprint, backbone.hidden_size, Bounds(), head
    )
    save(checkpoint, models / VERSION)
    ModelsFolder(models).promote(VERSION)
