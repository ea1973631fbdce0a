"""FakeEngine: the contract of EngineService as the client sees it, with tokens that depend on the prompt and the
index only.

Any engine continues a step exactly as the first one would have, so a test can tell a whole sequence from a mended one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from support.fake_servicer import FakeServicer, Refusal, refuse
from treadle.common.v1 import tokens_pb2
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.types import pack_ids, pack_logprobs, unpack_ids

CHUNK_TOKENS = 2
HOUR_S = 3600.0  # a lost engine may stay away for long; whoever goes elsewhere does not wait for it


def token_at(prompt: Sequence[int], index: int) -> int:
    """The only possible token there."""
    return (sum(prompt) * 31 + len(prompt) * 7 + index * 13) % 50_000


def logprob_at(index: int) -> float:
    """Exact in float32."""
    return -(index % 64) / 8


@dataclass
class Script:
    """What goes wrong, at which count of output tokens. None: nothing."""

    lose_at: int | None = None  # the stream ends UNAVAILABLE ENGINE_LOST
    die_at: int | None = None  # `die` is called: the server goes away under the stream
    hold_at: int | None = None  # waits there until aborted, cancelled or released
    preempt_at: int | None = None
    skip_at: int | None = None  # leaves one token out
    repeat_at: int | None = None  # sends one token twice
    version_from: dict[int, str] | None = None  # weight version from that token on
    times: int = 1  # how many streams it goes wrong in
    only_max_new_tokens: int | None = None  # streams that ask for another number are served in order

    def meant_for(self, request: engine_pb2.GenerateRequest) -> bool:
        """Whether it goes wrong in this stream."""
        return self.times > 0 and self.only_max_new_tokens in (None, request.sampling.max_new_tokens)


class FakeEngine(FakeServicer, engine_pb2_grpc.EngineServiceServicer):
    """script: for the streams to come. finished: told each ticket whose step ended in order."""

    def __init__(self, engine_id: str, finished: Callable[[str], None]) -> None:
        super().__init__()
        self.engine_id = engine_id
        self.script = Script()
        self.die: Callable[[], None] = lambda: None
        self.release = asyncio.Event()
        self.holding = asyncio.Event()  # a stream has come to hold_at
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self._finished = finished
        self._aborts: dict[str, asyncio.Event] = {}

    async def Generate(
        self, request: engine_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GenerateResponse]:
        self.log("Generate", request, context)
        refusal = self.next_refusal("Generate")
        if refusal is not None:
            await refuse(context, refusal)
        ticket_id = request.ticket.ticket_id
        if ticket_id in self._aborts:
            await refuse(context, Refusal(grpc.StatusCode.FAILED_PRECONDITION, "TICKET_USED"))
        script = Script()
        if self.script.meant_for(request):
            script = self.script
            script.times -= 1
        self._aborts[ticket_id] = asyncio.Event()
        self.running.add(ticket_id)
        try:
            async for event in self._events(request, context, script):
                yield event
        finally:
            self.running.discard(ticket_id)

    async def Abort(self, request: engine_pb2.AbortRequest, context: Any) -> engine_pb2.AbortResponse:
        self.log("Abort", request, context)
        self.aborted.append(request.ticket_id)
        if request.ticket_id in self._aborts:
            self._aborts[request.ticket_id].set()
        return engine_pb2.AbortResponse()

    async def _events(
        self, request: engine_pb2.GenerateRequest, context: Any, script: Script
    ) -> AsyncIterator[engine_pb2.GenerateResponse]:
        prompt, ticket_id = unpack_ids(request.prompt.int32_le), request.ticket.ticket_id
        first = count = len(request.resumed_output.int32_le) // 4
        version, spans = "0", list[tokens_pb2.VersionSpan]()
        reason = engine_pb2.FINISH_REASON_LENGTH
        yield engine_pb2.GenerateResponse(started=engine_pb2.StepStarted(attempt=0))
        while count < request.sampling.max_new_tokens:
            if count == script.lose_at:
                await refuse(context, Refusal(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST", retry_after_s=HOUR_S))
            if count == script.die_at:
                self.die()
                await asyncio.Event().wait()
            if count == script.hold_at:
                self.holding.set()
                await _first_of(self._aborts[ticket_id], self.release)
            if self._aborts[ticket_id].is_set():
                reason = engine_pb2.FINISH_REASON_ABORTED
                break
            if count == script.preempt_at:
                preempted = engine_pb2.StepPreempted(output_tokens=count, by_ticket_id="other")
                yield engine_pb2.GenerateResponse(preempted=preempted)
                yield engine_pb2.GenerateResponse(started=engine_pb2.StepStarted(attempt=1))
            version = (script.version_from or {}).get(count, version)
            end = min(count + CHUNK_TOKENS, request.sampling.max_new_tokens)
            offset = count + (count == script.skip_at) - (count == script.repeat_at)
            chunk = engine_pb2.TokenChunk(
                offset=offset,
                token_ids=tokens_pb2.TokenIds(int32_le=pack_ids([token_at(prompt, i) for i in range(count, end)])),
                logprobs=tokens_pb2.Logprobs(float32_le=pack_logprobs([logprob_at(i) for i in range(count, end)])),
                weight_version=version,
            )
            spans.append(tokens_pb2.VersionSpan(weight_version=version, start_token=count, end_token=end))
            yield engine_pb2.GenerateResponse(tokens=chunk)
            count = end
            await asyncio.sleep(0)
        self._finished(ticket_id)
        timing = engine_pb2.StepTiming(queue=Duration(), prefill=Duration(), decode=Duration())
        yield engine_pb2.GenerateResponse(
            finished=engine_pb2.StepFinished(
                reason=reason, output_tokens=count, version_spans=spans, timing=timing, cached_tokens=first
            )
        )


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
