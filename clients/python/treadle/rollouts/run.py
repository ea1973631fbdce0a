"""Run one agent over prompts × samples, and submit each trajectory to the rollout service as it
ends.

Client.rollout uses RolloutRun. Invariants: every sample ends in exactly one TrajectoryResult; an
agent that raises fails its own trajectory only; when the run ends, however it ends, no trajectory
of it is open and no task of it runs; a client whose job was taken over submits nothing more.
"""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal

import grpc

from treadle.connection import Mesh, TrajectoryTrace, finish, request_id
from treadle.errors import FieldViolation, TreadleError, refused
from treadle.jobs import JOB_TAKEN_OVER, Job
from treadle.rewards import PendingReward
from treadle.rollout.v1 import rollout_pb2
from treadle.rollouts.running_tokens import pushing
from treadle.rollouts.samples import (
    DROP_REASONS,
    await_score,
    ending_of,
    finished_message,
    is_unwanted,
    oldest_version_of,
    play_to_end,
    result_of,
    submitted_of,
)
from treadle.trajectory import TRAJECTORY_CLOSED, Trajectory
from treadle.types import (
    HardwareTags,
    Outcome,
    Prompt,
    RolloutEvent,
    RolloutResult,
    TrajectoryResult,
)
from treadle.weights import list_engines

# ErrorInfo.reason
ROLLOUT_EXISTS, ROLLOUT_NOT_FOUND, SAMPLE_TAKEN = (
    "ROLLOUT_EXISTS",
    "ROLLOUT_NOT_FOUND",
    "SAMPLE_TAKEN",
)

# Samples that run at a time for each slot of the engines, where groups keep a pace: so many that no
# slot is idle while the next group begins.
SAMPLES_A_SLOT = 1.3

Agent = Callable[[Trajectory, Prompt], Coroutine[Any, Any, float | PendingReward | None]]
Key = tuple[str, int]  # prompt and sample


