"""Run one agent over prompts × samples, and submit each trajectory to the rollout service as it ends.

RolloutRun is behind Client.rollout. Invariants: every sample ends in exactly one TrajectoryResult; an agent that raises
fails its own trajectory only; when the run ends, however it ends, no trajectory of it is open and no task of it runs; a
client whose job was taken over submits nothing more.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, Literal, TypeVar

import grpc

from treadle.common.v1 import tokens_pb2
from treadle.connection import Mesh, finish, request_id
from treadle.errors import FieldViolation, TokensSpent, TreadleError, error_from, refused
from treadle.jobs import JOB_TAKEN_OVER, Job
from treadle.rewards import PendingReward
from treadle.rollout.v1 import rollout_pb2
from treadle.tracing import TrajectoryTrace
from treadle.trajectory import TRAJECTORY_CLOSED, Trajectory
from treadle.types import (
    Outcome,
    Prompt,
    RolloutEvent,
    RolloutResult,
    TrajectoryResult,
    duration,
    pack_ids,
    pack_logprobs,
    words_of,
)

# ErrorInfo.reason
ROLLOUT_EXISTS, ROLLOUT_NOT_FOUND, SAMPLE_TAKEN = "ROLLOUT_EXISTS", "ROLLOUT_NOT_FOUND", "SAMPLE_TAKEN"
_DROP_REASONS = {0: "", **words_of(rollout_pb2.DropReason)}


def finished_message(result: TrajectoryResult) -> rollout_pb2.FinishedTrajectory:
    """A trajectory for SubmitTrajectory. No reward counts as 0; a cancelled trajectory as failed.

    A sample without a trajectory is submitted under an id of its own, so that its group does not wait for it.
    """
    return rollout_pb2.FinishedTrajectory(
        trajectory_id=result.trajectory_id or f"unopened-{request_id()}",
        prompt_id=result.prompt_id,
        sample=result.sample,
        tokens=tokens_pb2.TokenIds(int32_le=pack_ids(result.tokens)),
        loss_mask=bytes(result.loss_mask),
        logprobs=tokens_pb2.Logprobs(float32_le=pack_logprobs(result.logprobs)),
        version_spans=[tokens_pb2.VersionSpan(**asdict(span)) for span in result.version_spans],
        reward=result.reward or 0.0,
        truncated=result.outcome == "truncated",
        failed=result.outcome in ("failed", "cancelled"),
        turns=len(result.steps),
        elapsed=duration(result.elapsed_s),
    )


T = TypeVar("T")
Agent = Callable[[Trajectory, Prompt], Coroutine[Any, Any, float | PendingReward | None]]


class RolloutRun:
    """One call of Client.rollout. open_trajectory: Client.open. rollout_id, part, pin: see Client.rollout."""

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        open_trajectory: Callable[..., Awaitable[Trajectory]],
        agent: Agent,
        spec: rollout_pb2.RolloutSpec,
        on_event: Callable[[RolloutEvent], None] | None,
        pin: Callable[[Prompt, int], str] | None,
        rollout_id: str,
        part: tuple[int, int],
    ) -> None:
        self._mesh, self._job, self._open, self._agent, self._spec = mesh, job, open_trajectory, agent, spec
        self._on_event, self._pin = on_event or (lambda _: None), pin
        self._rollout_id, self._shared, (self._part, self._parts) = rollout_id, bool(rollout_id), part
        self._settled: set[str] = set()  # prompts
        # Samples whose agent has not ended, by prompt and sample: a settled group cancels its own.
        self._unfinished: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._results: dict[tuple[str, int], TrajectoryResult] = {}

    async def run(self, prompts: Sequence[Prompt], concurrency: int | None) -> RolloutResult:
        """The samples of this part, in the order of prompts; results in that order. TreadleError where the rollout
        cannot be created."""
        mesh, started_s = self._mesh, self._mesh.clock()
        rollout = await self._find_left_over() or await self._create()
        self._rollout_id = rollout.rollout_id
        order = [(prompt, sample) for prompt in prompts for sample in range(self._spec.samples_per_prompt)]
        order = order[self._part :: self._parts]
        slots = asyncio.Semaphore(concurrency or len(order))
        submitted = _submitted_of(rollout)
        self._settled = {group.prompt_id for group in rollout.groups if group.settled}
        try:
            async with asyncio.TaskGroup() as tasks, self._watching(tasks):
                for prompt, sample in order:
                    key = (prompt.id, sample)
                    if key in submitted:
                        self._results[key] = submitted[key]
                        continue
                    self._results[key] = TrajectoryResult("", prompt.id, sample, outcome="cancelled")
                    if prompt.id not in self._settled:
                        self._unfinished[key] = tasks.create_task(self._sample(prompt, sample, slots))
        except BaseException as failure:
            if self._job.resume:
                self._job.leave_rollout(self._rollout_id)
            elif not self._shared:
                await finish(self._cancel())
            if isinstance(failure, BaseExceptionGroup):
                raise failure.exceptions[0] from None  # callers catch the error itself, not a group
            raise
        if self._job.resume:
            await self._job.end_rollout(self._rollout_id)
        results = tuple(self._results[prompt.id, sample] for prompt, sample in order)
        return RolloutResult(self._rollout_id, results, mesh.clock() - started_s)

    async def _create(self) -> rollout_pb2.Rollout:
        mesh = self._mesh
        request = rollout_pb2.CreateRolloutRequest(
            request_id=request_id(), rollout_id=self._rollout_id, spec=self._spec
        )
        service = await mesh.rollout()
        if self._job.resume:  # noted before it is there: a client that finds it noted only creates another
            request.rollout_id = self._rollout_id or f"r-{request.request_id}"
            await self._job.begin_rollout(request.rollout_id)
        try:
            try:
                return (await mesh.call(service.CreateRollout, request, mesh.timeouts.control_s)).rollout
            except TreadleError as error:
                if error.reason != ROLLOUT_EXISTS or not self._shared:
                    raise
                return await self._join()
        except BaseException:
            if self._job.resume:
                self._job.leave_rollout(request.rollout_id)
            raise

    async def _join(self) -> rollout_pb2.Rollout:
        """The rollout that another process has created. TreadleError INVALID_ARGUMENT where it is another one."""
        service, look = await self._mesh.rollout(), rollout_pb2.GetRolloutRequest(rollout_id=self._rollout_id)
        found = (await self._mesh.call(service.GetRollout, look, self._mesh.timeouts.control_s)).rollout
        if found.spec != self._wanted():
            violation = FieldViolation("rollout_id", "has other prompts or parameters; give this one another id")
            message = f"{violation.field}: {self._rollout_id} {violation.description}"
            raise TreadleError(grpc.StatusCode.INVALID_ARGUMENT, message, field_violations=(violation,))
        if found.state == rollout_pb2.ROLLOUT_STATE_CANCELLED:
            raise refused("ROLLOUT_CANCELLED", f"{self._rollout_id} was cancelled: give this one another id")
        return found

    @asynccontextmanager
    async def _watching(self, tasks: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Where other processes run parts: note during the block which groups they settle. The block has ended once
        all samples that it has begun have."""
        if self._parts == 1:
            yield
            return
        watch = tasks.create_task(self._watch_groups())
        yield
        if self._unfinished:
            await asyncio.wait(set(self._unfinished.values()))
        watch.cancel()

    async def _watch_groups(self) -> None:
        mesh, service = self._mesh, await self._mesh.rollout()
        request, backoff = rollout_pb2.WatchRolloutRequest(rollout_id=self._rollout_id), mesh.backoff(math.inf)
        while True:
            try:
                async for message in service.WatchRollout(request, timeout=mesh.timeouts.stream_s):
                    backoff.restart()
                    for group in message.rollout.groups:
                        if group.settled:
                            self._settle(group.prompt_id)
                return
            except grpc.aio.AioRpcError as failure:
                error = error_from(failure)
                if not error.retryable and error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:  # it watches anew
                    raise error from None
                await backoff.wait(error, error.retry_after_s)

    def _wanted(self) -> rollout_pb2.RolloutSpec:
        """The spec as the service answers it."""
        wanted = rollout_pb2.RolloutSpec()
        wanted.CopyFrom(self._spec)
        wanted.keep_per_prompt = wanted.keep_per_prompt or wanted.samples_per_prompt
        return wanted

    async def _find_left_over(self) -> rollout_pb2.Rollout | None:
        """A rollout of the job with the same prompts and parameters that was begun and not ended."""
        mesh, job = self._mesh, self._job
        if not job.resume:
            return None
        await job.hold()
        wanted = self._wanted()
        service = await mesh.rollout()
        for rollout_id in [each for each in job.left_over if not self._shared or each == self._rollout_id]:
            request = rollout_pb2.GetRolloutRequest(rollout_id=rollout_id)
            try:
                found = (await mesh.call(service.GetRollout, request, mesh.timeouts.control_s)).rollout
            except TreadleError as error:
                if error.reason != ROLLOUT_NOT_FOUND:
                    raise
                found = None  # never created, or forgotten
            if rollout_id not in job.left_over:
                continue  # another call has taken it meanwhile
            if found is None or found.state == rollout_pb2.ROLLOUT_STATE_CANCELLED:
                job.left_over.remove(rollout_id)
            elif found.spec == wanted:
                await job.begin_rollout(rollout_id)
                return found
        return None

    async def _sample(self, prompt: Prompt, sample: int, slots: asyncio.Semaphore) -> None:
        """Run one sample from its opening to its submission."""
        key = (prompt.id, sample)
        pending: PendingReward | None = None
        trace: TrajectoryTrace | None = None
        async with slots:
            try:
                trajectory = await self._open_one(prompt, sample)
            except TreadleError as error:
                result = TrajectoryResult("", prompt.id, sample, outcome="failed", error=f"open: {error}")
            else:
                trace = trajectory.trace
                result, pending = await self._play(trajectory, prompt)
            self._unfinished.pop(key, None)
        if pending is not None:  # waited for outside of `slots`, so that another sample runs
            result = await _await_score(result, pending)
        self._results[key] = await self._submit(result, trace)

    async def _open_one(self, prompt: Prompt, sample: int) -> Trajectory:
        trajectory = await self._open(
            prompt_id=prompt.id,
            sample=sample,
            prompt=prompt.tokens,
            rollout_id=self._rollout_id,
            max_total_tokens=self._spec.max_total_tokens,
            pinned_engine_id=self._pin(prompt, sample) if self._pin else "",
            on_change=self._report,
        )
        self._report(trajectory, "opened")
        return trajectory

    async def _play(self, trajectory: Trajectory, prompt: Prompt) -> tuple[TrajectoryResult, PendingReward | None]:
        """Run the agent and close its trajectory, however the agent ends. Returns the reward to wait for, if any."""
        try:
            played = await _play_to_end(self._agent(trajectory, prompt))
        except asyncio.CancelledError:
            error_line = await finish(self._end(trajectory, "cancelled"))
            self._results[trajectory.prompt_id, trajectory.sample] = _result(trajectory, error_line)
            raise
        # From here on a settled group does not cancel it any more.
        self._unfinished.pop((trajectory.prompt_id, trajectory.sample), None)
        reward, outcome, error_line = _ending(trajectory, played)
        pending, reward = (reward, None) if isinstance(reward, PendingReward) else (None, reward)
        if trajectory.outcome is not None and trajectory.reward is None:
            trajectory.reward = reward  # the agent closed it and then returned the reward
        close_error = await finish(self._end(trajectory, outcome, reward))
        return _result(trajectory, error_line or close_error), pending

    async def _submit(self, result: TrajectoryResult, trace: TrajectoryTrace | None) -> TrajectoryResult:
        """Submit; when the answer settles the group, its unfinished siblings are cancelled.

        While the service's store of tokens is full, it is sent again: the trainer frees room as it takes batches.
        """
        mesh = self._mesh
        if self._job.resume:
            await self._require_job()
        request = rollout_pb2.SubmitTrajectoryRequest(
            request_id=request_id(), rollout_id=self._rollout_id, trajectory=finished_message(result)
        )
        try:
            service = await mesh.rollout()
            answer = await mesh.call(service.SubmitTrajectory, request, mesh.timeouts.submit_s, trace)
        except TreadleError as error:
            if error.reason == SAMPLE_TAKEN and self._job.resume:
                # The client before this one had sent it when it was replaced.
                look = rollout_pb2.GetRolloutRequest(rollout_id=self._rollout_id)
                found = await mesh.call(service.GetRollout, look, mesh.timeouts.control_s)
                return _submitted_of(found.rollout)[result.prompt_id, result.sample]
            return replace(result, error=result.error or f"submit: {error}")
        if answer.group_settled:
            self._settle(result.prompt_id)
        reason = _DROP_REASONS.get(answer.drop_reason, str(answer.drop_reason))  # a number: newer than this client
        return replace(result, kept=answer.kept, drop_reason=reason)

    async def _require_job(self) -> None:
        """Raise JOB_TAKEN_OVER where another client runs the samples of this rollout by now: one that failed here, as
        its trajectory was closed for that, must not take the place of the other client's."""
        try:
            await self._job.renew()
        except TreadleError as error:
            if error.reason == JOB_TAKEN_OVER:
                raise

    def _settle(self, prompt_id: str) -> None:
        if prompt_id in self._settled:
            return
        self._settled.add(prompt_id)
        for key in [key for key in self._unfinished if key[0] == prompt_id]:
            self._unfinished.pop(key).cancel()
        self._on_event(RolloutEvent("settled", self._mesh.clock(), prompt_id))

    async def _end(self, trajectory: Trajectory, outcome: Outcome, reward: float | None = None) -> str:
        """Close; the error line where that fails. The scheduler closes it once the lease has ended. One that it has
        closed already, as the lease had run out, has failed: its last step was aborted."""
        try:
            await trajectory.close(reward, outcome)
        except TreadleError as error:
            if error.reason == TRAJECTORY_CLOSED:
                trajectory.reward, trajectory.outcome = None, "failed"
            return f"close: {error}"
        finally:
            self._report(trajectory, "closed")
        return ""

    async def _cancel(self) -> None:
        mesh = self._mesh
        request = rollout_pb2.CancelRolloutRequest(request_id=request_id(), rollout_id=self._rollout_id)
        service = await mesh.rollout()
        try:
            await mesh.call(service.CancelRollout, request, mesh.timeouts.cleanup_s)
        except TreadleError as error:
            if not error.lost_connection:
                raise

    def _report(self, trajectory: Trajectory, kind: Literal["opened", "step", "tool", "closed"]) -> None:
        t = trajectory
        event = RolloutEvent(kind, self._mesh.clock(), t.prompt_id, t.sample, t.trajectory_id)
        self._on_event(replace(event, gen_tokens=t.gen_tokens, turns=len(t.steps), outcome=t.outcome))


