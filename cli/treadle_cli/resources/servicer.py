"""Serve ResourceService in the process that owns the engines: one plan at a time, to its end also
where a call breaks off.

Answers are known by request_id as long as the process lives; the engines live no longer.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from treadle.certificates import Certificates, open_channel
from treadle.resources.v1 import resources_pb2 as pb
from treadle.resources.v1 import resources_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_runtime.calls import Interceptor, detached_context
from treadle_runtime.config import Settings
from treadle_runtime.errors import FailedPrecondition
from treadle_runtime.fields import identifier, non_negative, require, seconds
from treadle_runtime.identity import TenantLimits
from treadle_runtime.server import bind
from treadle_runtime.telemetry import Metrics

from treadle_cli.resources.plan import (
    START_TIMEOUT_S,
    Applied,
    Engines,
    apply_plan,
    plan_message,
    plan_of,
)

LARGEST_PLAN_BYTES = 1024 * 1024
STOP_GRACE_S = 1.0


class ResourceServicer(resources_pb2_grpc.ResourceServiceServicer):
    """Servicer that owns the tasks of plans, until `close`."""

    def __init__(
        self,
        engines: Engines,
        scheduler: "scheduler_pb2_grpc.SchedulerServiceAsyncStub",
        note: Callable[[str], None],
    ) -> None:
        self._engines, self._scheduler, self._note = engines, scheduler, note
        self._tasks: dict[str, asyncio.Task[pb.ApplyPlanResponse]] = {}

    async def ApplyPlan(self, request: pb.ApplyPlanRequest, context: Any) -> pb.ApplyPlanResponse:
        request_id = identifier("request_id", request.request_id)
        task = self._tasks.get(request_id)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            running = [each for each, other in self._tasks.items() if not other.done()]
            if running:
                message = f"request {running[0]} is being applied: ask again when it has ended"
                raise FailedPrecondition("PLAN_IN_PROGRESS", message, request_id=running[0])
            task = asyncio.get_running_loop().create_task(
                self.apply(request), context=detached_context()
            )
            # its caller may be gone
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._tasks[request_id] = task
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel the plans that are being applied."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def apply(self, request: pb.ApplyPlanRequest) -> pb.ApplyPlanResponse:
        """Apply a plan as ApplyPlan does, but a repeat is a new request."""
        require(
            request.HasField("plan"), "plan", "must be set; one without engines stops all of them"
        )
        applied = await apply_plan(
            self._engines,
            self._scheduler,
            plan_of(request.plan, self._engines.accelerator),
            dry_run=request.dry_run,
            drain_s=non_negative("drain", seconds(request.drain)),
            start_timeout_s=non_negative("start_timeout", seconds(request.start_timeout))
            or START_TIMEOUT_S,
            note=self._note,
        )
        return response_of(applied)

    async def GetResources(
        self, request: pb.GetResourcesRequest, context: Any
    ) -> pb.GetResourcesResponse:
        return await self.show()

    async def show(self) -> pb.GetResourcesResponse:
        """Return the plan that runs, as GetResources does."""
        running = await self._engines.running()
        return pb.GetResourcesResponse(
            plan=plan_message(running.values()),
            accelerator=self._engines.accelerator,
            accelerators=self._engines.accelerators,
        )


def response_of(applied: Applied) -> pb.ApplyPlanResponse:
    """Return the answer to ApplyPlan."""
    outcome = pb.APPLY_OUTCOME_DRY_RUN if applied.dry_run else pb.APPLY_OUTCOME_APPLIED
    return pb.ApplyPlanResponse(
        outcome=pb.APPLY_OUTCOME_ROLLED_BACK if applied.problem else outcome,
        keep_engine_ids=applied.change.keep,
        stop_engine_ids=applied.change.stop,
        start=plan_message(applied.change.start).engines,
        started_engine_ids=applied.started,
        failed_engine_id=applied.failed_engine_id,
        problem=applied.problem,
    )


@asynccontextmanager
async def serve_resources(
    listen: str,
    engines: Engines,
    scheduler: str,
    note: Callable[[str], None],
    certificates: Certificates | None = None,
) -> AsyncIterator[None]:
    """Serve at `listen` during the block; a plan that is being applied then is cancelled.
    scheduler: host:port. certificates: None for plaintext.

    Raises RuntimeError where the port is taken.
    """
    stopping = asyncio.Event()
    interceptor = Interceptor(
        domain="resources.treadle",
        errors={},
        max_message_bytes=LARGEST_PLAN_BYTES,
        stopping=stopping,
        tenants=TenantLimits(0.0, 0) if certificates else None,
        metrics=Metrics(Settings()),
    )
    server = grpc.aio.server(interceptors=[interceptor], options=[("grpc.so_reuseport", 0)])
    async with open_channel(scheduler, "scheduler", certificates) as channel:
        servicer = ResourceServicer(engines, scheduler_pb2_grpc.SchedulerServiceStub(channel), note)
        resources_pb2_grpc.add_ResourceServiceServicer_to_server(servicer, server)
        bind(server, listen, certificates)
        await server.start()
        try:
            yield
        finally:
            await servicer.close()
            stopping.set()
            await server.stop(STOP_GRACE_S)
