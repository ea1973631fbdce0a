"""Run one agent over prompts × samples, and submit each trajectory to the rollout service as it ends.

RolloutRun is behind Client.rollout. Invariants: every sample ends in exactly one TrajectoryResult; an agent that raises
fails its own trajectory only; when the run ends, however it ends, no trajectory of it is open and no task of it runs; a
client whose job was taken over submits nothing more.
In messages tokens, loss mask and logprobs are equally long; one where they are not raises StreamBroken.
"""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Literal, TypeVar

import grpc

from treadle.common.v1 import tokens_pb2
from treadle.connection import Mesh, finish, request_id
from treadle.errors import StreamBroken, TokensSpent, TreadleError, error_from, refused
from treadle.jobs import JOB_TAKEN_OVER, Job
from treadle.rewards import PendingReward
from treadle.rollout.v1 import rollout_pb2
from treadle.trajectory import TRAJECTORY_CLOSED, Trajectory
from treadle.types import (
    Batch,
    Group,
    Outcome,
    Prompt,
    RolloutEvent,
    RolloutResult,
    TrainingTrajectory,
    TrajectoryResult,
    VersionSpan,
    duration,
    pack_ids,
    pack_logprobs,
    seconds,
    unpack_ids,
    unpack_logprobs,
    words_of,
)

ROLLOUT_NOT_FOUND, SAMPLE_TAKEN = "ROLLOUT_NOT_FOUND", "SAMPLE_TAKEN"  # ErrorInfo.reason
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


async def take_batch(mesh: Mesh, request: rollout_pb2.GetBatchRequest, timeout_s: float) -> Batch:
    """A batch as a trainer reads it; a stream that breaks is read again from its beginning.

    Once it is here, the service may remove its tokens. Where it does not hear of that, it removes them later.
    """
    service = await mesh.rollout()
    backoff = mesh.backoff(timeout_s)
    while True:
        try:
            batch = await _read_batch(service.StreamBatch(request, timeout=max(backoff.remaining_s, 0.001)))
            break
        except grpc.aio.AioRpcError as failure:
            error = error_from(failure)
        if not error.retryable:
            raise error
        await backoff.wait(error, error.retry_after_s)
    confirm = rollout_pb2.ConfirmBatchRequest(
        request_id=request_id(), rollout_id=request.rollout_id, batch_request_id=request.request_id
    )
    with suppress(TreadleError):
        await mesh.call(service.ConfirmBatch, confirm, mesh.timeouts.cleanup_s)
    return batch


async def _read_batch(parts: AsyncIterable[rollout_pb2.StreamBatchResponse]) -> Batch:
    groups: dict[str, list[TrainingTrajectory]] = {}
    data, last = bytearray(), rollout_pb2.StreamBatchResponse()
    async for last in parts:
        data += last.data
        if last.trajectory_end:
            message = rollout_pb2.FinishedTrajectory.FromString(bytes(data))
            groups.setdefault(last.prompt_id, []).append(_training(message))
            data.clear()
    if not last.batch_end:
        raise StreamBroken("the batch ended before its last message")
    return Batch(tuple(Group(name, tuple(members)) for name, members in groups.items()), last.exhausted)


def _training(message: rollout_pb2.FinishedTrajectory) -> TrainingTrajectory:
    tokens, logprobs = unpack_ids(message.tokens.int32_le), unpack_logprobs(message.logprobs.float32_le)
    if not len(tokens) == len(logprobs) == len(message.loss_mask):
        lengths = f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(message.loss_mask)} of loss mask"
        raise StreamBroken(f"trajectory {message.trajectory_id} is not whole: {lengths}")
    return TrainingTrajectory(
        trajectory_id=message.trajectory_id,
        prompt_id=message.prompt_id,
        sample=message.sample,
        tokens=tokens,
        loss_mask=list(message.loss_mask),
        logprobs=logprobs,
        version_spans=tuple(VersionSpan(s.weight_version, s.start_token, s.end_token) for s in message.version_spans),
        reward=message.reward,
        truncated=message.truncated,
        failed=message.failed,
        turns=message.turns,
        elapsed_s=seconds(message.elapsed),
    )