class RolloutRun:
    """One call of Client.rollout. open_trajectory: Client.open. The other arguments: see
    Client.rollout."""

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        open_trajectory: Callable[..., Awaitable[Trajectory]],
        agent: Agent,
        spec: rollout_pb2.RolloutSpec,
        on_event: Callable[[RolloutEvent], None] | None,
        pin: Callable[[Prompt, int], str] | None,
        hardware_tags: HardwareTags,
        rollout_id: str,
        part: tuple[int, int],
        stream_tokens: int,
    ) -> None:
        self._mesh, self._job, self._open, self._agent, self._spec = (
            mesh,
            job,
            open_trajectory,
            agent,
            spec,
        )
        self._on_event, self._pin = on_event or (lambda _: None), pin
        self._stream_tokens = stream_tokens
        self._tags = hardware_tags if callable(hardware_tags) else (lambda *_: hardware_tags)
        self._rollout_id, self._shared, (self._part, self._parts) = (
            rollout_id,
            bool(rollout_id),
            part,
        )
        self._prompts: dict[str, Prompt] = {}
        self._places: dict[str, int] = {}  # index of a prompt among all
        self._cap_tokens = spec.max_total_tokens
        self._started: dict[str, int] = {}  # number of samples that a prompt may have
        self._begun: dict[str, int] = {}  # number of these that were considered
        self._settled: set[str] = set()  # prompts
        # Samples whose agent has not ended: a settled group cancels its own.
        self._unfinished: dict[Key, asyncio.Task[None]] = {}
        self._playing: dict[Key, Trajectory] = {}
        self._stale: set[Key] = set()  # cancelled to begin again
        self._submitted: dict[Key, TrajectoryResult] = {}  # by another client
        self._results: dict[Key, TrajectoryResult] = {}

    @property
    def _lasts(self) -> bool:
        """Return whether more samples may be needed until the rollout is over."""
        spec = self._spec
        return bool(spec.batch_groups or spec.max_open_groups or spec.replace_stale)

    @property
    def _is_asynchronous(self) -> bool:
        """Return whether the trainer does not wait for the last trajectory."""
        spec = self._spec
        return bool(spec.batch_groups or spec.max_open_groups) and spec.max_staleness > 0

    @property
    def _watches(self) -> bool:
        """Return whether others change which samples are needed: clients with other parts, groups,
        a trainer's versions."""
        return (
            self._parts > 1
            or self._lasts
            or bool(self._spec.keep_groups)
            or self._spec.max_staleness >= 0
        )

    async def run(self, prompts: Sequence[Prompt], concurrency: int) -> RolloutResult:
        """Run the samples of this part in the order of prompts, and return the results in that
        order. Raises TreadleError where the rollout cannot be created."""
        mesh, started_s = self._mesh, self._mesh.clock()
        rollout = await self._find_left_over() or await self._create(concurrency)
        self._rollout_id = rollout.rollout_id
        self._slots = asyncio.Semaphore(concurrency or sys.maxsize)
        self._submitted = submitted_of(rollout)
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._places = {prompt.id: place for place, prompt in enumerate(prompts)}
        self._started = dict.fromkeys(self._prompts, self._spec.samples_per_prompt)
        self._cap_tokens = rollout.length_cap_tokens or self._spec.max_total_tokens
        try:
            async with asyncio.TaskGroup() as tasks:
                self._hear(rollout, tasks)
                if self._watches:
                    await self._watch(tasks)
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
        for prompt_id in self._prompts:
            self._begin(prompt_id, None)  # of groups that were never admitted
        results = (
            self._results[key]
            for prompt in prompts
            for key in self._keys(prompt.id, self._begun[prompt.id])
        )
        return RolloutResult(self._rollout_id, tuple(results), mesh.clock() - started_s)

    def _keys(self, prompt_id: str, samples: int, begun: int = 0) -> list[Key]:
        """Return this part's samples of a prompt."""
        offset = self._places[prompt_id] * self._spec.samples_per_prompt
        return [
            (prompt_id, each)
            for each in range(begun, samples)
            if (offset + each) % self._parts == self._part
        ]

    def _hear(self, rollout: rollout_pb2.Rollout, tasks: asyncio.TaskGroup) -> None:
        """End, begin and repeat samples as the state of the rollout, or a change of it,
        requires."""
        for group in rollout.groups:
            if group.settled:
                self._settle(group.prompt_id)
            elif self._spec.replace_stale:
                self._settled.discard(group.prompt_id)  # it has opened again
        if rollout.state in (
            rollout_pb2.ROLLOUT_STATE_FINISHED,
            rollout_pb2.ROLLOUT_STATE_CANCELLED,
        ):
            for prompt_id in self._prompts:
                self._end_samples(prompt_id)
        self._started |= {
            group.prompt_id: group.started for group in rollout.groups if group.started
        }
        admitted = rollout.groups_admitted or len(self._prompts)  # 0: the service has no such bound
        for prompt_id in list(self._prompts)[:admitted]:
            self._begin(prompt_id, tasks)
        if rollout.HasField("newest_version"):
            self._repeat_stale(rollout.newest_version)

    def _begin(self, prompt_id: str, tasks: asyncio.TaskGroup | None) -> None:
        """Begin those samples of a prompt that are new and needed."""
        begun, samples = self._begun.get(prompt_id, 0), self._started[prompt_id]
        if samples <= begun:
            return
        self._begun[prompt_id] = samples
        for key in self._keys(prompt_id, samples, begun):
            if key in self._submitted:
                self._results[key] = self._submitted[key]
                continue
            self._results[key] = TrajectoryResult("", *key, outcome="cancelled")
            if tasks is not None and prompt_id not in self._settled:
                self._unfinished[key] = tasks.create_task(
                    self._sample_until_fresh(self._prompts[prompt_id], key[1])
                )

    def _repeat_stale(self, version: int) -> None:
        """Begin again the samples of which the first tokens are now too old for a trainer at
        `version`."""
        bound = self._spec.max_staleness
        for key, trajectory in self._playing.items() if bound >= 0 else ():
            oldest = oldest_version_of(trajectory.version_spans)
            if oldest is not None and version - oldest > bound and key in self._unfinished:
                self._stale.add(key)
                self._unfinished[key].cancel()

    async def _create(self, concurrency: int) -> rollout_pb2.Rollout:
        mesh = self._mesh
        request = rollout_pb2.CreateRolloutRequest(
            request_id=request_id(), rollout_id=self._rollout_id, spec=self._spec
        )
        if self._spec.batch_groups:
            request.spec.samples_in_flight = concurrency * self._parts or math.ceil(
                SAMPLES_A_SLOT * sum(each.slot_limit for each in await list_engines(mesh, None))
            )
        service = await mesh.rollout()
        if (
            self._job.resume
        ):  # noted before it exists: a client that finds only the note creates another rollout
            request.rollout_id = self._rollout_id or f"r-{request.request_id}"
            await self._job.begin_rollout(request.rollout_id)
        try:
            try:
                return (
                    await mesh.call(service.CreateRollout, request, mesh.timeouts.control_s)
                ).rollout
            except TreadleError as error:
                if error.reason != ROLLOUT_EXISTS or not self._shared:
                    raise
                return await self._join()
        except BaseException:
            if self._job.resume:
                self._job.leave_rollout(request.rollout_id)
            raise

    async def _join(self) -> rollout_pb2.Rollout:
        """Return the rollout that another process has created. Raises TreadleError INVALID_ARGUMENT
        where its spec is another one."""
        service, look = (
            await self._mesh.rollout(),
            rollout_pb2.GetRolloutRequest(rollout_id=self._rollout_id),
        )
        found = (
            await self._mesh.call(service.GetRollout, look, self._mesh.timeouts.control_s)
        ).rollout
        if not self._is_wanted(found.spec):
            violation = FieldViolation(
                "rollout_id", "has other prompts or parameters; give this one another id"
            )
            message = f"{violation.field}: {self._rollout_id} {violation.description}"
            raise TreadleError(
                grpc.StatusCode.INVALID_ARGUMENT, message, field_violations=(violation,)
            )
        if found.state == rollout_pb2.ROLLOUT_STATE_CANCELLED:
            raise refused(
                "ROLLOUT_CANCELLED", f"{self._rollout_id} was cancelled: give this one another id"
            )
        return found

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        """Follow changes until the rollout is over or, where no more samples can be needed, all of
        this part have ended."""
        watch = tasks.create_task(self._hear_changes(tasks))
        if self._lasts:
            await watch
            return
        while self._unfinished:
            await asyncio.wait(set(self._unfinished.values()))
        watch.cancel()

    async def _hear_changes(self, tasks: asyncio.TaskGroup) -> None:
        mesh, service = self._mesh, await self._mesh.rollout()
        request, backoff = (
            rollout_pb2.WatchRolloutRequest(rollout_id=self._rollout_id),
            mesh.backoff(math.inf),
        )
        async for message in mesh.watch(
            lambda: service.WatchRollout(request, timeout=mesh.timeouts.stream_s), backoff
        ):
            self._hear(message.rollout, tasks)

    def _is_wanted(self, spec: rollout_pb2.RolloutSpec) -> bool:
        """Return whether a spec, as the service answers it, is that of this rollout."""
        wanted = rollout_pb2.RolloutSpec()
        wanted.CopyFrom(self._spec)
        wanted.keep_per_prompt = wanted.keep_per_prompt or wanted.samples_per_prompt
        wanted.samples_in_flight = spec.samples_in_flight  # of the engines at that time
        return spec == wanted

    async def _find_left_over(self) -> rollout_pb2.Rollout | None:
        """Find a rollout of the job with the same prompts and parameters that was begun and not
        ended."""
        mesh, job = self._mesh, self._job
        if not job.resume:
            return None
        await job.hold()
        service = await mesh.rollout()
        for rollout_id in [
            each for each in job.left_over if not self._shared or each == self._rollout_id
        ]:
            request = rollout_pb2.GetRolloutRequest(rollout_id=rollout_id)
            try:
                found = (
                    await mesh.call(service.GetRollout, request, mesh.timeouts.control_s)
                ).rollout
            except TreadleError as error:
                if error.reason != ROLLOUT_NOT_FOUND:
                    raise
                found = None  # never created, or forgotten
            if rollout_id not in job.left_over:
                continue  # another call has taken it meanwhile
            if found is None or found.state == rollout_pb2.ROLLOUT_STATE_CANCELLED:
                job.left_over.remove(rollout_id)
            elif self._is_wanted(found.spec):
                await job.begin_rollout(rollout_id)
                return found
        return None

    async def _sample_until_fresh(self, prompt: Prompt, sample: int) -> None:
        """Run one sample. Where its first tokens grow too old while it runs, run it again, or, in a
        rollout that drops such groups, submit it as it is."""
        key = (prompt.id, sample)
        while True:
            try:
                return await self._sample(prompt, sample)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                if key not in self._stale or task.uncancel():
                    raise
                self._stale.discard(key)
                if self._spec.batch_groups and not self._spec.replace_stale:
                    self._unfinished.pop(key, None)
                    cut = replace(self._results[key], outcome="truncated")
                    answer = await self._submit(cut, None)
                    self._results[key] = replace(answer, outcome="cancelled")
                    return None

    async def _sample(self, prompt: Prompt, sample: int) -> None:
        """Run one sample from its opening to its submission."""
        key = (prompt.id, sample)
        pending: PendingReward | None = None
        trace: TrajectoryTrace | None = None
        async with self._slots:
            try:
                trajectory = await self._open_one(prompt, sample)
            except TreadleError as error:
                result = TrajectoryResult(
                    "", prompt.id, sample, outcome="failed", error=f"open: {error}"
                )
            else:
                trace = trajectory.trace
                result, pending = await self._play(trajectory, prompt)
            self._unfinished.pop(key, None)
        if pending is not None:  # wait outside of `slots`, so that another sample runs
            result = await await_score(result, pending)
        unwanted = result.outcome == "cancelled" and prompt.id in self._settled
        self._results[key] = result if unwanted else await self._submit(result, trace)

    async def _open_one(self, prompt: Prompt, sample: int) -> Trajectory:
        trajectory = await self._open(
            prompt_id=prompt.id,
            sample=sample,
            prompt=prompt.tokens,
            rollout_id=self._rollout_id,
            max_total_tokens=self._cap_tokens,
            hardware_tags=self._tags(prompt, sample),
            pinned_engine_id=self._pin(prompt, sample) if self._pin else "",
            asynchronous=self._is_asynchronous,
            group_keep=self._kept_first(prompt.id),
            on_change=self._report,
        )
        self._report(trajectory, "opened")
        return trajectory

    def _kept_first(self, prompt_id: str) -> int:
        """Return how many samples of a prompt are kept, where its group settles with the first of
        them; else 0."""
        selection, keep = self._spec.selection, self._spec.keep_per_prompt
        started, saturated = self._started[prompt_id], selection.saturated_samples
        if selection.rule == rollout_pb2.SELECTION_RULE_DUAL_END:
            return keep if keep < started and 0 < saturated <= started else 0
        return keep if keep < started else 0

    async def _play(
        self, trajectory: Trajectory, prompt: Prompt
    ) -> tuple[TrajectoryResult, PendingReward | None]:
        """Run the agent and close its trajectory, however the agent ends. Returns the reward to
        wait for, if any."""
        key = (trajectory.prompt_id, trajectory.sample)
        self._playing[key] = trajectory
        try:
            async with pushing(self._mesh, trajectory, self._stream_tokens):
                played = await play_to_end(self._agent(trajectory, prompt))
        except asyncio.CancelledError:
            error_line = await finish(self._end(trajectory, "cancelled"))
            self._results[key] = result_of(trajectory, error_line)
            raise
        finally:
            del self._playing[key]
        # From here on a settled group does not cancel it any more.
        self._unfinished.pop(key, None)
        reward, outcome, error_line = ending_of(trajectory, played)
        if not played.cancelled() and is_unwanted(played.exception()):
            self._settle(trajectory.prompt_id)
        pending, reward = (reward, None) if isinstance(reward, PendingReward) else (None, reward)
        if trajectory.outcome is not None and trajectory.reward is None:
            trajectory.reward = reward  # the agent closed it and then returned the reward
        close_error = await finish(self._end(trajectory, outcome, reward))
        return result_of(trajectory, error_line or close_error), pending

    async def _submit(
        self, result: TrajectoryResult, trace: TrajectoryTrace | None
    ) -> TrajectoryResult:
        """Submit a result; when the answer settles the group, cancel its unfinished siblings.

        While the service's store of tokens is full, it is sent again: the trainer frees room as it
        takes batches.
        """
        mesh = self._mesh
        if self._job.resume:
            await self._require_job()
        request = rollout_pb2.SubmitTrajectoryRequest(
            request_id=request_id(),
            rollout_id=self._rollout_id,
            trajectory=finished_message(result),
        )
        try:
            service = await mesh.rollout()
            answer = await mesh.call(
                service.SubmitTrajectory, request, mesh.timeouts.submit_s, trace
            )
        except TreadleError as error:
            if error.reason == SAMPLE_TAKEN and self._job.resume:
                # The client before this one had submitted it when it was replaced.
                look = rollout_pb2.GetRolloutRequest(rollout_id=self._rollout_id)
                found = await mesh.call(service.GetRollout, look, mesh.timeouts.control_s)
                return submitted_of(found.rollout)[result.prompt_id, result.sample]
            if self._lasts:  # its group would wait for it for ever
                raise
            return replace(result, error=result.error or f"submit: {error}")
        if answer.group_settled:
            self._settle(result.prompt_id)
        # a number: the reason is newer than this client
        reason = DROP_REASONS.get(answer.drop_reason, str(answer.drop_reason))
        return replace(result, kept=answer.kept, drop_reason=reason)

    async def _require_job(self) -> None:
        """Raise JOB_TAKEN_OVER where another client now runs the samples of this rollout: a sample
        that failed here, as its trajectory was closed for that, must not take the place of the
        other client's."""
        try:
            await self._job.renew()
        except TreadleError as error:
            if error.reason == JOB_TAKEN_OVER:
                raise

    def _settle(self, prompt_id: str) -> None:
        if prompt_id in self._settled:
            return
        self._end_samples(prompt_id)
        self._on_event(RolloutEvent("settled", self._mesh.clock(), prompt_id))

    def _end_samples(self, prompt_id: str) -> None:
        self._settled.add(prompt_id)
        for key in [key for key in self._unfinished if key[0] == prompt_id]:
            self._stale.discard(key)
            self._unfinished.pop(key).cancel()

    async def _end(
        self, trajectory: Trajectory, outcome: Outcome, reward: float | None = None
    ) -> str:
        """Close a trajectory and return the error line where that fails. The scheduler closes it
        once the lease has ended. A trajectory that it has closed already, as the lease had run out,
        has failed: its last step was aborted."""
        try:
            await trajectory.close(reward, outcome)
        except TreadleError as error:
            if is_unwanted(error):
                whole = not trajectory.steps or trajectory.steps[-1].finish_reason != "aborted"
                trajectory.reward, trajectory.outcome = (
                    (reward, outcome) if whole else (None, "cancelled")
                )
                self._settle(trajectory.prompt_id)
                return ""
            if error.reason == TRAJECTORY_CLOSED:
                trajectory.reward, trajectory.outcome = None, "failed"
            return f"close: {error}"
        finally:
            self._report(trajectory, "closed")
        return ""

    async def _cancel(self) -> None:
        mesh = self._mesh
        request = rollout_pb2.CancelRolloutRequest(
            request_id=request_id(), rollout_id=self._rollout_id
        )
        service = await mesh.rollout()
        try:
            await mesh.call(service.CancelRollout, request, mesh.timeouts.cleanup_s)
        except TreadleError as error:
            if not error.unanswered:
                raise

    def _report(
        self, trajectory: Trajectory, kind: Literal["opened", "step", "tool", "closed"]
    ) -> None:
        t = trajectory
        event = RolloutEvent(kind, self._mesh.clock(), t.prompt_id, t.sample, t.trajectory_id)
        self._on_event(
            replace(event, gen_tokens=t.gen_tokens, turns=len(t.steps), outcome=t.outcome)
        )
