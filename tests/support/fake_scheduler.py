"""FakeScheduler: SchedulerService in memory, as the client, the migrator and a sidecar see it.
Engines take turns."""

import time
from typing import Any

import grpc
from support.fake_servicer import FakeServicer, Gate, Refusal, answer
from treadle.common.v1 import ticket_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle.types import duration
from treadle_runtime.fields import timestamp

TICKET_LIFE_S = 600.0
LEASE_TTL_S = 0.6
JOB_LEASE_S = 3600.0  # few tests of the fake renew
_FAILED = grpc.StatusCode.FAILED_PRECONDITION


class FakeScheduler(FakeServicer, scheduler_pb2_grpc.SchedulerServiceServicer):
    """engines: id → address; the fake mesh fills it. owners: trajectory → (engine, revision), for
    the migrator.

    Requires the order of turns that the contract asks for; owners change by compare-and-swap only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engines: dict[str, str] = {}
        self.directory = pb.GetDirectoryResponse()
        self.trajectories: dict[str, pb.Trajectory] = {}
        self.outcomes: dict[str, pb.Outcome.ValueType] = {}
        self.tickets: dict[str, str] = {}  # trajectory → the ticket that is out
        # trajectory → its newest ticket, and that one's turn
        self._last: dict[str, tuple[str, int]] = {}
        self._issued = 0
        self.address = ""
        self.owners: dict[str, tuple[str, int]] = {}
        self.gate = Gate()
        self.gate_after = Gate()  # between a switch and its answer
        self.leases: set[str] = set()
        self.clock_ahead_s = 0.0  # of this machine's clock
        self.room: int | None = None  # trajectories that may have begun and be open

    @property
    def open_trajectories(self) -> set[str]:
        """Opened and not closed."""
        return set(self.trajectories) - set(self.outcomes)

    def finished(self, ticket_id: str) -> None:
        """What the fact step_finished tells a real scheduler."""
        for trajectory_id, out in list(self.tickets.items()):
            if out == ticket_id:
                del self.tickets[trajectory_id]
                self.trajectories[trajectory_id].next_turn += 1

    @answer
    def GetDirectory(self, _: pb.GetDirectoryRequest) -> pb.GetDirectoryResponse:
        return self.directory

    async def SwitchEngine(self, request: pb.SwitchEngineRequest, context: Any) -> Any:
        await self.gate.pass_through()
        answer = await self.once("SwitchEngine", request, context, self._switch)
        await self.gate_after.pass_through()
        return answer

    @answer
    def GetTrajectory(self, request: pb.GetTrajectoryRequest) -> pb.GetTrajectoryResponse | Refusal:
        if request.trajectory_id not in self.owners:
            return Refusal(grpc.StatusCode.NOT_FOUND, "TRAJECTORY_NOT_FOUND")
        engine_id, revision = self.owners[request.trajectory_id]
        trajectory = pb.Trajectory(
            trajectory_id=request.trajectory_id, engine_id=engine_id, revision=revision
        )
        return pb.GetTrajectoryResponse(trajectory=trajectory)

    @answer
    def RenewEngineLease(
        self, request: pb.RenewEngineLeaseRequest
    ) -> pb.RenewEngineLeaseResponse | Refusal:
        if request.lease_id not in self.leases:
            return Refusal(grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND")
        return pb.RenewEngineLeaseResponse(now=timestamp(time.time() + self.clock_ahead_s))

    @answer
    def DeregisterEngine(self, request: pb.DeregisterEngineRequest) -> pb.DeregisterEngineResponse:
        self.leases.discard(request.lease_id)
        return pb.DeregisterEngineResponse()

    @answer
    def RegisterEngine(self, request: pb.RegisterEngineRequest) -> pb.RegisterEngineResponse:
        lease_id = f"lease-{len(self.requests('RegisterEngine'))}"
        self.leases.add(lease_id)
        return pb.RegisterEngineResponse(lease_id=lease_id, lease_ttl=duration(LEASE_TTL_S))

    @answer
    def DrainEngine(self, _: pb.DrainEngineRequest) -> pb.DrainEngineResponse:
        return pb.DrainEngineResponse()

    @answer
    def OpenJob(self, request: pb.OpenJobRequest) -> pb.OpenJobResponse:
        return pb.OpenJobResponse(job_id=f"j-{request.request_id}", lease_ttl=duration(JOB_LEASE_S))

    @answer
    def RenewJob(self, _: pb.RenewJobRequest) -> pb.RenewJobResponse:
        return pb.RenewJobResponse()

    @answer
    def CloseJob(self, _: pb.CloseJobRequest) -> pb.CloseJobResponse:
        return pb.CloseJobResponse()

    @answer
    def OpenTrajectory(
        self, request: pb.OpenTrajectoryRequest
    ) -> pb.OpenTrajectoryResponse | Refusal:
        if request.prompt_tokens < 1:
            return Refusal(
                grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", fields=("prompt_tokens",)
            )
        trajectory = pb.Trajectory(
            trajectory_id=request.trajectory_id or f"t-{len(self.trajectories)}",
            rollout_id=request.rollout_id,
            prompt_id=request.prompt_id,
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
        )
        self.trajectories[trajectory.trajectory_id] = trajectory
        return pb.OpenTrajectoryResponse(trajectory=trajectory)

    @answer
    def ScheduleStep(self, request: pb.ScheduleStepRequest) -> pb.ScheduleStepResponse | Refusal:
        trajectory = self.trajectories.get(request.trajectory_id)
        if trajectory is None:
            return Refusal(grpc.StatusCode.NOT_FOUND, "TRAJECTORY_NOT_FOUND")
        if request.trajectory_id in self.outcomes:
            return Refusal(_FAILED, "TRAJECTORY_CLOSED")
        out = self.tickets.get(request.trajectory_id, "")
        if out and not request.replaces_ticket_id and request.turn == trajectory.next_turn + 1:
            self.finished(out)  # on the client's word: the fact may be late
            out = ""
        if request.replaces_ticket_id and self._last.get(request.trajectory_id) == (
            request.replaces_ticket_id,
            request.turn,
        ):
            # also where it has ended meanwhile
            trajectory.next_turn, out = (request.turn, request.replaces_ticket_id)
        if request.turn != trajectory.next_turn:
            return Refusal(_FAILED, "TURN_OUT_OF_ORDER")
        if out != request.replaces_ticket_id:
            return Refusal(
                _FAILED,
                "STEP_IN_FLIGHT",
                f"{out!r} is out, {request.replaces_ticket_id!r} was named",
            )
        if not self.engines:
            return Refusal(grpc.StatusCode.UNAVAILABLE, "NO_ENGINE", retry_after_s=0.05)
        first = request.trajectory_id not in self._last
        if (
            first
            and self.room is not None
            and len(self._last.keys() - self.outcomes.keys()) >= self.room
        ):
            return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "STEP_HELD", retry_after_s=0.02)
        engine_id = list(self.engines)[self._issued % len(self.engines)]
        self._issued += 1
        ticket = ticket_pb2.Ticket(
            ticket_id=f"k-{self._issued}",
            trajectory_id=request.trajectory_id,
            turn=request.turn,
            engine_id=engine_id,
            engine_address=self.engines[engine_id],
            weight_version="0",
            cache_salt="0",
            expires_at=timestamp(time.time() + TICKET_LIFE_S),
        )
        self.tickets[request.trajectory_id] = ticket.ticket_id
        self._last[request.trajectory_id] = (ticket.ticket_id, request.turn)
        return pb.ScheduleStepResponse(ticket=ticket)

    @answer
    def CloseTrajectory(
        self, request: pb.CloseTrajectoryRequest
    ) -> pb.CloseTrajectoryResponse | Refusal:
        if request.trajectory_id not in self.trajectories:
            return Refusal(grpc.StatusCode.NOT_FOUND, "TRAJECTORY_NOT_FOUND")
        if request.trajectory_id in self.outcomes:
            return Refusal(_FAILED, "TRAJECTORY_CLOSED")
        self.outcomes[request.trajectory_id] = request.outcome
        return pb.CloseTrajectoryResponse(trajectory=self.trajectories[request.trajectory_id])

    def _switch(self, request: pb.SwitchEngineRequest) -> pb.SwitchEngineResponse | Refusal:
        _, revision = self.owners[request.trajectory_id]
        if revision != request.expected_revision:
            return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "REVISION_MISMATCH")
        self.owners[request.trajectory_id] = (request.target_engine_id, revision + 1)
        return pb.SwitchEngineResponse(revision=revision + 1)
