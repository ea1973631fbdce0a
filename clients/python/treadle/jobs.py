"""Hold a client's job at the scheduler: the lease of all that the client has open (ADR 0034).

Job is owned by Client, and opened by the first call that needs it. A background task renews the
lease at a third of its length; it ends with the client. A client that dies renews no more, and the
scheduler closes its trajectories. Where the lease has ended although the client lives, as the
process was stopped or cut off, the next call opens the job again.
"""

from __future__ import annotations

import asyncio
import logging

from treadle.connection import CLIENT_CLOSED, Mesh, TrajectoryTrace, request_id
from treadle.errors import TreadleError
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.types import Policy, seconds, words_of

JOB_NOT_FOUND = "JOB_NOT_FOUND"  # ErrorInfo.reason: the lease has run out
JOB_TAKEN_OVER = "JOB_TAKEN_OVER"  # another client has resumed the job
RENEWALS_A_LEASE = 3  # so that two may be lost

_log = logging.getLogger("treadle")


class Job:
    """One client's job, named by `mesh.job`. left_over: rollouts of it that were begun and not
    ended, by clients before this one or by a call that failed; with `resume`, a later client finds
    them and those in progress. weight, policy: as in Client."""

    def __init__(self, mesh: Mesh, resume: bool, weight: float, policy: pb.Policy | None) -> None:
        self.resume, self._weight, self._policy = resume, weight, policy
        self.left_over: list[str] = []
        self._mesh = mesh
        self._job_id = ""  # empty: not held
        self._rollouts: list[str] = []  # in progress
        # OpenJob and RenewJob take it, so that the newest list of rollouts is stored last
        self._lock = asyncio.Lock()
        self._heartbeat: asyncio.Task[None] | None = None

    async def hold(self) -> str:
        """Return the id of the job; open the job if it is not held."""
        if not self._job_id:
            async with self._lock:
                if not self._job_id:
                    await self._open()
        return self._job_id

    async def open_trajectory(
        self, request: pb.OpenTrajectoryRequest, trace: TrajectoryTrace
    ) -> pb.Trajectory:
        """Open a trajectory that lives as long as the job. Errors: as Client.open, and
        JOB_TAKEN_OVER."""
        while True:
            request.job_id = await self.hold()
            try:
                mesh, timeout_s = self._mesh, self._mesh.timeouts.control_s
                return (
                    await mesh.call(mesh.scheduler.OpenTrajectory, request, timeout_s, trace)
                ).trajectory
            except TreadleError as error:
                if error.reason != JOB_NOT_FOUND:
                    raise
            if self._job_id == request.job_id:
                self._job_id = ""

    async def begin_rollout(self, rollout_id: str) -> None:
        """Note that a rollout, new or left over, is in progress; a client that resumes the job
        finds it from now on."""
        await self.hold()
        if rollout_id in self.left_over:
            self.left_over.remove(rollout_id)
        self._rollouts.append(rollout_id)
        await self.renew()

    async def end_rollout(self, rollout_id: str) -> None:
        """Note that a rollout is over and its caller has the result."""
        self._rollouts.remove(rollout_id)
        await self.renew()

    def leave_rollout(self, rollout_id: str) -> None:
        """Note that a call of Client.rollout failed; the next one with the same parameters
        continues it."""
        self._rollouts.remove(rollout_id)
        self.left_over.append(rollout_id)

    async def renew(self) -> None:
        """Renew the lease. Errors: TreadleError FAILED_PRECONDITION JOB_TAKEN_OVER."""
        async with self._lock:
            if not self._job_id:
                await self._open()
            request = pb.RenewJobRequest(job_id=self._job_id)
            if self.resume:
                request.rollouts.rollout_ids.extend([*self.left_over, *self._rollouts])
            try:
                await self._mesh.call(
                    self._mesh.scheduler.RenewJob, request, self._mesh.timeouts.control_s
                )
            except TreadleError as error:
                if error.reason != JOB_NOT_FOUND:
                    raise
                await self._open()

    async def close(self, tell: bool = True) -> None:
        """End the renewals of the job, and close it at the scheduler. A scheduler that cannot be
        reached closes it with its lease."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.wait({self._heartbeat})
        if self._job_id and tell:
            request = pb.CloseJobRequest(request_id=request_id(), job_id=self._job_id)
            try:
                await self._mesh.call(
                    self._mesh.scheduler.CloseJob, request, self._mesh.timeouts.cleanup_s
                )
            except TreadleError as error:
                if not error.unanswered:
                    raise

    async def _open(self) -> None:
        request = pb.OpenJobRequest(
            request_id=request_id(),
            job=self._mesh.job,
            resume=self.resume,
            weight=self._weight,
            policy=self._policy,
        )
        answer = await self._mesh.call(
            self._mesh.scheduler.OpenJob, request, self._mesh.timeouts.control_s
        )
        self._job_id = answer.job_id
        known = {*self.left_over, *self._rollouts}
        self.left_over += [
            rollout_id for rollout_id in answer.rollout_ids if rollout_id not in known
        ]
        if self._heartbeat is None:
            every_s = seconds(answer.lease_ttl) / RENEWALS_A_LEASE
            self._heartbeat = asyncio.get_running_loop().create_task(self._keep_renewing(every_s))

    async def _keep_renewing(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.renew()
            except TreadleError as error:
                if error.reason in (JOB_TAKEN_OVER, CLIENT_CLOSED):
                    return  # the client's next call is refused with this reason
                # The next one may succeed; without renewals, all that the client has open ends.
                _log.warning("the lease of job %s was not renewed: %s", self._job_id, error)


def policy_message(policy: Policy) -> pb.Policy:
    """Make the message of a policy. Raises ValueError for a name that the contract does not
    have."""
    kinds = {"ordering": pb.Ordering, "objective": pb.Objective, "placement": pb.PlacementRule}
    message = pb.Policy(migrate=policy.migrate, preempt=policy.preempt, reserve=policy.reserve)
    for field, kind in kinds.items():
        name = getattr(policy, field)
        known = {word: number for number, word in words_of(kind).items()}
        if name not in known:
            raise ValueError(f"policy.{field} must be one of {', '.join(known)}, is {name!r}")
        setattr(message, field, known[name])
    return message
