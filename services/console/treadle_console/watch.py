"""Request from other services what no fact reports: loads of engines, jobs, policy, weights,
priorities, resources, shaping.

Each kind of request has a task of its own, so that a service which is away makes its own part of
the page old and no other. A list of many trajectories costs the scheduler time: the console then
waits the longer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc.aio
import structlog
from treadle.rollout.v1 import rollout_pb2
from treadle.rollout.v1.rollout_pb2_grpc import RolloutServiceStub
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from treadle.tools.v1 import tools_pb2
from treadle.tools.v1.tools_pb2_grpc import ToolsServiceStub
from treadle_runtime.errors import contain

from treadle_console import convert
from treadle_console.state import Mesh

log = structlog.get_logger()

CALL_S = 5.0
LOADS_EVERY_S = 1.0  # sidecars renew their leases, and report their load, about as often
STANDING_EVERY_S = 2.0
RESOURCES_EVERY_S = 2.0
SHAPING_EVERY_S = 5.0
SHARE_OF_SCHEDULER = 0.05  # most of its time that the console takes by listing trajectories
PAGE = 500
MOST_SHAPINGS = 8  # most rollouts that are requested at a time, the newest

Connect = Callable[[str, str], grpc.aio.Channel]


class Watch:
    """Requests to the other services, whose answers go to `mesh`. scheduler: the channel to it.
    connect: opens a channel to an address and the service there."""

    def __init__(self, mesh: Mesh, scheduler: grpc.aio.Channel, connect: Connect) -> None:
        self._mesh, self._connect = mesh, connect
        self.scheduler = SchedulerServiceStub(scheduler)
        self._directory = pb.GetDirectoryResponse()

    @property
    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Return the tasks to run beside the server."""
        return [self._watch_loads, self._watch_standing, self._watch_resources, self._watch_shaping]

    async def _watch_loads(self) -> None:
        while True:
            with contain("a look at the scheduler"):
                await self._look_at_scheduler()
            await asyncio.sleep(LOADS_EVERY_S)

    async def _look_at_scheduler(self) -> None:
        try:
            engines = await self.scheduler.ListEngines(pb.ListEnginesRequest(), timeout=CALL_S)
            jobs = await self.scheduler.ListJobs(pb.ListJobsRequest(), timeout=CALL_S)
            policy = await self.scheduler.GetPolicy(pb.GetPolicyRequest(), timeout=CALL_S)
            weights = await self.scheduler.GetWeights(pb.GetWeightsRequest(), timeout=CALL_S)
            self._directory = await self.scheduler.GetDirectory(
                pb.GetDirectoryRequest(), timeout=CALL_S
            )
        except grpc.aio.AioRpcError as error:
            log.info(
                "the scheduler does not answer", error=f"{error.code().name}: {error.details()}"
            )
            self._mesh.set_section("scheduler", {"away": error.code().name})
            return
        for each in engines.engines:
            self._mesh.engine_number(each.info.engine_id)
        self._mesh.set_engines(
            round(1e3 * time.time()), list(map(convert.engine_view, engines.engines))
        )
        self._mesh.set_section("jobs", list(map(convert.job_view, jobs.jobs)))
        self._mesh.set_section("policy", convert.policy_view(policy.policy))
        self._mesh.set_section("weights", convert.weights_view(weights.weights))
        self._mesh.set_section("scheduler", {"away": ""})

    async def _watch_standing(self) -> None:
        """Update priorities and predictions of open trajectories, a page of the list at a time."""
        request = pb.ListTrajectoriesRequest(open_only=True, page_size=PAGE)
        while True:
            began_s = time.monotonic()
            pause_s = STANDING_EVERY_S
            try:
                said = await self.scheduler.ListTrajectories(request, timeout=CALL_S)
            except grpc.aio.AioRpcError:  # `_watch_loads` logs it
                request.page_token = ""
            else:
                with contain("a list of trajectories"):
                    for each in said.trajectories:
                        self._mesh.set_standing(each.trajectory_id, *convert.standing_of(each))
                request.page_token = said.next_page_token
                if request.page_token:
                    pause_s = (time.monotonic() - began_s) / SHARE_OF_SCHEDULER
            await asyncio.sleep(pause_s)

    async def _watch_resources(self) -> None:
        async def ask() -> None:
            tools = ToolsServiceStub(self._connect(self._directory.tools_address, "tools"))
            said = await tools.GetResources(tools_pb2.GetResourcesRequest(), timeout=CALL_S)
            self._mesh.set_section("resources", convert.resources_view(said))

        await self._ask(RESOURCES_EVERY_S, lambda: self._directory.tools_address, ask)

    async def _watch_shaping(self) -> None:
        """Update the shaping of rollouts that run, and twice of each that is over: its last samples
        may still be on their way the first time."""
        over, final = set[str](), set[str]()

        async def ask() -> None:
            rollouts = RolloutServiceStub(self._connect(self._directory.rollout_address, "rollout"))
            wanted = [each for each in self._mesh.rollouts() if each.id and each.id not in final][
                -MOST_SHAPINGS:
            ]
            for each in wanted:
                is_over = each.closed == each.trajectories  # as it was before the request
                request = rollout_pb2.GetShapingRequest(rollout_id=each.id)
                try:
                    said = await rollouts.GetShaping(request, timeout=CALL_S)
                except grpc.aio.AioRpcError as error:
                    if (
                        error.code() is not grpc.StatusCode.NOT_FOUND
                    ):  # then its samples are not handed in
                        raise
                else:
                    self._mesh.set_shaping(each.id, convert.shaping_view(said))
                if is_over:
                    (final if each.id in over else over).add(each.id)

        await self._ask(SHAPING_EVERY_S, lambda: self._directory.rollout_address, ask)

    async def _ask(
        self, every_s: float, address: Callable[[], str], ask: Callable[[], Awaitable[None]]
    ) -> None:
        while True:
            await asyncio.sleep(every_s)
            if address():
                with contain("an answer of a service", address=address()):
                    try:
                        await ask()
                    except grpc.aio.AioRpcError as error:
                        log.info(
                            "a service does not answer", address=address(), error=error.code().name
                        )
