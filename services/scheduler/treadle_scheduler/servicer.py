"""Answer SchedulerService: convert the request to an event, hand it to the driver, convert the
record back."""

import uuid
from typing import Any

from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_runtime.calls import remaining_s
from treadle_runtime.fields import (
    duration,
    identifier,
    optional_identifier,
    owner_of,
    page_of,
    timestamp,
)
from treadle_runtime.idempotency import RequestRecords, answered_once
from treadle_runtime.identity import Sealer, tenant_of

from treadle_scheduler import convert, convert_engines
from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.driver import POLICY_KEY, Driver, engine_key, job_key, trajectory_key
from treadle_scheduler.lease import Lease, NotLeader
from treadle_scheduler.metrics import Traces

ANSWER_S = 0.2  # of a call's time, kept to answer STEP_HELD before the deadline


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Servicer of SchedulerService. The core's refusals pass through; `wire.py` maps them to gRPC
    errors. Before `serve`, `admit` refuses every call."""

    records: RequestRecords

    def __init__(self, settings: SchedulerSettings, lease: Lease, traces: Traces) -> None:
        self._settings = settings
        self._lease = lease
        self._traces = traces
        self._has_state = False

    async def admit(self) -> None:
        """Let a call in where this process leads. Raises NotLeader."""
        if not self._has_state:
            raise NotLeader(self._lease.leader_address)
        await self._lease.admit()

    def serve(self, driver: Driver, records: RequestRecords, sealer: Sealer | None) -> None:
        """Answer from this driver's state, which is read when the process begins to lead. sealer:
        of tickets; None in plaintext."""
        self._driver = driver
        self._controller = driver.controller
        self.records = records
        self._sealer = sealer
        self._has_state = True

    async def OpenJob(self, request: pb.OpenJobRequest, context: Any) -> pb.OpenJobResponse:
        event = convert_engines.job_opened(request)
        await self._driver.request(event, job_key(event.job_id))
        return pb.OpenJobResponse(
            job_id=event.job_id,
            lease_ttl=duration(self._settings.job_lease_s),
            rollout_ids=self._controller.job(event.job_id).rollout_ids,
        )

    async def RenewJob(self, request: pb.RenewJobRequest, context: Any) -> pb.RenewJobResponse:
        event = convert_engines.job_renewed(request)
        await self._driver.request(event, job_key(event.job_id))
        return pb.RenewJobResponse(lease_ttl=duration(self._settings.job_lease_s))

    async def CloseJob(self, request: pb.CloseJobRequest, context: Any) -> pb.CloseJobResponse:
        event = convert_engines.job_closed(request)
        await self._driver.request(event, job_key(event.job_id))
        return pb.CloseJobResponse()

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        tenant = tenant_of(context)
        jobs = (use for use in self._controller.jobs() if tenant in (None, owner_of(use.job)))
        return pb.ListJobsResponse(jobs=map(convert_engines.job_use, jobs))

    async def OpenTrajectory(
        self, request: pb.OpenTrajectoryRequest, context: Any
    ) -> pb.OpenTrajectoryResponse:
        event = convert.trajectory_opened(request)
        self._traces.note(event.trajectory_id)
        await self._driver.request(event, trajectory_key(event.trajectory_id))
        return pb.OpenTrajectoryResponse(trajectory=self._trajectory(event.trajectory_id))

    async def ScheduleStep(
        self, request: pb.ScheduleStepRequest, context: Any
    ) -> pb.ScheduleStepResponse:
        event = convert.step_requested(request)
        self._traces.note(event.trajectory_id)
        left_s = remaining_s()
        record = await self._driver.request_step(
            event, None if left_s is None else max(0.0, left_s - ANSWER_S)
        )
        response = pb.ScheduleStepResponse(ticket=convert.ticket_message(record))
        if self._sealer is not None:
            self._sealer.seal(response.ticket)
        return response

    async def CloseTrajectory(
        self, request: pb.CloseTrajectoryRequest, context: Any
    ) -> pb.CloseTrajectoryResponse:
        event = convert.trajectory_closed(request)
        self._traces.note(event.trajectory_id)
        await self._driver.request(event, trajectory_key(event.trajectory_id))
        return pb.CloseTrajectoryResponse(trajectory=self._trajectory(event.trajectory_id))

    async def GetTrajectory(
        self, request: pb.GetTrajectoryRequest, context: Any
    ) -> pb.GetTrajectoryResponse:
        trajectory_id = identifier("trajectory_id", request.trajectory_id)
        response = pb.GetTrajectoryResponse(trajectory=self._trajectory(trajectory_id))
        if request.history:
            record = self._controller.trajectory(trajectory_id)
            history = convert.history_message(record, self._controller.history(trajectory_id))
            response.MergeFrom(pb.GetTrajectoryResponse(**history))
        return response

    async def ListTrajectories(
        self, request: pb.ListTrajectoriesRequest, context: Any
    ) -> pb.ListTrajectoriesResponse:
        rollout_id = optional_identifier("rollout_id", request.rollout_id)
        tenant = tenant_of(context)
        wanted = (
            record
            for record in self._controller.trajectories()
            if tenant in (None, owner_of(record.trajectory_id))
            and rollout_id in ("", record.rollout_id)
            and (record.is_open or not request.open_only)
        )
        records, token = page_of(
            wanted,
            lambda record: (record.opened_s, record.trajectory_id),
            request.page_size,
            request.page_token,
        )
        return pb.ListTrajectoriesResponse(
            trajectories=map(convert.trajectory_message, records), next_page_token=token
        )

    async def SwitchEngine(
        self, request: pb.SwitchEngineRequest, context: Any
    ) -> pb.SwitchEngineResponse:
        event = convert_engines.switch_requested(request)
        await self._driver.request(event, trajectory_key(event.trajectory_id))
        return pb.SwitchEngineResponse(revision=event.expected_revision + 1)

    async def RegisterEngine(
        self, request: pb.RegisterEngineRequest, context: Any
    ) -> pb.RegisterEngineResponse:
        event = convert_engines.engine_registered(request, uuid.uuid4().hex)
        await self._driver.request(event, engine_key(event.spec.engine_id))
        record = self._controller.engine(event.spec.engine_id)
        assert record is not None, "it has just been registered"
        key = b"" if self._sealer is None else self._sealer.key_of(event.spec.engine_id)
        ttl = duration(self._settings.lease_ttl_s)
        return pb.RegisterEngineResponse(lease_id=record.lease_id, lease_ttl=ttl, ticket_key=key)

    async def RenewEngineLease(
        self, request: pb.RenewEngineLeaseRequest, context: Any
    ) -> pb.RenewEngineLeaseResponse:
        await self._driver.request(convert_engines.lease_renewed(request))
        return pb.RenewEngineLeaseResponse(
            lease_ttl=duration(self._settings.lease_ttl_s), now=timestamp(self._driver.now)
        )

    @answered_once
    async def DeregisterEngine(
        self, request: pb.DeregisterEngineRequest, context: Any
    ) -> pb.DeregisterEngineResponse:
        await self._driver.request(convert_engines.engine_deregistered(request))
        return pb.DeregisterEngineResponse()

    async def ListEngines(
        self, request: pb.ListEnginesRequest, context: Any
    ) -> pb.ListEnginesResponse:
        return pb.ListEnginesResponse(
            engines=[
                convert_engines.registered_engine(
                    record, self._controller.open_on(record.spec.engine_id)
                )
                for record in self._controller.engines()
            ]
        )

    @answered_once
    async def DrainEngine(
        self, request: pb.DrainEngineRequest, context: Any
    ) -> pb.DrainEngineResponse:
        await self._driver.request(convert_engines.drain_set(request), POLICY_KEY)
        return pb.DrainEngineResponse(trajectories=self._controller.open_on(request.engine_id))

    @answered_once
    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Any) -> pb.SetPolicyResponse:
        await self._driver.request(convert_engines.policy_set(request))
        return pb.SetPolicyResponse(policy=convert_engines.policy_message(self._controller.policy))

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Any) -> pb.GetPolicyResponse:
        return pb.GetPolicyResponse(policy=convert_engines.policy_message(self._controller.policy))

    @answered_once
    async def SetWeights(
        self, request: pb.SetWeightsRequest, context: Any
    ) -> pb.SetWeightsResponse:
        await self._driver.request(convert_engines.weights_set(request), POLICY_KEY)
        return pb.SetWeightsResponse(weights=self._weights())

    async def GetWeights(
        self, request: pb.GetWeightsRequest, context: Any
    ) -> pb.GetWeightsResponse:
        return pb.GetWeightsResponse(weights=self._weights())

    async def GetDirectory(
        self, request: pb.GetDirectoryRequest, context: Any
    ) -> pb.GetDirectoryResponse:
        settings = self._settings
        return pb.GetDirectoryResponse(
            tools_address=settings.public_tools or settings.tools,
            rollout_address=settings.public_rollout or settings.rollout,
            predictor_address=settings.public_predictor or settings.predictor,
            placement_address=settings.public_placement or settings.placement,
            migrator_address=settings.public_migrator or settings.migrator,
            resources_address=settings.resources,
        )

    def _weights(self) -> pb.Weights:
        return convert_engines.weights_message(
            self._controller.desired_weights, self._controller.engines()
        )

    def _trajectory(self, trajectory_id: str) -> pb.Trajectory:
        record, now = self._controller.trajectory(trajectory_id), self._driver.now
        message = convert.trajectory_message(record)
        message.ledger.CopyFrom(
            convert.ledger_message(record, self._controller.ledger(trajectory_id, now), now)
        )
        return message
