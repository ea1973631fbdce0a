"""Serve ToolsService and RewardsService: check a request, convert it, call gateway or pool, convert
the answer.

Invariant: a request's fields, tool and session are checked before it is refused for lack of a
sandbox.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message
from treadle.tools.v1 import rewards_pb2 as rewards
from treadle.tools.v1 import rewards_pb2_grpc, tools_pb2_grpc
from treadle.tools.v1 import tools_pb2 as pb
from treadle_core.tools.dispatcher import Dispatcher
from treadle_core.tools.providers import BasicManager
from treadle_runtime.calls import remaining_s
from treadle_runtime.errors import InvalidArgument, Unimplemented
from treadle_runtime.fields import identifier, like, require
from treadle_runtime.idempotency import RequestRecords, answered_once

from treadle_tools import convert
from treadle_tools.actions import Actions, Background
from treadle_tools.backends import Backends
from treadle_tools.registry import Registry, refuse_invalid
from treadle_tools.remote import HttpFunction
from treadle_tools.remote.functions import FunctionTools
from treadle_tools.rewards.pool import RewardPool
from treadle_tools.rewards.reward import DEFAULT_JOB, Reward
from treadle_tools.sandbox.sandboxes import ReusedSandboxes, Sandbox
from treadle_tools.sessions import Opening, Sessions
from treadle_tools.tool import Granted, Kind, Limits, Result, Tool

R = TypeVar("R", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]

MOST_WATCHED = 4096  # ids of one watch; a batch of rollouts has hundreds


@dataclass(frozen=True)
class Gateway:
    """Parts that ToolsService and RewardsService call. providers: by name."""

    registry: Registry
    backends: Backends
    actions: Actions
    dispatcher: Dispatcher
    providers: Mapping[str, BasicManager]
    sessions: Sessions
    functions: FunctionTools
    reused: ReusedSandboxes

    async def call(
        self,
        tool: Tool,
        arguments: Mapping[str, Any],
        limits: Limits,
        trajectory_id: str,
        job: str = "",
    ) -> Result:
        """Run a stateless tool, until its caller goes away.

        job: whose share of cores and providers it takes.
        """
        if isinstance(tool.remote, HttpFunction):
            return await self.functions.run(
                tool, tool.remote, arguments, limits, trajectory_id, job
            )
        backend = self.backends.require(tool)

        async def work(granted: Granted) -> Mapping[str, Any]:
            if (reused := self.reused.take(trajectory_id, tool)) is not None:
                reply = await self._ask(reused, tool, arguments, granted, trajectory_id)
                if not reply.get("soiled"):
                    return reply
            return await self._ask(
                await backend.take(tool.name), tool, arguments, granted, trajectory_id
            )

        result = await self.actions.run(tool, trajectory_id, limits, work, job=job)
        refuse_invalid(result)
        return result

    async def _ask(
        self,
        sandbox: Sandbox,
        tool: Tool,
        arguments: Mapping[str, Any],
        granted: Granted,
        trajectory_id: str,
    ) -> Mapping[str, Any]:
        """Make one call in `sandbox`, which is kept for the trajectory's next call or closed."""
        again = tool.kind is Kind.STATELESS and self.reused.wants(sandbox, trajectory_id)
        keep = False
        try:
            reply = await sandbox.ask("call", arguments, granted, tool.processes, again=again)
            keep = bool(reply.get("again"))
            return reply
        finally:
            if keep:
                self.reused.add(trajectory_id, tool, sandbox)
            else:
                sandbox.close()


