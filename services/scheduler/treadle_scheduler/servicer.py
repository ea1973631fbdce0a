"""SchedulerService: validate, convert, hand to the controller, convert back.

Pages of trajectories in the order of opening. A token names the last one given, so that openings and forgettings
between two pages neither repeat nor hide others."""

import base64
import binascii
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_core.events import EngineDeregistered, PolicySet
from treadle_core.model import TrajectoryRecord
from treadle_runtime.calls import remaining_s
from treadle_runtime.errors import InvalidArgument, identifier
from treadle_runtime.idempotency import RequestRecords

from treadle_scheduler import convert
from treadle_scheduler import convert as checks
from treadle_scheduler import convert_mesh as convert_engines
from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.driver import Driver
from treadle_scheduler.store import engine_key, trajectory_key

Place = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Page:
    """`next_token` is empty after the last."""

    records: Sequence[TrajectoryRecord]
    next_token: str


def page_of(records: Sequence[TrajectoryRecord], *, rollout_id: str, open_only: bool, size: int, token: str) -> Page:
    """The page after `token` (the first one where it is empty). Raises InvalidArgument for a token that is none of
    ours."""
    after = _place(token) if token else None
    wanted = sorted(
        (
            record
            for record in records
            if (not rollout_id or record.rollout_id == rollout_id)
            and (record.is_open or not open_only)
            and (after is None or _place_of(record) > after)
        ),
        key=_place_of,
    )
    page = wanted[:size]
    return Page(page, _token(_place_of(page[-1])) if len(wanted) > size else "")


def _place_of(record: TrajectoryRecord) -> Place:
    return (record.opened_s, record.trajectory_id)


def _token(place: Place) -> str:
    return base64.urlsafe_b64encode(f"{place[0].hex()} {place[1]}".encode()).decode()


def _place(token: str) -> Place:
    try:
        opened, _, trajectory_id = (
            base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode().partition(" ")
        )
        return (float.fromhex(opened), trajectory_id)
    except (binascii.Error, UnicodeError, ValueError, OverflowError):
        raise InvalidArgument("page_token", "must be a next_page_token of an earlier answer, or empty") from None