T = TypeVar("T")
Agent = Callable[[Trajectory, Prompt], Coroutine[Any, Any, float | PendingReward | None]]


class RolloutRun:
    """One call of Client.rollout. open_trajectory: Client.open. pin: see Client.rollout."""

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        open_trajectory: Callable[..., Awaitable[Trajectory]],
        agent: Agent,
        spec: rollout_pb2.RolloutSpec,
        on_event: Callable[[RolloutEvent], None] | None,
        pin: Callable[[Prompt, int], str] | None,
    ) -> None:
        self._mesh, self._job, self._open, self._agent, self._spec = mesh, job, open_trajectory, agent, spec
        self._on_event, self._pin = on_event or (lambda _: None), pin
        self._rollout_id = ""
        # Samples whose agent has not ended, by prompt and sample: a settled group cancels its own.
        self._unfinished: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._results: dict[tuple[str, int], TrajectoryResult] = {}

    async def run(self, prompts: Sequence[Prompt], concurrency: int | None) -> RolloutResult:
        """All samples of all prompts; results in that order. TreadleError where the rollout cannot be created."""
        mesh, started_s = self._mesh, self._mesh.clock()
        rollout = await self._find_left_over() or await self._create()
        self._rollout_id = rollout.rollout_id
        order = [(prompt, sample) for prompt in prompts for sample in range(self._spec.samples_per_prompt)]
        slots = asyncio.Semaphore(concurrency or len(order))
        submitted = _submitted_of(rollout)
        settled = {group.prompt_id for group in rollout.groups if group.settled}
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt, sample in order:
                    key = (prompt.id, sample)
                    if key in submitted:
                        self._results[key] = submitted[key]
                        continue
                    self._results[key] = TrajectoryResult("", prompt.id, sample, outcome="cancelled")
                    if prompt.id not in settled:
                        self._unfinished[key] = tasks.create_task(self._sample(prompt, sample, slots))
        except BaseException as failure:
            if self._job.resume:
                self._job.leave_rollout(self._rollout_id)
            else:
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
        request = rollout_pb2.CreateRolloutRequest(request_id=request_id(), spec=self._spec)
        service = await mesh.rollout()
        if self._job.resume:  # noted before it is there: a client that finds it noted only creates another
            request.rollout_id = f"r-{request.request_id}"
            await self._job.begin_rollout(request.rollout_id)
        try:
            return (await mesh.call(service.CreateRollout, request, mesh.timeouts.control_s)).rollout
        except BaseException:
            if self._job.resume:
                self._job.leave_rollout(request.rollout_id)
            raise

    async def _find_left_over(self) -> rollout_pb2.Rollout | None:
        """A rollout of the job with the same prompts and parameters that was begun and not ended."""
        mesh, job = self._mesh, self._job
        if not job.resume:
            return None
        await job.hold()
        wanted = rollout_pb2.RolloutSpec()
        wanted.CopyFrom(self._spec)
        wanted.keep_per_prompt = wanted.keep_per_prompt or wanted.samples_per_prompt  # as the service answers
        service = await mesh.rollout()
        for rollout_id in list(job.left_over):
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
        async with slots:
            try:
                trajectory = await self._open_one(prompt, sample)
            except TreadleError as error:
                result = TrajectoryResult("", prompt.id, sample, outcome="failed", error=f"open: {error}")
            else:
                result, pending = await self._play(trajectory, prompt)
            self._unfinished.pop(key, None)
        if pending is not None:  # waited for outside of `slots`, so that another sample runs
            result = await _await_score(result, pending)
        self._results[key] = await self._submit(result)

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

    async def _submit(self, result: TrajectoryResult) -> TrajectoryResult:
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
            answer = await mesh.call(service.SubmitTrajectory, request, mesh.timeouts.submit_s)
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