async def _play_to_end(agent: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """The agent's finished task, whatever it raised. A cancellation of the caller ends the agent first."""
    task = asyncio.get_running_loop().create_task(agent)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await finish(asyncio.wait({task}))
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise
    return task


def _ending(trajectory: Trajectory, played: asyncio.Task[Any]) -> tuple[float | PendingReward | None, Outcome, str]:
    """Reward, outcome and error line of an agent that has ended."""
    if played.cancelled():
        return None, "cancelled", ""
    error = played.exception()
    if isinstance(error, TokensSpent):
        return None, "truncated", ""
    if error is not None:
        return None, "failed", " ".join(f"{type(error).__name__}: {error}".split())
    reward = played.result()
    if reward is not None and not isinstance(reward, (int, float, PendingReward)):
        return None, "failed", f"TypeError: the agent returned {type(reward).__name__}, not a reward"
    return reward, "truncated" if trajectory.tokens_left == 0 else "finished", ""


async def _await_score(result: TrajectoryResult, pending: PendingReward) -> TrajectoryResult:
    """The result with its score. A trajectory that gets none has failed."""
    try:
        scored = await pending.result()
        if scored.score is None:
            what = f"reward {scored.reward_id} is {scored.state}: {scored.error or 'no score'}"
            raise refused("NO_SCORE", what)
    except TreadleError as error:
        return replace(result, outcome="failed", error=result.error or f"reward: {error}")
    return replace(result, reward=scored.score)


def _submitted_of(rollout: rollout_pb2.Rollout) -> dict[tuple[str, int], TrajectoryResult]:
    """What is known of samples that another client has submitted, by prompt and sample."""
    return {
        (group.prompt_id, submitted.sample): TrajectoryResult(
            trajectory_id=submitted.trajectory_id,
            prompt_id=group.prompt_id,
            sample=submitted.sample,
            outcome="failed" if submitted.drop_reason == rollout_pb2.DROP_REASON_FAILED else "finished",
            kept=submitted.kept,
            drop_reason=_DROP_REASONS.get(submitted.drop_reason, str(submitted.drop_reason)),
            submitted_before=True,
        )
        for group in rollout.groups
        for submitted in group.samples
    }


def _result(trajectory: Trajectory, error: str) -> TrajectoryResult:
    """The result before the rollout service has answered."""
    closed_s = trajectory.closed_s if trajectory.closed_s is not None else trajectory.opened_s
    return TrajectoryResult(
        trajectory_id=trajectory.trajectory_id,
        prompt_id=trajectory.prompt_id,
        sample=trajectory.sample,
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        version_spans=tuple(trajectory.version_spans),
        steps=tuple(trajectory.steps),
        spans=tuple(trajectory.spans),
        reward=trajectory.reward,
        outcome=trajectory.outcome or "failed",
        error=error,
        elapsed_s=closed_s - trajectory.opened_s,
    )
