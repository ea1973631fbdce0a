"""Hold one open trajectory: its tokens with their loss mask and logprobs, its steps, tools and
environments, and its end.

The loss mask is built here: `loss_mask` is 1 exactly where the policy sampled. Invariants: tokens,
loss_mask and logprobs are equally long at every moment; at most one step runs, and any other
operation leaves it first; close happens once. Opened by Client.open; the client closes what its
user left open. A session is closed by its user, by leaving its `async with`, or by its trajectory's
close.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import grpc

from treadle.connection import Mesh, TrajectoryTrace, finish, request_id
from treadle.errors import TokensSpent, TreadleError, refused
from treadle.generation import StepPlan, StepRun
from treadle.rewards import PendingReward, request_reward
from treadle.scheduler.v1 import scheduler_pb2
from treadle.step import TimeAccount, shift_spans
from treadle.tools.v1 import tools_pb2
from treadle.types import (
    Chunk,
    Limits,
    Outcome,
    Sampling,
    Span,
    Step,
    ToolResult,
    ToolStatus,
    VersionSpan,
    checked_ids,
    duration,
    seconds,
    words_of,
)

T = TypeVar("T")
OnChange = Callable[["Trajectory", Literal["step", "tool"]], None]
Invoke = Callable[[tools_pb2.InvokeRequest, Mapping[str, Any]], Awaitable[ToolResult]]

TRAJECTORY_CLOSED = "TRAJECTORY_CLOSED"  # ErrorInfo.reason of a request about one that was closed
# Reasons with which the scheduler says that it has closed one, e.g. after a lease that had run out;
# it forgets those that were closed long ago, and all where NATS has lost what it stored.
GONE = (TRAJECTORY_CLOSED, "TRAJECTORY_NOT_FOUND")
_STATUS: dict[int, ToolStatus] = words_of(tools_pb2.ResultStatus)


class Session:
    """A running environment. first: its first observation. invoke: the trajectory's tool call."""

    def __init__(
        self, mesh: Mesh, session_id: str, first: ToolResult, invoke: Invoke, trace: TrajectoryTrace
    ) -> None:
        self.session_id, self.first = session_id, first
        self._mesh, self._invoke, self._trace = mesh, invoke, trace
        self._closed = False

    async def step(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Take one action and return its result. Raises TreadleError NOT_FOUND SESSION_NOT_FOUND
        once the session is closed or was idle for too long."""
        return await self._invoke(tools_pb2.InvokeRequest(session_id=self.session_id), arguments)

    async def close(self) -> None:
        """End the environment. Does nothing where it has ended."""
        if self._closed:
            return
        self._closed = True
        request = tools_pb2.CloseSessionRequest(request_id=request_id(), session_id=self.session_id)
        try:
            tools = await self._mesh.tools()
            await self._mesh.call(
                tools.CloseSession, request, self._mesh.timeouts.cleanup_s, self._trace
            )
        except TreadleError as error:
            if error.reason != "SESSION_NOT_FOUND":
                raise

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Trajectory:
    """An open trajectory.

    tokens: prompt, outputs and observations in order. loss_mask, logprobs: one a token; 0 and 0.0
    where the policy did not sample. version_spans: over indexes of `tokens`. steps: finished
    generations. spans: where the time went, in order of their ends. trace: the trace that all its
    calls belong to.
    """

    def __init__(
        self,
        mesh: Mesh,
        opened: scheduler_pb2.Trajectory,
        prompt: Sequence[int],
        max_total_tokens: int,
        on_change: OnChange | None,
        on_close: Callable[[Trajectory], None],
        trace: TrajectoryTrace,
    ) -> None:
        self.trajectory_id = opened.trajectory_id
        self.rollout_id = opened.rollout_id
        self.prompt_id = opened.prompt_id
        self.sample = opened.sample
        self.max_total_tokens = max_total_tokens
        self.tokens: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self._append(prompt, [0.0] * len(prompt), loss_mask=0)
        self.version_spans: list[VersionSpan] = []
        self.steps: list[Step] = []
        self.spans: list[Span] = []
        self.gen_tokens = 0
        self.reward: float | None = None
        self.outcome: Outcome | None = None  # None while open
        self.opened_s = mesh.clock()
        self.closed_s: float | None = None
        self._times = TimeAccount(self.opened_s, seconds(opened.ledger.wall))
        self._mesh, self.trace = mesh, trace
        trace.name(
            trajectory_id=self.trajectory_id, rollout_id=self.rollout_id, prompt_id=self.prompt_id
        )
        self._on_change, self._on_close = on_change or (lambda *_: None), on_close
        self.on_tokens: Callable[[int], None] | None = (
            None  # called with the number of tokens, those of a step included
        )
        self._run: StepRun | None = None
        self._calls = (
            0  # calls that the scheduler has counted as turns: one a step, or several of a long one
        )
        self._closing: scheduler_pb2.CloseTrajectoryRequest | None = None  # repeated as it is
        self._turn_ended_s = self.opened_s
        self._sessions: list[Session] = []

    @property
    def tokens_left(self) -> int | None:
        """Return the number of tokens that may still be generated; None where max_total_tokens sets
        no cap."""
        return max(self.max_total_tokens - self.gen_tokens, 0) if self.max_total_tokens else None

    @property
    def engine_id(self) -> str:
        """Return the id of the engine of the running step, or of the last one; empty while it has
        no ticket."""
        return self._run.engine_id if self._run is not None else ""

    def generate(self, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Generate the next turn from `tokens` and yield its chunks; afterwards the step is
        steps[-1] and its tokens are in `tokens`.

        Leaving early (aclose, break, cancellation, or any other operation of this trajectory)
        aborts the step on its engine and keeps the tokens yielded until then, as a step with
        finish_reason "aborted"; after a bare break it is in `steps` as soon as the trajectory is
        used again. A step that raises keeps nothing: generating again repeats the same turn.
        Errors: StreamBroken, TokensSpent, TreadleError (INVALID_ARGUMENT with field_violations;
        DEADLINE_EXCEEDED by timeouts.step_s).
        """
        begin = partial(self._begin, sampling)
        return StepRun(
            self._mesh, begin, self._note, self._commit, self._times, self.trace
        ).chunks()

    def tokens_from(
        self, start: int, most: int
    ) -> tuple[list[int], list[int], list[float], list[VersionSpan]]:
        """Return at most `most` tokens from place `start` on, those of a running step included:
        ids, loss mask, logprobs, and version spans over indexes of the trajectory's tokens."""
        tokens, loss_mask = self.tokens[start : start + most], self.loss_mask[start : start + most]
        logprobs = self.logprobs[start : start + most]
        spans, step = list(self.version_spans), self._run and self._run.uncommitted
        if step:
            left, at = most - len(tokens), max(start - len(self.tokens), 0)
            tokens += step.token_ids[at : at + left]
            logprobs += step.logprobs[at : at + left]
            loss_mask += [1] * (len(tokens) - len(loss_mask))
            spans += shift_spans(step.version_spans, len(self.tokens))
        end = start + len(tokens)
        cut = (
            VersionSpan(s.weight_version, max(s.start_token, start), min(s.end_token, end))
            for s in spans
        )
        return (
            tokens,
            loss_mask,
            logprobs,
            [span for span in cut if span.start_token < span.end_token],
        )

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: a tool's output, a chat template. Raises
        ValueError for what are no token ids, before anything changes."""
        token_ids = checked_ids("token_ids", token_ids)
        self._require_open()
        if self._run is not None and not self._run.leave():
            raise refused(
                "STEP_IN_FLIGHT",
                "another task is reading generate(): finish or close it before observe()",
            )
        self._append(token_ids, [0.0] * len(token_ids), loss_mask=0)

    async def tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a stateless tool in the mesh's sandbox.

        A tool that fails returns a result. Raises TreadleError TOOL_NOT_FOUND and the like.
        """
        return await self._invoke(tools_pb2.InvokeRequest(tool=name, job=self._mesh.job), arguments)

    async def open_session(
        self, name: str, arguments: Mapping[str, Any], limits: Limits | None = None
    ) -> Session:
        """Start a stateful environment; it ends with the trajectory at the latest.

        limits: of its start and of each of its steps; None: the tool's own. Errors: TreadleError
        NOT_FOUND TOOL_NOT_FOUND; INVALID_ARGUMENT with field_violations, also for limits above the
        tool's own.
        """
        request = tools_pb2.OpenSessionRequest(
            request_id=request_id(),
            trajectory_id=self.trajectory_id,
            tool=name,
            arguments_json=json.dumps(dict(arguments)),
            limits=_limits_message(limits) if limits is not None else None,
            job=self._mesh.job,
        )
        tools, timeout_s = await self._mesh.tools(), self._mesh.timeouts.tool_s
        opened = await self.time_tool(
            lambda: self._mesh.call(tools.OpenSession, request, timeout_s, self.trace)
        )
        session = Session(
            self._mesh,
            opened.session.session_id,
            _result_of(opened.first),
            self._invoke,
            self.trace,
        )
        self._sessions.append(session)
        return session

    async def time_tool(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await the call of a tool or environment, after leaving a running step, and record its
        time as tool time, also when it fails. For tools outside the mesh: `tool` and sessions do so
        by themselves."""
        await self._leave_step()
        start_s = self._mesh.clock()
        try:
            return await work()
        finally:
            end_s = self._mesh.clock()
            self._times.add_tool(end_s - start_s)
            self.spans.append(Span("tool", start_s, end_s, "", max(len(self.steps) - 1, 0)))
            self._on_change(self, "tool")

    async def score(self, reward: str, arguments: Mapping[str, Any]) -> PendingReward:
        """Request a reward for this trajectory; return once the request is accepted, without
        waiting for the score.

        Call it at the end, before or after `close`. reward, arguments, errors: see Client.score.
        """
        return await request_reward(
            self._mesh,
            self.trajectory_id,
            reward,
            arguments,
            self._mesh.job or self.rollout_id,
            self.trace,
        )

    async def close(self, reward: float | None = None, outcome: Outcome = "finished") -> None:
        """End the step, the sessions and the trajectory, here and at the scheduler. Does nothing
        once closed.

        Raises ValueError for a reward or an outcome that is none, before anything changes. After a
        TreadleError (the scheduler could not be reached) it may be called again and repeats the
        first request. Where the caller is cancelled meanwhile, the cancellation is raised once the
        trajectory is closed.
        """
        if self.outcome is None:
            self.reward, self.outcome = _checked_reward(reward), _checked_outcome(outcome)
        if self.closed_s is None:
            await finish(self._end())

    async def _end(self) -> None:
        if self._run is not None:
            await self._run.stop()
        try:
            for session in self._sessions:
                await session.close()
        except TreadleError as error:
            if not error.unanswered:  # a tools service that is gone holds no session
                raise
        finally:
            await self._close_at_scheduler()

    async def __aenter__(self) -> Trajectory:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self.close()
        else:
            await self.close(outcome="failed" if isinstance(error, Exception) else "cancelled")

    async def _close_at_scheduler(self) -> None:
        assert self.outcome is not None
        if self._closing is None:
            asks = self._run is not None and self._run.unanswered is not None
            self._closing = scheduler_pb2.CloseTrajectoryRequest(
                request_id=request_id(),
                trajectory_id=self.trajectory_id,
                outcome=scheduler_pb2.Outcome.Value(f"OUTCOME_{self.outcome.upper()}"),
                reward=self.reward,
                times=self._times.close(self._mesh.clock(), asks=asks),
            )
        timeouts = self._mesh.timeouts
        timeout_s = timeouts.cleanup_s if self.outcome == "cancelled" else timeouts.control_s
        try:
            await self._mesh.call(
                self._mesh.scheduler.CloseTrajectory, self._closing, timeout_s, self.trace
            )
        except TreadleError as error:
            if error.reason in GONE:
                self._mark_closed()
            elif error.code is grpc.StatusCode.INVALID_ARGUMENT:  # it is open, for other arguments
                self._closing = self.outcome = self.reward = None
            raise
        self._mark_closed()

    def _mark_closed(self) -> None:
        assert self.outcome is not None
        self.trace.end(self.outcome)
        self.closed_s = self._mesh.clock()
        self._on_close(self)

    async def _begin(self, sampling: Sampling, run: StepRun) -> StepPlan:
        await self._leave_step()
        left = self.tokens_left
        if left == 0:
            raise TokensSpent(
                f"trajectory {self.trajectory_id} has generated its {self.max_total_tokens} tokens"
            )
        if left is not None and sampling.max_new_tokens > left:
            sampling = dataclasses.replace(sampling, max_new_tokens=left)
        before, self._run = self._run, run
        if (
            before is not None and before.call >= self._calls
        ):  # no step took that call: the step before was begun and committed nothing
            run.call, run.unanswered = before.call, before.unanswered
            run.lost_ticket_id, run.refused = before.lost_ticket_id, before.refused
        else:
            run.call = self._calls
        self._note(0)
        tool_s = self._mesh.clock() - self._turn_ended_s if self.steps else 0.0
        return StepPlan(self.trajectory_id, len(self.steps), list(self.tokens), sampling, tool_s)

    async def _leave_step(self) -> None:
        self._require_open()
        if self._run is not None:
            await self._run.stop()

    def _note(self, step_tokens: int) -> None:
        if self.on_tokens is not None:
            self.on_tokens(len(self.tokens) + step_tokens)

    def _append(
        self, token_ids: Sequence[int], logprobs: Sequence[float], *, loss_mask: int
    ) -> None:
        """Append tokens. loss_mask: 1 for sampled tokens, which are trained on; 0 for the prompt
        and observations."""
        self.tokens += token_ids
        self.loss_mask += [loss_mask] * len(token_ids)
        self.logprobs += logprobs

    def _commit(self, step: Step) -> None:
        start = len(self.tokens)
        self._append(step.token_ids, step.logprobs, loss_mask=1)
        self.version_spans += shift_spans(step.version_spans, start)
        self.spans += step.spans
        self.steps.append(step)
        assert self._run is not None, "it commits"
        self._calls = self._run.next_call
        self.gen_tokens += len(step.token_ids)
        self._turn_ended_s = self._mesh.clock()
        self._on_change(self, "step")

    async def _invoke(
        self, call: tools_pb2.InvokeRequest, arguments: Mapping[str, Any]
    ) -> ToolResult:
        call.request_id, call.trajectory_id = request_id(), self.trajectory_id
        call.arguments_json = json.dumps(dict(arguments))
        tools, timeout_s = await self._mesh.tools(), self._mesh.timeouts.tool_s
        answer = await self.time_tool(
            lambda: self._mesh.call(tools.Invoke, call, timeout_s, self.trace)
        )
        return _result_of(answer.result)

    def _require_open(self) -> None:
        if self.outcome is not None:
            raise refused(
                TRAJECTORY_CLOSED, f"trajectory {self.trajectory_id} was closed as {self.outcome}"
            )


def _checked_reward(reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        number = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"reward must be a finite number or None, is {reward!r}; an outcome is given as "
            "close(outcome=...)"
        )
    return number


def _checked_outcome(outcome: Outcome) -> Outcome:
    if outcome not in get_args(Outcome):
        raise ValueError(f"outcome must be one of {', '.join(get_args(Outcome))}, is {outcome!r}")
    return outcome


async def undo_opening(admission: asyncio.Task[Trajectory], timeout_s: float) -> None:
    """Close the trajectory that `admission` still opens, if it does so in time."""
    await asyncio.wait({admission}, timeout=timeout_s)
    if not admission.done():
        admission.cancel()
        await asyncio.wait({admission})
    if not admission.cancelled() and admission.exception() is None:
        await admission.result().close(outcome="cancelled")


def _limits_message(limits: Limits) -> tools_pb2.Limits:
    return tools_pb2.Limits(
        cpu_cores=limits.cpu_cores,
        memory_bytes=limits.memory_bytes,
        wall_time=duration(limits.wall_s),
        output_bytes=limits.output_bytes,
    )


def _result_of(message: tools_pb2.ToolResult) -> ToolResult:
    """Return a ToolResult message as the dataclass.

    A status newer than this client reads as "crashed", the most careful word.
    """
    return ToolResult(
        status=_STATUS.get(message.status, "crashed"),
        output=message.output,
        error=message.error,
        reward=message.reward if message.HasField("reward") else None,
        done=message.done,
        data=json.loads(message.data_json) if message.data_json else None,
        queue_s=seconds(message.timing.queue),
        overhead_s=seconds(message.timing.overhead),
        execution_s=seconds(message.timing.execution),
        output_truncated=message.output_truncated,
    )