@dataclass(eq=False)
class ToolsServicer(tools_pb2_grpc.ToolsServiceServicer):
    """ToolsService, the RPCs of protos/treadle/tools/v1/tools.proto."""

    gateway: Gateway
    records: RequestRecords
    background: Background

    async def ListTools(
        self, request: pb.ListToolsRequest, context: Context
    ) -> pb.ListToolsResponse:
        tools = [convert.tool_message(tool) for tool in self.gateway.registry.tools]
        return pb.ListToolsResponse(tools=tools, sandbox=", ".join(self.gateway.backends.versions))

    async def Invoke(self, request: pb.InvokeRequest, context: Context) -> pb.InvokeResponse:
        if request.session_id:
            return await self._finish(
                "Invoke", request, pb.InvokeResponse, partial(self._step, request)
            )
        call, later = partial(self._call, request), self.background.spawn
        return await self.records.once("Invoke", request, pb.InvokeResponse, call, later)

    async def _finish(
        self, rpc: str, request: Message, answer: type[R], call: Callable[[], Awaitable[R]]
    ) -> R:
        """Finish and record a change of a session, whether or not the caller still waits."""
        return await self.background.finish(lambda: self.records.once(rpc, request, answer, call))

    async def _call(self, request: pb.InvokeRequest) -> pb.InvokeResponse:
        _trajectory(request.trajectory_id)
        tool = self.gateway.registry.stateless(request.tool)
        arguments = self.gateway.registry.step_arguments(tool, request.arguments_json)
        limits = convert.limits_of(request.limits, tool.limits)
        result = await self.gateway.call(
            tool, arguments, limits, request.trajectory_id, _job(request.job, request.request_id)
        )
        return pb.InvokeResponse(result=convert.result_message(result))

    async def _step(self, request: pb.InvokeRequest) -> pb.InvokeResponse:
        session = self.gateway.sessions.get(identifier("session_id", request.session_id))
        if request.tool and request.tool != session.tool.name:
            message = (
                f"session {session.session_id!r} is of tool {session.tool.name!r}, not this one"
            )
            raise InvalidArgument("tool", message)
        if request.trajectory_id and request.trajectory_id != session.trajectory_id:
            raise InvalidArgument(
                "trajectory_id", f"session {session.session_id!r} belongs to another trajectory"
            )
        arguments = self.gateway.registry.step_arguments(session.tool, request.arguments_json)
        limits = convert.limits_of(request.limits, session.limits)
        result = await self.gateway.sessions.step(session, arguments, limits, request.request_id)
        return pb.InvokeResponse(result=convert.result_message(result))

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionResponse:
        left_s = remaining_s()
        ends_at = None if left_s is None else time.monotonic() + left_s

        async def call() -> pb.OpenSessionResponse:
            _trajectory(request.trajectory_id)
            require(
                not request.snapshot_id,
                "snapshot_id",
                "must be empty: sessions have no snapshots any more",
            )
            tool = self.gateway.registry.environment(request.tool)
            arguments = self.gateway.registry.open_arguments(tool, request.arguments_json)
            limits = convert.limits_of(request.limits, tool.limits)
            opening = Opening(
                tool=tool,
                arguments=arguments,
                limits=limits,
                trajectory_id=request.trajectory_id,
                request_id=request.request_id,
                job=_job(request.job, request.request_id),
                ends_at=ends_at,
            )
            self.gateway.backends.require(tool)
            session, first = await self.gateway.sessions.open(opening)
            return pb.OpenSessionResponse(
                session=convert.session_message(session), first=convert.result_message(first)
            )

        return await self._finish("OpenSession", request, pb.OpenSessionResponse, call)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        async def call() -> pb.CloseSessionResponse:
            await self.gateway.sessions.close(
                identifier("session_id", request.session_id), request.request_id
            )
            return pb.CloseSessionResponse()

        return await self._finish("CloseSession", request, pb.CloseSessionResponse, call)

    async def SnapshotSession(
        self, request: pb.SnapshotSessionRequest, context: Context
    ) -> pb.SnapshotSessionResponse:
        raise Unimplemented("UNIMPLEMENTED", "sessions have no snapshots any more")

    async def GetSession(
        self, request: pb.GetSessionRequest, context: Context
    ) -> pb.GetSessionResponse:
        session = self.gateway.sessions.get(identifier("session_id", request.session_id))
        return pb.GetSessionResponse(session=convert.session_message(session))

    async def GetResources(
        self, request: pb.GetResourcesRequest, context: Context
    ) -> pb.GetResourcesResponse:
        return convert.resources_message(
            self.gateway.dispatcher, self.gateway.providers, time.monotonic()
        )


