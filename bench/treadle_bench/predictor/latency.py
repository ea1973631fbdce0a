"""How long a prediction takes: a predictor as a process, with a learned model, asked as a scheduler asks.

Trajectories run side by side, their steps end at random, RATE_PER_S of them a second in all; the prompt is told when
the first step starts. At the end of each step its fact is published, with its texts, and the question asked at once. A
call's time is the caller's, over loopback; what the model kept of earlier steps, and read ahead while nobody asked, is
used as it is in a mesh. The head has learned nothing, which changes no time.
Predictions before the first step are left out: no text is known then, and siblings answer at once.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import numpy as np
from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle_cli.mesh.embedded_nats import start_nats
from treadle_cli.mesh.processes import ProcessTree
from treadle_cli.mesh.services import HOST, free_port
from treadle_runtime.bus import Bus, open_bus

from treadle_bench.options import BenchOptions
from treadle_bench.predictor.facts import facts_of, prompt_started

if TYPE_CHECKING:
    from treadle.telemetry.v1.facts_pb2 import Fact
    from treadle_learned.backbone import Backbone
    from treadle_learned.transcript import Transcript

RATE_PER_S = 4.0
SIDE_BY_SIDE = 16
REQUESTS = 240  # a minute's, a repeat
WARM_UP = 40  # steps before them
TOLD_TOKENS = 128  # ids a part that a sidecar is set to tell (`TELL_TOKENS`)
UNHURRIED_S = 20.0  # a deadline that no answer misses: late ones are to be measured, not answered by others
START_S, CALL_S = 120.0, 60.0
VERSION = "bench"
MS = 1e3


@dataclass
class Latency:
    """Milliseconds of each answered call."""

    took_ms: list[float] = field(default_factory=list)
    others: int = 0  # that the learned model did not answer

    def figures(self) -> dict[str, Any]:
        """p50_ms, p99_ms: of all calls of all repeats."""
        p50, p99 = np.percentile(self.took_ms, [50, 99]) if self.took_ms else (float("nan"), float("nan"))
        return {
            "p50_ms": round(float(p50), 1),
            "p99_ms": round(float(p99), 1),
            "latency_requests": len(self.took_ms),
            "latency_others": self.others,
            "latency_per_s": RATE_PER_S,
        }


async def measure(transcripts: Sequence[Transcript], backbone: Backbone, options: BenchOptions) -> dict[str, Any]:
    """No figures for no transcripts. Raises ProcessError."""
    told = [transcript for transcript in transcripts if len(transcript.turns) > 1]
    if not told:
        return {}
    found = Latency()
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-"))
    try:
        _untaught(backbone, folder / "models")
        async with ProcessTree(folder / "logs", hurry=options.hurry) as tree:
            _, nats_url = await start_nats(tree, folder, dict(os.environ))
            address = await _start(tree, folder, nats_url)
            async with open_bus(nats_url, "bench") as bus, grpc.aio.insecure_channel(address) as channel:
                stub = predictor_pb2_grpc.PredictorServiceStub(channel)
                for repeat in range(options.repeats):
                    options.progress.print(f"latency {repeat + 1}/{options.repeats}: {REQUESTS} predictions")
                    await _repeat(told, backbone, bus, stub, found, options.seed + repeat)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found.figures()


async def _repeat(
    told: Sequence[Transcript],
    backbone: Backbone,
    bus: Bus,
    stub: predictor_pb2_grpc.PredictorServiceAsyncStub,
    found: Latency,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    steps = _steps(told, backbone, rng, f"bench-{seed}")
    asked = 0
    while asked < WARM_UP:  # one after the other: a rollout's first burst is not what is measured
        facts, query = next(steps)
        for fact in facts:
            await bus.publish(fact)
        if query.turn:
            await _ask(stub, query, Latency())
            asked += 1
    due_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        asked = 0
        while asked < REQUESTS:
            facts, query = next(steps)
            if query.turn:
                due_s += float(rng.exponential(1.0 / RATE_PER_S))
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            for fact in facts:
                await bus.publish(fact)
            if query.turn:
                group.create_task(_ask(stub, query, found))
                asked += 1


async def _ask(stub: predictor_pb2_grpc.PredictorServiceAsyncStub, query: predictor_pb2.Query, found: Latency) -> None:
    began_s = time.perf_counter()
    answer = await stub.PredictRemaining(predictor_pb2.PredictRemainingRequest(query=query), timeout=CALL_S)
    took_ms = MS * (time.perf_counter() - began_s)
    if answer.prediction.estimator == predictor_pb2.ESTIMATOR_MODEL:
        found.took_ms.append(took_ms)
    else:
        found.others += 1


def _steps(
    told: Sequence[Transcript], backbone: Backbone, rng: np.random.Generator, name: str
) -> Iterator[tuple[list[Fact], predictor_pb2.Query]]:
    """Facts of a step's end, and the question after it; of a trajectory's beginning or end, and none. Of trajectories
    that run side by side, for ever."""
    running: list[Iterator[tuple[list[Fact], predictor_pb2.Query]]] = []
    number = 0
    while True:
        while len(running) < SIDE_BY_SIDE:
            running.append(_steps_of(told[int(rng.integers(len(told)))], f"{name}-{number}", backbone))
            number += 1
        at = int(rng.integers(len(running)))
        step = next(running[at], None)
        if step is None:
            running.pop(at)
        else:
            yield step


def _steps_of(
    transcript: Transcript, name: str, backbone: Backbone
) -> Iterator[tuple[list[Fact], predictor_pb2.Query]]:
    own = replace(transcript, trajectory_id=name)
    facts = facts_of(own, backbone.tokenize, most=TOLD_TOKENS)
    yield [next(facts), prompt_started(own, backbone.tokenize, most=TOLD_TOKENS)], predictor_pb2.Query()
    gen_tokens = 0
    for turn, done in enumerate(own.turns, start=1):
        gen_tokens += done.gen_tokens
        yield (
            [next(facts)],
            predictor_pb2.Query(
                trajectory_id=own.trajectory_id, prompt_id=own.prompt_id, turn=turn, gen_tokens=gen_tokens
            ),
        )
    yield list(facts), predictor_pb2.Query()  # its end


def _untaught(backbone: Backbone, models: Path) -> None:
    from treadle_learned.checkpoint import Checkpoint, ModelsFolder, save
    from treadle_learned.head import QuantileHead
    from treadle_learned.reading import Bounds

    models.mkdir()
    head = QuantileHead(backbone.hidden_size).eval()
    checkpoint = Checkpoint(VERSION, backbone.name, backbone.fingerprint, backbone.hidden_size, Bounds(), head)
    save(checkpoint, models / VERSION)
    ModelsFolder(models).promote(VERSION)


async def _start(tree: ProcessTree, folder: Path, nats_url: str) -> str:
    address = f"{HOST}:{free_port()}"
    ready = folder / "predictor.ready.json"
    settings = {
        "LISTEN": address,
        "READY_FILE": str(ready),
        "NATS_URL": nats_url,
        "MODELS": str(folder / "models"),
        "DEADLINE_S": str(UNHURRIED_S),
        "THREADS": str(os.cpu_count() or 1),
    }
    env = {**os.environ, **{f"TREADLE_PREDICTOR_{name}": value for name, value in settings.items()}}
    child = tree.start("predictor", [sys.executable, "-m", "treadle_predictor"], env=env)

    async def is_ready() -> str | None:
        return address if ready.exists() else None

    return await child.until(is_ready, "ready file", START_S)
