"""Steps at a sidecar as a client sees them: a ticket, the stream's events, and whether what came is
whole."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from support.conditions import until
from support.fake_sglang import FakeSglang
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.common.v1.tokens_pb2 import SamplingParams, TokenIds
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc

STEP_TIMEOUT_S = 90.0
TICKET_LIFE_S = 300.0


@dataclass
class StepResult:
    """Everything one stream said."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    offsets: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # one a token
    started: list[engine_pb2.StepStarted] = field(default_factory=list)
    preempted: list[engine_pb2.StepPreempted] = field(default_factory=list)
    finished: engine_pb2.StepFinished | None = None

    def take(self, response: engine_pb2.GenerateResponse) -> None:
        """One event."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self.started.append(response.started)
        elif kind == "preempted":
            self.preempted.append(response.preempted)
        elif kind == "finished":
            self.finished = response.finished
        else:
            chunk = response.tokens
            self.offsets.append(chunk.offset)
            ids = int32s(chunk.token_ids.int32_le)
            self.versions += [chunk.weight_version] * len(ids)
            self.tokens += ids
            self.logprobs.frombytes(chunk.logprobs.float32_le)

    def require_whole(self, resumed: int = 0, *, honest: bool = True) -> engine_pb2.StepFinished:
        """Asserts that no token is missing or there twice, that each has its logprob and its
        version; the end. honest: the engine names the same versions at the end as before."""
        finished = self.finished
        assert finished is not None
        assert len(self.logprobs) == len(self.tokens) == finished.output_tokens - resumed
        assert all(value <= 0.0 for value in self.logprobs)
        assert not self.offsets or self.offsets[0] == resumed
        assert self.offsets == sorted(set(self.offsets))
        covered = resumed
        for span in finished.version_spans:
            assert span.start_token == covered < span.end_token
            covered = span.end_token
            spoken = set(self.versions[span.start_token - resumed : span.end_token - resumed])
            assert spoken == {span.weight_version} or not honest
        assert covered == finished.output_tokens
        assert finished.preemptions == len(self.preempted)
        assert [start.attempt for start in self.started] == list(range(len(self.started)))
        timing = finished.timing
        parts = sum(part.ToNanoseconds() for part in (timing.queue, timing.prefill, timing.decode))
        assert (
            abs(parts - (timing.finished_at.ToNanoseconds() - timing.accepted_at.ToNanoseconds()))
            < 1_000_000
        )
        return finished


def ticket(
    engine_id: str,
    *,
    priority: float = 0.0,
    trajectory_id: str = "",
    turn: int = 0,
    preemptible: bool | None = None,
) -> Ticket:
    """A fresh ticket, good for some minutes. preemptible None: as an older scheduler leaves it
    out."""
    made = Ticket(
        ticket_id=uuid.uuid4().hex,
        trajectory_id=trajectory_id or uuid.uuid4().hex,
        turn=turn,
        engine_id=engine_id,
        priority=priority,
        preemptible=preemptible,
        cache_salt="default",
        weight_version="default",
    )
    made.expires_at.FromNanoseconds(round((time.time() + TICKET_LIFE_S) * 1e9))
    return made


def step_request(
    for_ticket: Ticket, prompt: Sequence[int], sampling: SamplingParams, resumed: Sequence[int] = ()
) -> engine_pb2.GenerateRequest:
    """A step as a client asks for it."""
    return engine_pb2.GenerateRequest(
        ticket=for_ticket, prompt=packed(prompt), sampling=sampling, resumed_output=packed(resumed)
    )


class Step:
    """A step in flight. `seen` is what its stream has said so far; await the step for
    everything."""

    def __init__(
        self, stub: engine_pb2_grpc.EngineServiceAsyncStub, request: engine_pb2.GenerateRequest
    ) -> None:
        self.seen = StepResult()
        self._task = asyncio.create_task(self._read(stub, request))

    async def until_tokens(self, count: int) -> None:
        """Returns once so many tokens have come. Raises what the stream ended with before."""
        await until(
            lambda: len(self.seen.tokens) >= count or self._task.done(), within_s=STEP_TIMEOUT_S
        )
        if self._task.done():
            self._task.result()

    def __await__(self) -> Generator[Any, None, StepResult]:
        return self._task.__await__()

    async def _read(
        self, stub: engine_pb2_grpc.EngineServiceAsyncStub, request: engine_pb2.GenerateRequest
    ) -> StepResult:
        async for response in responses(stub, request):
            self.seen.take(response)
        return self.seen


async def run_step(
    stub: engine_pb2_grpc.EngineServiceAsyncStub, request: engine_pb2.GenerateRequest
) -> StepResult:
    """Reads the stream to its end."""
    return await Step(stub, request)


async def evict(
    engine: FakeSglang,
    stub: engine_pb2_grpc.EngineServiceAsyncStub,
    at: int,
    request: engine_pb2.GenerateRequest,
) -> StepResult:
    """Run a step that takes the slot of another one, once that one has sampled `at` tokens. No
    token is sampled from then on until the other has to leave. Returns what the new step said."""
    await until(lambda: engine.sampled >= at)
    engine.hang()
    step = Step(stub, request)
    await until(lambda: engine.aborts)
    engine.go_on()
    return await step


def responses(
    stub: engine_pb2_grpc.EngineServiceAsyncStub, request: engine_pb2.GenerateRequest
) -> grpc.aio.UnaryStreamCall[engine_pb2.GenerateRequest, engine_pb2.GenerateResponse]:
    """The stream itself."""
    return stub.Generate(request, timeout=STEP_TIMEOUT_S)


def packed(ids: Sequence[int]) -> TokenIds:
    """As they travel."""
    return TokenIds(int32_le=array("i", ids).tobytes())


def int32s(data: bytes) -> array[int]:
    """As they were."""
    ids = array("i")
    ids.frombytes(data)
    return ids
