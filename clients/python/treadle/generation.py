"""Generate one step, from its ticket to its last token, on as many engines as it takes.

StepRun.chunks() is the iterator behind Trajectory.generate. A long step is generated in several
calls, each with a ticket of its own, so that its trajectory is ranked again and may move in the
middle of it (ADR 0011). For the scheduler each call is a turn without a tool behind it; for the
caller there is one step.

Invariants: the tokens form one sequence without gap or repeat, whatever engines are lost on the
way; a step that is left early is aborted on its engine, so that it takes up no slot; a step that
raises commits nothing, and the trajectory stays as it was before it. A trajectory runs at most one
StepRun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc

from treadle.common.v1 import ticket_pb2, tokens_pb2
from treadle.connection import Backoff, Mesh, TrajectoryTrace, finish, is_cancelled, request_id
from treadle.engine.v1 import engine_pb2
from treadle.errors import StreamBroken, TreadleError, error_from, refused
from treadle.scheduler.v1 import scheduler_pb2
from treadle.step import StepAssembly, TimeAccount
from treadle.types import Chunk, FinishReason, Sampling, Step, duration, pack_ids, seconds

if TYPE_CHECKING:
    GenerateCall = grpc.aio.UnaryStreamCall[engine_pb2.GenerateRequest, engine_pb2.GenerateResponse]


# A prompt that brings down every engine it meets must not take the whole mesh with it: after this
# many engines were lost in a row without one new token, the step fails.
MAX_FRUITLESS_LOSSES = 5
# Reasons for which an engine refuses the ticket, not the request: it restarted under another id, or
# the wait was longer than the ticket's life. The next ticket is good, unless the engine's clock is
# not: one that refuses so many in a row counts as lost.
_STALE_TICKET = frozenset({"TICKET_EXPIRED", "TICKET_WRONG_ENGINE"})
_MOST_STALE_TICKETS = 2

CONNECT_S = (
    5.0  # how long one attempt to connect may take (grpc.min_reconnect_backoff_ms of a channel)
)
CONTEXT_TOO_LONG = (
    "CONTEXT_TOO_LONG"  # ErrorInfo.reason of a step that no engine has the context for
)


@dataclass(frozen=True)
class StepPlan:
    """Inputs of a step. turn: as the caller counts. tool_s: the time since the turn before."""

    trajectory_id: str
    turn: int
    prompt: list[int]
    sampling: Sampling
    tool_s: float

    def limit(self, called: int, call_tokens: int) -> int:
        """Return the most tokens of the call after `called` tokens of earlier calls.

        A step that stops at a string is one call: the string could lie across two of them.
        """
        left = self.sampling.max_new_tokens - called
        return min(left, call_tokens) if call_tokens and not self.sampling.stop else left


class StepRun:
    """A running step. `begin` is awaited when the caller requests the first token; `note` is called
    with the number of tokens after each chunk; `commit` takes the step. times, trace: of the
    trajectory."""

    def __init__(
        self,
        mesh: Mesh,
        begin: Callable[[StepRun], Awaitable[StepPlan]],
        note: Callable[[int], None],
        commit: Callable[[Step], None],
        times: TimeAccount,
        trace: TrajectoryTrace,
    ) -> None:
        self._mesh, self._begin, self._note, self._commit = mesh, begin, note, commit
        self._times, self._trace = times, trace
        self._assembly: StepAssembly | None = None
        self._ticket: ticket_pb2.Ticket | None = None
        self._call: GenerateCall | None = None  # set while the engine may be generating for it
        self._step: Step | None = None
        self._ticket_s = 0.0  # when the present ticket came
        self._accounted_s: float | None = None  # seconds of the present call, by its engine
        self._paused = False  # the caller has a chunk and no task reads the stream
        self._opening: asyncio.Task[GenerateCall] | None = None
        self._stopping = False
        self._committed = False
        self._ended = asyncio.Event()
        self._aborting = asyncio.Lock()
        # the present or last one, as the scheduler counts turns; -1 before the first
        self.call = -1
        self.lost_ticket_id = (
            ""  # of this call, whose stream never ended; the next ScheduleStep must name it
        )
        self.refused = False  # by the engine of that ticket
        # A ScheduleStep of this call that had no answer, as it was cancelled: a ticket may exist
        # that this client never received.
        self.unanswered: scheduler_pb2.ScheduleStepRequest | None = None

    @property
    def next_call(self) -> int:
        """Return the number of the call after this run's: the one that is still without a ticket,
        or the one after the last ticket's."""
        return (
            self.call + 1
            if self._ticket is not None and self._ticket.turn == self.call
            else self.call
        )

    @property
    def engine_id(self) -> str:
        """Return the id of the engine of the newest ticket; empty before the first."""
        return self._ticket.engine_id if self._ticket is not None else ""

    @property
    def _may_generate(self) -> bool:
        """Return whether the engine may be generating for the step."""
        return self._call is not None and self._step is None

    @property
    def uncommitted(self) -> StepAssembly | None:
        """Return the step as far as it has come, while it runs and is not in its trajectory."""
        return None if self._committed or self._ended.is_set() else self._assembly

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Yield tokens as they come. Raises StreamBroken, or TreadleError when the step cannot
        continue (Timeouts.step_s)."""
        try:
            plan = await self._begin(self)
            self._assembly = assembly = StepAssembly(plan.turn, self._mesh.clock())
            backoff = self._mesh.backoff(self._mesh.timeouts.step_s)
            fruitless = stale = 0
            error: TreadleError | None = None
            while not self._stopping:
                known, received = len(assembly.token_ids), False
                limit = plan.limit(assembly.called, self._mesh.call_tokens)
                try:
                    call = await self._unless_stopped(
                        self._open(plan, limit, assembly, backoff, error)
                    )
                except TreadleError as refusal:
                    if refusal.reason != CONTEXT_TOO_LONG or assembly.calls == 0:
                        raise
                    # In one call the engine would have ended the step where its context is full.
                    self._commit_once(assembly.end("length", self._mesh.clock()))
                    return
                if call is None:
                    break
                error = None
                opened_s, events = self._mesh.clock(), aiter(call)
                try:
                    while (event := await self._next_event(events, assembly)) is not None:
                        received = True
                        backoff = self._mesh.backoff(self._mesh.timeouts.step_s)
                        chunk = self._take(event, assembly)
                        if chunk is None:
                            continue
                        self._paused = True
                        yield chunk
                        self._paused = False
                        if self._ended.is_set():  # left meanwhile
                            await finish(self._abort())
                            return
                except grpc.aio.AioRpcError as failure:
                    error = error_from(failure)
                except asyncio.CancelledError:
                    if not self._is_cut_off():
                        raise
                    self._end_stream(assembly)
                    break
                except TreadleError as silence:
                    if not silence.retryable:
                        raise
                    error, received = silence, True  # it was there before
                    backoff = self._mesh.backoff(self._mesh.timeouts.step_s)
                if not received:  # once the connection was open, the step waited in the queue
                    backoff.exclude(max(0.0, self._mesh.clock() - opened_s - CONNECT_S))
                self._call = None
                self._end_stream(assembly)
                if (step := self._step) is not None:
                    reason: FinishReason | None = step.finish_reason
                elif error is None:
                    raise StreamBroken(f"the stream of turn {plan.turn} ended without StepFinished")
                else:
                    assembly.enter("queue", self._mesh.clock())
                    fruitless = fruitless + received if len(assembly.token_ids) == known else 0
                    stale = stale + 1 if error.reason in _STALE_TICKET else 0
                    full = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED  # its queue is
                    self.refused = full or (error.refused and stale < _MOST_STALE_TICKETS)
                    if fruitless >= MAX_FRUITLESS_LOSSES:
                        raise refused(
                            "ENGINES_LOST",
                            f"turn {plan.turn} was lost {fruitless} times in a row without a new "
                            f"token, so its request may be the cause; the last time: {error}",
                        )
                    if not (error.retryable or stale):
                        raise error
                    reason = _reason_if_complete(
                        assembly.token_ids[assembly.called :], limit, plan.sampling
                    )
                if reason is None:
                    continue
                count = len(assembly.token_ids)
                # not at the engine's context
                cut = reason == "length" and count == assembly.called + limit
                if not cut or count >= plan.sampling.max_new_tokens:
                    self._commit_once(step or assembly.end(reason, self._mesh.clock()))
                    return
                assembly.end_call(self._mesh.clock())
                self.call += 1
                self._step, self.lost_ticket_id, error, fruitless = None, "", None, 0
            self._commit_partial()
        except (GeneratorExit, asyncio.CancelledError):
            self._end_stream(self._assembly)
            self._commit_partial()
            await finish(self._abort())
            raise
        except TreadleError:
            self._end_stream(self._assembly)
            await finish(self._abort())
            raise
        finally:
            self._opening = None  # its result is a call, which keeps its connection open
            self._ended.set()

    def leave(self) -> bool:
        """Commit what the caller has seen, while no task reads on; stop() or the iterator's end
        aborts the rest.

        Returns False where another task is reading the stream at this moment.
        """
        if self._ended.is_set() or self._assembly is None:
            return True
        if not self._paused:
            return False
        self._ended.set()
        self._end_stream(self._assembly)
        self._commit_partial()
        return True

    async def stop(self) -> None:
        """Abort the step on its engine and commit the tokens that the caller has seen. Does nothing
        once over."""
        if self.leave():
            if self._may_generate:
                await finish(self._abort())
            return
        self._stopping = True  # another task is reading the stream
        if self._opening is not None:
            self._opening.cancel()
        # its stream ends in order, with the tokens sampled until then
        await self._abort(keep_stream=True)
        try:
            async with asyncio.timeout(self._mesh.timeouts.cleanup_s):
                await self._ended.wait()
        except TimeoutError:
            if self._call is not None:
                self._call.cancel()
            await self._ended.wait()

    def _is_cut_off(self) -> bool:
        """Return whether a CancelledError of the reading task comes from `stop`."""
        return self._stopping and not is_cancelled()

    def _end_stream(self, assembly: StepAssembly | None) -> None:
        if assembly is not None:
            now = self._mesh.clock()
            self._times.end_stream(now, self._accounted_s, assembly.seen_since(self._ticket_s, now))

    def _commit_partial(self) -> None:
        """Commit the tokens that have come. Without any token there was no step: its turn is still
        to come."""
        if self._assembly is not None and self._assembly.token_ids:
            self._commit_once(self._assembly.end("aborted", self._mesh.clock()))

    def _commit_once(self, step: Step) -> None:
        if not self._committed:
            self._committed = True
            self._commit(step)

    async def _unless_stopped(
        self, opening: Coroutine[Any, Any, GenerateCall]
    ) -> GenerateCall | None:
        """Return the opened stream; None where stop() came first."""
        self._opening = asyncio.get_running_loop().create_task(opening)
        try:
            return await self._opening
        except asyncio.CancelledError:
            if self._is_cut_off():
                return None
            raise

    async def _open(
        self,
        plan: StepPlan,
        limit: int,
        assembly: StepAssembly,
        backoff: Backoff,
        lost: TreadleError | None,
    ) -> GenerateCall:
        """Get a ticket and open the stream of one call with it; wait first where a stream was
        lost."""
        if lost is not None:
            # A lost engine's RetryInfo is about that engine, and the next ticket is for another;
            # a full queue's is for this step.
            full = lost.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            await backoff.wait(lost, lost.retry_after_s if full else None)
            if full:
                backoff.exclude(lost.retry_after_s or 0.0)
        mesh, called = self._mesh, assembly.called
        prompt, output = plan.prompt + assembly.token_ids[:called], assembly.token_ids[called:]
        asked_s = mesh.clock()
        self._times.ask(
            asked_s,
            replaces=bool(self.lost_ticket_id),
            goes_on=called > 0 or self.unanswered is not None,
        )
        waited_s = 0.0
        if self.unanswered is not None:  # the scheduler answers a repeat from its record
            unused = await self._schedule(self.unanswered)
            self.lost_ticket_id, waited_s = unused.ticket_id, seconds(unused.waited)
        request = scheduler_pb2.ScheduleStepRequest(
            request_id=request_id(),
            trajectory_id=plan.trajectory_id,
            turn=self.call,
            context_tokens=len(prompt),
            max_new_tokens=limit,
            replaces_ticket_id=self.lost_ticket_id,
            resumed_tokens=len(output),
            tool_time=duration(0.0 if called else plan.tool_s),
            engine_refused=self.refused,
            times=self._times.report(),
        )
        self._ticket = ticket = await self._schedule(request)
        backoff.exclude(mesh.clock() - asked_s)
        self._ticket_s, self._accounted_s = mesh.clock(), None
        self._times.take_ticket(self._ticket_s, waited_s + seconds(ticket.waited))
        self.lost_ticket_id, self.refused = ticket.ticket_id, False
        assembly.set_engine(ticket.engine_id)
        generate = engine_pb2.GenerateRequest(
            ticket=ticket,
            prompt=tokens_pb2.TokenIds(int32_le=pack_ids(prompt)),
            sampling=tokens_pb2.SamplingParams(
                **vars(replace(plan.sampling, max_new_tokens=limit))
            ),
            token_interval=duration(mesh.token_interval_s),
        )
        if output:
            generate.resumed_output.int32_le = pack_ids(output)
        engine = mesh.engine(ticket.engine_address)
        with mesh.ending_calls():
            self._call = call = self._trace.bind(engine.Generate)(
                generate, timeout=mesh.timeouts.stream_s
            )
        return call

    async def _next_event(
        self, events: AsyncIterator[engine_pb2.GenerateResponse], assembly: StepAssembly
    ) -> engine_pb2.GenerateResponse | None:
        """Return the next event of the stream, None at its end. Raises TreadleError where the step
        runs and nothing comes, or where it waits and the sidecar does not answer; the stream is
        cancelled then."""
        assert self._ticket is not None, "it has a stream"
        engine_id, step_s = self._ticket.engine_id, self._mesh.timeouts.step_s
        with self._mesh.ending_calls():
            if assembly.waits:
                return await self._next_of_queue(events, self._ticket)
            try:
                async with asyncio.timeout(step_s):
                    return await anext(events, None)
            except TimeoutError:
                message = (
                    f"turn {assembly.turn} has brought no token on {engine_id} for "
                    f"{step_s:g} s (Timeouts.step_s)"
                )
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                raise TreadleError(code, message, "STEP_STALLED", "client.treadle") from None

    async def _next_of_queue(
        self, events: AsyncIterator[engine_pb2.GenerateResponse], ticket: ticket_pb2.Ticket
    ) -> engine_pb2.GenerateResponse | None:
        """Return the next event of a step that waits in a queue, however long it waits there."""
        reading = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait({reading}, timeout=self._mesh.timeouts.step_s))[0]:
                await self._require_answer(ticket)
            return await reading
        finally:
            reading.cancel()

    async def _require_answer(self, ticket: ticket_pb2.Ticket) -> None:
        """Raise TreadleError, which may be tried again, unless the sidecar answers."""
        engine = self._mesh.engine(ticket.engine_address)
        try:
            await engine.GetLoad(engine_pb2.GetLoadRequest(), timeout=self._mesh.timeouts.cleanup_s)
        except grpc.aio.AioRpcError as failure:
            error = error_from(failure)
            if error.lost_connection or error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                message = (
                    f"the sidecar of {ticket.engine_id} does not answer while a step waits "
                    "in its queue"
                )
                code = grpc.StatusCode.UNAVAILABLE
                raise TreadleError(code, message, "SIDECAR_SILENT", "client.treadle") from failure

    async def _schedule(self, request: scheduler_pb2.ScheduleStepRequest) -> ticket_pb2.Ticket:
        self.unanswered = request
        try:
            timeout_s = self._mesh.timeouts.schedule_s
            answer = await self._mesh.call(
                self._mesh.scheduler.ScheduleStep, request, timeout_s, self._trace
            )
        except TreadleError as error:
            if error.refused:  # that is an answer
                self.unanswered = None
            raise
        self.unanswered = None
        return answer.ticket

    def _take(self, event: engine_pb2.GenerateResponse, assembly: StepAssembly) -> Chunk | None:
        """Add one event. Return the chunk for the caller, where the event brought tokens."""
        now, kind = self._mesh.clock(), event.WhichOneof("event")
        if self._step is not None:
            raise StreamBroken(f"{kind} after StepFinished in turn {assembly.turn}")
        if kind == "tokens":
            chunk = assembly.add_chunk(event.tokens, now)
            self._note(len(assembly.token_ids))
            return chunk if chunk.token_ids else None
        if kind == "started":
            assembly.enter("prefill", now)
        elif kind == "preempted":
            assembly.preempt(event.preempted, now)
        elif kind == "finished":
            self._step = assembly.finish(event.finished, now)
            timing = event.finished.timing
            if event.finished.HasField("timing"):
                self._accounted_s = (
                    seconds(timing.queue) + seconds(timing.prefill) + seconds(timing.decode)
                )
            self.lost_ticket_id = ""
        return None

    async def _abort(self, *, keep_stream: bool = False) -> None:
        """Abort the step at its engine. An engine that is gone, or does not know the step, has
        stopped already."""
        async with (
            self._aborting
        ):  # the iterator's end and the trajectory's next operation may both come here
            call, ticket = self._call, self._ticket
            if call is None or ticket is None or not self._may_generate:
                return
            request = engine_pb2.AbortRequest(request_id=request_id(), ticket_id=ticket.ticket_id)
            try:
                with self._mesh.ending_calls():
                    abort = self._trace.bind(self._mesh.engine(ticket.engine_address).Abort)
                    await abort(request, timeout=self._mesh.timeouts.cleanup_s)
            except (grpc.aio.AioRpcError, TreadleError):
                keep_stream = False  # cancelling the stream below is the second way to abort
            if not keep_stream:
                self._call = None
                call.cancel()


def _reason_if_complete(output: list[int], limit: int, sampling: Sampling) -> FinishReason | None:
    """Return why a call is complete whose last event was lost with the engine; None where more
    tokens are due."""
    if output and output[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(output) >= limit else None