def _job(job: str, request_id: str) -> str:
    return identifier("job", job or like(request_id, DEFAULT_JOB))


def _trajectory(trajectory_id: str) -> None:
    if trajectory_id:
        identifier("trajectory_id", trajectory_id)


@dataclass(eq=False)
class RewardsServicer(rewards_pb2_grpc.RewardsServiceServicer):
    """RewardsService, the RPCs of protos/treadle/tools/v1/rewards.proto."""

    registry: Registry
    pool: RewardPool
    records: RequestRecords

    async def ListRewards(
        self, request: rewards.ListRewardsRequest, context: Context
    ) -> rewards.ListRewardsResponse:
        return rewards.ListRewardsResponse(
            rewards=[convert.function_message(tool) for tool in self.registry.rewards]
        )

    @answered_once
    async def ScoreTrajectory(
        self, request: rewards.ScoreTrajectoryRequest, context: Context
    ) -> rewards.ScoreTrajectoryResponse:
        tool = self.registry.reward(request.reward)
        reward = Reward(
            reward_id=self.pool.id_of(request.request_id),
            trajectory_id=identifier("trajectory_id", request.trajectory_id),
            job=_job(request.job, request.request_id),
            name=tool.name,
            accepted_at=time.time(),
        )
        accepted = await self.pool.accept(reward, request.arguments_json)
        if (accepted.trajectory_id, accepted.job, accepted.name) != (
            reward.trajectory_id,
            reward.job,
            reward.name,
        ):
            message = "was used with a different request; mint a new id for each logical call"
            raise InvalidArgument("request_id", message)
        return rewards.ScoreTrajectoryResponse(reward=convert.reward_message(accepted))

    async def GetReward(
        self, request: rewards.GetRewardRequest, context: Context
    ) -> rewards.GetRewardResponse:
        reward = self.pool.get(identifier("reward_id", request.reward_id))
        return rewards.GetRewardResponse(reward=convert.reward_message(reward))

    async def WatchRewards(
        self, request: rewards.WatchRewardsRequest, context: Context
    ) -> AsyncIterator[rewards.WatchRewardsResponse]:
        async for reward in self._watch(request):
            yield rewards.WatchRewardsResponse(reward=convert.reward_message(reward))

    def _watch(self, request: rewards.WatchRewardsRequest) -> AsyncIterator[Reward]:
        named = [bool(request.reward_ids), bool(request.job), bool(request.trajectory_id)]
        require(
            sum(named) == 1,
            "reward_ids",
            "name rewards, or a job, or a trajectory: exactly one of the three",
        )
        require(
            len(request.reward_ids) <= MOST_WATCHED, "reward_ids", f"must be at most {MOST_WATCHED}"
        )
        for reward_id in request.reward_ids:
            self.pool.get(identifier("reward_ids", reward_id))
        if request.reward_ids:
            return self.pool.table.watch_until_ended(request.reward_ids)
        if request.job:
            job = identifier("job", request.job)
            return self.pool.table.watch(lambda reward: reward.job == job)
        trajectory_id = identifier("trajectory_id", request.trajectory_id)
        return self.pool.table.watch(lambda reward: reward.trajectory_id == trajectory_id)

    @answered_once
    async def CancelReward(
        self, request: rewards.CancelRewardRequest, context: Context
    ) -> rewards.CancelRewardResponse:
        reward = await self.pool.cancel(identifier("reward_id", request.reward_id))
        return rewards.CancelRewardResponse(reward=convert.reward_message(reward))
