"""Run one agent over prompts × samples, and submit each trajectory to the rollout service as it ends.

RolloutRun is behind Client.rollout. Invariants: every sample ends in exactly one TrajectoryResult; an agent that raises
fails its own trajectory only; when the run ends, however it ends, no trajectory of it is open and no task of it runs.
In messages tokens, loss mask and logprobs are equally long; one where they are not raises StreamBroken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from treadle.common.v1 import tokens_pb2
from treadle.connection import Mesh, finish, request_id
from treadle.errors import StreamBroken, TokensSpent, TreadleError
from treadle.rewards import PendingReward, score_of
from treadle.rollout.v1 import rollout_pb2
from treadle.trajectory import Trajectory
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
)


def finished_message(trajectory: Trajectory) -> rollout_pb2.FinishedTrajectory:
    """A closed trajectory for SubmitTrajectory. No reward counts as 0; a cancelled trajectory as failed."""
    closed_s = trajectory.closed_s if trajectory.closed_s is not None else trajectory.opened_s
    return rollout_pb2.FinishedTrajectory(
        trajectory_id=trajectory.trajectory_id,
        prompt_id=trajectory.prompt_id,
        sample=trajectory.sample,
        tokens=tokens_pb2.TokenIds(int32_le=pack_ids(trajectory.tokens)),
        loss_mask=bytes(trajectory.loss_mask),
        logprobs=tokens_pb2.Logprobs(float32_le=pack_logprobs(trajectory.logprobs)),
        version_spans=[
            tokens_pb2.VersionSpan(weight_version=s.weight_version, start_token=s.start_token, end_token=s.end_token)
            for s in trajectory.version_spans
        ],
        reward=trajectory.reward or 0.0,
        truncated=trajectory.outcome == "truncated",
        failed=trajectory.outcome in ("failed", "cancelled"),
        turns=len(trajectory.steps),
        elapsed=duration(closed_s - trajectory.opened_s),
    )


def never_opened_message(prompt_id: str, sample: int) -> rollout_pb2.FinishedTrajectory:
    """Stands for a sample that failed before it had a trajectory, so that its group does not wait for it."""
    trajectory_id = f"unopened-{request_id()}"
    return rollout_pb2.FinishedTrajectory(trajectory_id=trajectory_id, prompt_id=prompt_id, sample=sample, failed=True)


def batch_of(message: rollout_pb2.GetBatchResponse) -> Batch:
    """A batch as a trainer reads it."""
    groups = tuple(Group(g.prompt_id, tuple(_training(t) for t in g.trajectories)) for g in message.groups)
    return Batch(groups, message.exhausted)


def drop_reason_of(reason: rollout_pb2.DropReason.ValueType) -> str:
    """The reason in lower case, e.g. "group_settled"; empty where there is none."""
    if reason == rollout_pb2.DROP_REASON_UNSPECIFIED:
        return ""
    if reason not in rollout_pb2.DropReason.values():
        return str(reason)  # newer than this client
    return rollout_pb2.DropReason.Name(reason).removeprefix("DROP_REASON_").lower()


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
        open_trajectory: Callable[..., Awaitable[Trajectory]],
        agent: Agent,
        on_event: Callable[[RolloutEvent], None] | None,
        pin: Callable[[Prompt, int], str] | None,
    ) -> None:
        self._mesh, self._open, self._agent, self._on_event, self._pin = mesh, open_trajectory, agent, on_event, pin
        self._rollout_id = ""
        self._max_total_tokens = 0
        # Samples whose agent has not ended, by prompt and sample: a settled group cancels its own.
        self._unfinished: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._results: dict[tuple[str, int], TrajectoryResult] = {}

    async def run(
        self, prompts: Sequence[Prompt], spec: rollout_pb2.RolloutSpec, concurrency: int | None
    ) -> RolloutResult:
        """All samples of all prompts; results in that order. TreadleError where the rollout cannot be created."""
        mesh, started_s = self._mesh, self._mesh.clock()
        service = await mesh.rollout()
        request = rollout_pb2.CreateRolloutRequest(request_id=request_id(), spec=spec)
        self._rollout_id = (await mesh.call(service.CreateRollout, request, mesh.timeouts.control_s)).rollout.rollout_id
        self._max_total_tokens = spec.max_total_tokens
        order = [(prompt, sample) for prompt in prompts for sample in range(spec.samples_per_prompt)]
        slots = asyncio.Semaphore(concurrency or len(order))
        whole = False
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt, sample in order:
                    self._results[prompt.id, sample] = _never_opened(prompt.id, sample)
                    self._unfinished[prompt.id, sample] = tasks.create_task(self._sample(prompt, sample, slots))
            whole = True
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # callers catch the error itself, not a group
        finally:
            if not whole:
                await finish(self._cancel())
        results = tuple(self._results[prompt.id, sample] for prompt, sample in order)
        return RolloutResult(self._rollout_id, results, mesh.clock() - started_s)

    async def _sample(self, prompt: Prompt, sample: int, slots: asyncio.Semaphore) -> None:
        """Run one sample from its opening to its submission."""
        key = (prompt.id, sample)
        pending: PendingReward | None = None
        async with slots:
            try:
                trajectory = await self._open_one(prompt, sample)
            except TreadleError as error:
                self._results[key] = _never_opened(prompt.id, sample, "failed", f"open: {error}")
                message = never_opened_message(prompt.id, sample)
            else:
                self._results[key], pending = await self._play(trajectory, prompt)
                message = finished_message(trajectory)
            self._unfinished.pop(key, None)
        if pending is not None:  # waited for outside of `slots`, so that another sample runs
            message = await self._await_reward(trajectory, pending, key)
        await self._submit(message, key)

    async def _open_one(self, prompt: Prompt, sample: int) -> Trajectory:
        trajectory = await self._open(
            prompt_id=prompt.id,
            sample=sample,
            prompt=prompt.tokens,
            rollout_id=self._rollout_id,
            max_total_tokens=self._max_total_tokens,
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

    async def _await_reward(
        self, trajectory: Trajectory, pending: PendingReward, key: tuple[str, int]
    ) -> rollout_pb2.FinishedTrajectory:
        """Wait for the score. A trajectory that gets none has failed."""
        try:
            trajectory.reward = await score_of(pending)
        except TreadleError as error:
            result = self._results[key]
            self._results[key] = replace(result, outcome="failed", error=result.error or f"reward: {error}")
            message = finished_message(trajectory)
            message.failed = True
            return message
        self._results[key] = replace(self._results[key], reward=trajectory.reward)
        return finished_message(trajectory)

    async def _submit(self, message: rollout_pb2.FinishedTrajectory, key: tuple[str, int]) -> None:
        """Submit; when the answer settles the group, its unfinished siblings are cancelled."""
        mesh, result = self._mesh, self._results[key]
        request = rollout_pb2.SubmitTrajectoryRequest(
            request_id=request_id(), rollout_id=self._rollout_id, trajectory=message
        )
        try:
            service = await mesh.rollout()
            answer = await mesh.call(service.SubmitTrajectory, request, mesh.timeouts.control_s)
        except TreadleError as error:
            self._results[key] = replace(result, error=result.error or f"submit: {error}")
            return
        self._results[key] = replace(result, kept=answer.kept, drop_reason=drop_reason_of(answer.drop_reason))
        if answer.group_settled:
            self._settle(message.prompt_id)

    def _settle(self, prompt_id: str) -> None:
        siblings = [key for key in self._unfinished if key[0] == prompt_id]
        for key in siblings:
            self._unfinished.pop(key).cancel()
        if self._on_event is not None:
            self._on_event(RolloutEvent("settled", self._mesh.clock(), prompt_id))

    async def _end(self, trajectory: Trajectory, outcome: Outcome, reward: float | None = None) -> str:
        """Close; the error line where that fails. The scheduler closes it by its own timeout then."""
        try:
            await trajectory.close(reward, outcome)
        except TreadleError as error:
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
        if self._on_event is None:
            return
        self._on_event(
            RolloutEvent(
                kind,
                self._mesh.clock(),
                trajectory.prompt_id,
                trajectory.sample,
                trajectory.trajectory_id,
                trajectory.gen_tokens,
                len(trajectory.steps),
                trajectory.outcome,
            )
        )


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
        kept=False,
        drop_reason="",
        error=error,
        elapsed_s=closed_s - trajectory.opened_s,
    )


def _never_opened(prompt_id: str, sample: int, outcome: Outcome = "cancelled", error: str = "") -> TrajectoryResult:
    return TrajectoryResult("", prompt_id, sample, [], [], [], (), (), (), None, outcome, False, "", error, 0.0)