ANSWER_S = 0.2  # of a call's time, kept to tell the client that its step is held


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The contract of protos/treadle/scheduler/v1. Core refusals pass through; `wire.py` maps them."""

    def __init__(self, driver: Driver, records: RequestRecords, settings: SchedulerSettings) -> None:
        self._driver = driver
        self._controller = driver.controller
        self._records = records
        self._settings = settings

    async def OpenTrajectory(self, request: pb.OpenTrajectoryRequest, context: Any) -> pb.OpenTrajectoryResponse:
        """Admits a trajectory."""
        checks.open_trajectory(request)
        event = convert.opened(request)
        await self._driver.request(event, trajectory_key(event.trajectory_id))
        record = self._controller.trajectory(event.trajectory_id)
        return pb.OpenTrajectoryResponse(trajectory=convert.trajectory_message(record))

    async def ScheduleStep(self, request: pb.ScheduleStepRequest, context: Any) -> pb.ScheduleStepResponse:
        """Answers with a ticket."""
        checks.schedule_step(request)
        ticket = await self._driver.step(convert.step_requested(request), request.trajectory_id, _held_at_most_s())
        return pb.ScheduleStepResponse(ticket=convert.ticket_message(ticket))

    async def CloseTrajectory(self, request: pb.CloseTrajectoryRequest, context: Any) -> pb.CloseTrajectoryResponse:
        """Ends a trajectory."""
        checks.close_trajectory(request)
        await self._driver.request(convert.closed(request), trajectory_key(request.trajectory_id))
        record = self._controller.trajectory(request.trajectory_id)
        return pb.CloseTrajectoryResponse(trajectory=convert.trajectory_message(record))

    async def GetTrajectory(self, request: pb.GetTrajectoryRequest, context: Any) -> pb.GetTrajectoryResponse:
        """One trajectory."""
        identifier("trajectory_id", request.trajectory_id)
        record = self._controller.trajectory(request.trajectory_id)
        return pb.GetTrajectoryResponse(trajectory=convert.trajectory_message(record))

    async def ListTrajectories(self, request: pb.ListTrajectoriesRequest, context: Any) -> pb.ListTrajectoriesResponse:
        """Trajectories in the order of opening, page by page."""
        checks.list_trajectories(request)
        page = page_of(
            self._controller.trajectories(),
            rollout_id=request.rollout_id,
            open_only=request.open_only,
            size=request.page_size or checks.DEFAULT_PAGE,
            token=request.page_token,
        )
        return pb.ListTrajectoriesResponse(
            trajectories=[convert.trajectory_message(record) for record in page.records],
            next_page_token=page.next_token,
        )

    async def SwitchEngine(self, request: pb.SwitchEngineRequest, context: Any) -> pb.SwitchEngineResponse:
        """Compare-and-swap of the owner."""
        checks.switch_engine(request)
        await self._driver.request(convert.switch_requested(request), trajectory_key(request.trajectory_id))
        return pb.SwitchEngineResponse(revision=request.expected_revision + 1)

    async def RegisterEngine(self, request: pb.RegisterEngineRequest, context: Any) -> pb.RegisterEngineResponse:
        """Takes an engine in."""
        checks.register_engine(request)
        engine_id = request.info.engine_id
        await self._driver.request(convert_engines.engine_registered(request, uuid.uuid4().hex), engine_key(engine_id))
        record = self._controller.engine(engine_id)
        assert record is not None, "it has just been registered"
        return pb.RegisterEngineResponse(
            lease_id=record.lease_id, lease_ttl=convert.duration(self._settings.lease_ttl_s)
        )

    async def RenewEngineLease(self, request: pb.RenewEngineLeaseRequest, context: Any) -> pb.RenewEngineLeaseResponse:
        """Holds an engine."""
        checks.renew_lease(request)
        await self._driver.request(convert_engines.lease_renewed(request))
        return pb.RenewEngineLeaseResponse(lease_ttl=convert.duration(self._settings.lease_ttl_s))

    async def DeregisterEngine(self, request: pb.DeregisterEngineRequest, context: Any) -> pb.DeregisterEngineResponse:
        """Takes an engine away."""
        checks.deregister_engine(request)

        async def deregister() -> pb.DeregisterEngineResponse:
            await self._driver.request(EngineDeregistered(request.lease_id, request.engine_id))
            return pb.DeregisterEngineResponse()

        return await self._records.once("DeregisterEngine", request, pb.DeregisterEngineResponse, deregister)

    async def ListEngines(self, request: pb.ListEnginesRequest, context: Any) -> pb.ListEnginesResponse:
        """Engines that hold a lease."""
        return pb.ListEnginesResponse(
            engines=[
                convert_engines.registered_engine(record, self._controller.open_on(record.spec.engine_id))
                for record in self._controller.engines()
            ]
        )

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Any) -> pb.SetPolicyResponse:
        """The policy of trajectories opened from now on."""
        checks.set_policy(request)

        async def set_policy() -> pb.SetPolicyResponse:
            await self._driver.request(PolicySet(convert.policy(request.policy)))
            return pb.SetPolicyResponse(policy=convert.policy_message(self._controller.policy))

        return await self._records.once("SetPolicy", request, pb.SetPolicyResponse, set_policy)

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Any) -> pb.GetPolicyResponse:
        """The policy of trajectories opened from now on."""
        return pb.GetPolicyResponse(policy=convert.policy_message(self._controller.policy))

    async def GetDirectory(self, request: pb.GetDirectoryRequest, context: Any) -> pb.GetDirectoryResponse:
        """Where the other services are."""
        settings = self._settings
        return pb.GetDirectoryResponse(
            tools_address=settings.public_tools or settings.tools,
            rollout_address=settings.public_rollout or settings.rollout,
            predictor_address=settings.public_predictor or settings.predictor,
            placement_address=settings.public_placement or settings.placement,
            migrator_address=settings.public_migrator or settings.migrator,
        )


def _held_at_most_s() -> float | None:
    left_s = remaining_s()
    return None if left_s is None else max(0.0, left_s - ANSWER_S)
