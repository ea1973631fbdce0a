"""A step through the sidecar against the engine's HTTP alone, on the same prompts.

The two run in turns (A B, then B A, so that a drift of the machine hits both alike), greedy and of fixed length, each
from a cold KV cache; what counts is the median of the differences within the pairs. The engine alone is read from a
bare socket, so that it is not charged for an HTTP library. Tickets are asked for before the clock starts: what
ScheduleStep costs is measured apart.
"""

import asyncio
import json
import random
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from treadle.common.v1 import tokens_pb2
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2
from treadle.types import pack_ids
from treadle_cli.mesh.engines import forget_caches
from treadle_cli.mesh.mesh import Mesh

from treadle_bench.control_plane.schedule_steps import DEADLINE_S, close_trajectory, open_trajectory
from treadle_bench.options import BenchOptions
from treadle_bench.samples import Samples

if TYPE_CHECKING:
    from treadle.engine.v1.engine_pb2_grpc import EngineServiceAsyncStub
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

PROMPTS = 4  # a repeat
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 32  # about 2 s on one core, where a token takes 60 ms
HIGHEST_TOKEN_ID = 40_000  # below the vocabulary of any model that the demo serves
STEP_DEADLINE_S = 300.0


@dataclass(frozen=True)
class StepTime:
    """Seconds from the request to the first token, and to the end."""

    first_token_s: float
    whole_s: float


@dataclass(frozen=True)
class SidecarTimes:
    """Medians: *_added_* of the differences within pairs, engine_* of the engine alone."""

    first_token_added_s: float
    step_added_fraction: float
    added_s_per_token: float
    engine_first_token_s: float
    engine_step_s: float
    pairs: int


async def measure_sidecar(
    mesh: Mesh, scheduler: "SchedulerServiceAsyncStub", sidecar: "EngineServiceAsyncStub", options: BenchOptions
) -> SidecarTimes:
    """PROMPTS pairs a repeat; one pair is run first and thrown away."""
    rng = random.Random(options.seed)
    pairs: list[tuple[StepTime, StepTime]] = []
    for number in range(options.repeats * PROMPTS + 1):
        prompt = [rng.randrange(HIGHEST_TOKEN_ID) for _ in range(PROMPT_TOKENS)]
        alone, through = None, None
        for side in ("alone", "through") if number % 2 else ("through", "alone"):
            await forget_caches(mesh.engines, mesh.hicache_folder, mesh.board.note)
            if side == "alone":
                alone = await engine_alone(mesh.engines[0].url, prompt)
            else:
                through = await _through_sidecar(scheduler, sidecar, prompt)
        assert alone is not None
        assert through is not None
        if number > 0:
            pairs.append((alone, through))
        if number and number % PROMPTS == 0:
            options.progress.print(f"steps {number // PROMPTS}/{options.repeats}", highlight=False)
    return summary(pairs)


def summary(pairs: list[tuple[StepTime, StepTime]]) -> SidecarTimes:
    """Of (engine alone, through the sidecar)."""
    added = Samples(through.whole_s - alone.whole_s for alone, through in pairs)
    return SidecarTimes(
        first_token_added_s=Samples(b.first_token_s - a.first_token_s for a, b in pairs).median,
        step_added_fraction=Samples(b.whole_s / a.whole_s - 1 for a, b in pairs).median,
        added_s_per_token=added.median / OUTPUT_TOKENS,
        engine_first_token_s=Samples(a.first_token_s for a, _ in pairs).median,
        engine_step_s=Samples(a.whole_s for a, _ in pairs).median,
        pairs=len(pairs),
    )


async def engine_alone(url: str, prompt: list[int]) -> StepTime:
    """One step at the engine's /generate, asking for what the sidecar asks for. Raises OSError, ValueError."""
    parts = urlsplit(url)
    body = json.dumps(
        {
            "rid": uuid.uuid4().hex,
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "sampling_seed": 0,
                "skip_special_tokens": False,
            },
            "cache_salt": "bench",
            "stream": True,
            "return_logprob": True,
        }
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        begun_s, first_s, received = time.perf_counter(), 0.0, 0
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(STEP_DEADLINE_S):
            async for line in reader:
                if line.startswith(b"data: {"):
                    received = int(json.loads(line[6:])["meta_info"]["completion_tokens"])
                    first_s = first_s or time.perf_counter()
                elif line.startswith(b"data: [DONE]"):
                    break
        ended_s = time.perf_counter()
    finally:
        writer.close()
        await writer.wait_closed()
    if received != OUTPUT_TOKENS:
        raise ValueError(f"the engine gave {received} of {OUTPUT_TOKENS} tokens")
    return StepTime(first_s - begun_s, ended_s - begun_s)


async def _through_sidecar(
    scheduler: "SchedulerServiceAsyncStub", sidecar: "EngineServiceAsyncStub", prompt: list[int]
) -> StepTime:
    trajectory_id = await open_trajectory(scheduler, len(prompt))
    asked = scheduler_pb2.ScheduleStepRequest(
        request_id=uuid.uuid4().hex,
        trajectory_id=trajectory_id,
        turn=0,
        context_tokens=len(prompt),
        max_new_tokens=OUTPUT_TOKENS,
    )
    ticket = (await scheduler.ScheduleStep(asked, timeout=DEADLINE_S)).ticket
    request = engine_pb2.GenerateRequest(
        ticket=ticket,
        prompt=tokens_pb2.TokenIds(int32_le=pack_ids(prompt)),
        sampling=tokens_pb2.SamplingParams(max_new_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
    )
    begun_s, first_s, received = time.perf_counter(), 0.0, 0
    async for event in sidecar.Generate(request, timeout=STEP_DEADLINE_S):
        if event.WhichOneof("event") == "tokens":
            first_s = first_s or time.perf_counter()
            received += len(event.tokens.token_ids.int32_le) // 4
    ended_s = time.perf_counter()
    await close_trajectory(scheduler, trajectory_id)
    if received != OUTPUT_TOKENS:
        raise ValueError(f"the sidecar gave {received} of {OUTPUT_TOKENS} tokens")
    return StepTime(first_s - begun_s, ended_s - begun_s)
