"""FakeRollout and FakeTools: the contracts of RolloutService and ToolsService as the client sees
them, in memory."""

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from support.fake_servicer import FakeServicer, Refusal, answer, refuse
from treadle.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from treadle.tools.v1 import tools_pb2, tools_pb2_grpc
from treadle.types import unpack_ids

_OK = tools_pb2.RESULT_STATUS_OK
ENVIRONMENTS = ("count", "frozen_lake")


class FakeRollout(FakeServicer, rollout_pb2_grpc.RolloutServiceServicer):
    """Keeps the first K of each group and settles it then; failed trajectories are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, rollout_pb2.RolloutSpec] = {}
        self.cancelled: set[str] = set()
        self.kept: dict[str, list[rollout_pb2.FinishedTrajectory]] = {}
        self.pushed: dict[str, list[int]] = {}  # tokens by running trajectory
        self.batches: dict[str, list[rollout_pb2.FinishedTrajectory]] = {}  # by request_id

    @answer
    def CreateRollout(
        self, request: rollout_pb2.CreateRolloutRequest
    ) -> rollout_pb2.CreateRolloutResponse:
        rollout_id = f"r-{len(self.specs)}"
        self.specs[rollout_id] = request.spec
        return rollout_pb2.CreateRolloutResponse(
            rollout=rollout_pb2.Rollout(rollout_id=rollout_id, spec=request.spec)
        )

    @answer
    def CancelRollout(
        self, request: rollout_pb2.CancelRolloutRequest
    ) -> rollout_pb2.CancelRolloutResponse:
        self.cancelled.add(request.rollout_id)
        return rollout_pb2.CancelRolloutResponse()

    @answer
    def SubmitTrajectory(
        self, request: rollout_pb2.SubmitTrajectoryRequest
    ) -> rollout_pb2.SubmitTrajectoryResponse:
        spec, trajectory = self.specs[request.rollout_id], request.trajectory
        if trajectory.failed:
            return rollout_pb2.SubmitTrajectoryResponse(drop_reason=rollout_pb2.DROP_REASON_FAILED)
        group = self.kept.setdefault(trajectory.prompt_id, [])
        keep = spec.keep_per_prompt or spec.samples_per_prompt
        if len(group) >= keep:
            return rollout_pb2.SubmitTrajectoryResponse(
                drop_reason=rollout_pb2.DROP_REASON_GROUP_SETTLED, group_settled=True
            )
        group.append(trajectory)
        return rollout_pb2.SubmitTrajectoryResponse(kept=True, group_settled=len(group) >= keep)

    async def StreamBatch(
        self, request: rollout_pb2.GetBatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[rollout_pb2.StreamBatchResponse]:
        """Each trajectory in two parts; a scripted refusal comes in place of the last message."""
        self.log("StreamBatch", request, context)
        if request.request_id not in self.batches:
            taken = list(self.kept)[: request.max_groups]
            self.batches[request.request_id] = [
                trajectory for name in taken for trajectory in self.kept.pop(name)
            ]
        for trajectory in self.batches[request.request_id]:
            data = trajectory.SerializeToString()
            part = partial(
                rollout_pb2.StreamBatchResponse,
                prompt_id=trajectory.prompt_id,
                trajectory_id=trajectory.trajectory_id,
            )
            yield part(data=data[:20])
            yield part(data=data[20:], trajectory_end=True)
        if (refusal := self.next_refusal("StreamBatch")) is not None:
            await refuse(context, refusal)
        yield rollout_pb2.StreamBatchResponse(batch_end=True, exhausted=not self.kept)

    @answer
    def PushTokens(self, request: rollout_pb2.PushTokensRequest) -> rollout_pb2.PushTokensResponse:
        chunk, known = request.chunk, self.pushed.get(request.chunk.trajectory_id, [])
        if chunk.start_token <= len(known):
            known[chunk.start_token :] = unpack_ids(chunk.tokens.int32_le)
            self.pushed[chunk.trajectory_id] = known
        return rollout_pb2.PushTokensResponse(next_token=len(known), wanted=True)

    @answer
    def ConfirmBatch(
        self, request: rollout_pb2.ConfirmBatchRequest
    ) -> rollout_pb2.ConfirmBatchResponse:
        return rollout_pb2.ConfirmBatchResponse()


class FakeTools(FakeServicer, tools_pb2_grpc.ToolsServiceServicer):
    """The tool `echo` gives its arguments back; its environments count steps and are done at 3."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, int] = {}

    @answer
    def Invoke(self, request: tools_pb2.InvokeRequest) -> tools_pb2.InvokeResponse | Refusal:
        timing = tools_pb2.ActionTiming(
            queue=Duration(nanos=250_000_000), execution=Duration(seconds=1)
        )
        if request.session_id:
            if request.session_id not in self.sessions:
                return Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
            if "fail" in json.loads(request.arguments_json):
                failed = tools_pb2.RESULT_STATUS_TOOL_ERROR
                result = tools_pb2.ToolResult(
                    status=failed, output="so far", error="ValueError: no"
                )
                return tools_pb2.InvokeResponse(result=result)
            self.sessions[request.session_id] += 1
            steps = self.sessions[request.session_id]
            result = tools_pb2.ToolResult(
                status=_OK, output=str(steps), reward=0.5, done=steps == 3, timing=timing
            )
            return tools_pb2.InvokeResponse(result=result)
        if request.tool != "echo":
            return Refusal(grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")
        arguments = json.loads(request.arguments_json)
        if "fail" in arguments:
            result = tools_pb2.ToolResult(
                status=tools_pb2.RESULT_STATUS_TOOL_ERROR, error="ValueError: no"
            )
        else:
            data = request.arguments_json
            result = tools_pb2.ToolResult(status=_OK, output=data, data_json=data, timing=timing)
        return tools_pb2.InvokeResponse(result=result)

    @answer
    def OpenSession(
        self, request: tools_pb2.OpenSessionRequest
    ) -> tools_pb2.OpenSessionResponse | Refusal:
        if request.tool not in ENVIRONMENTS:
            return Refusal(grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")
        session = tools_pb2.Session(session_id=f"s-{len(self.calls)}", tool=request.tool)
        self.sessions[session.session_id] = 0
        return tools_pb2.OpenSessionResponse(
            session=session, first=tools_pb2.ToolResult(status=_OK, output=request.arguments_json)
        )

    @answer
    def CloseSession(
        self, request: tools_pb2.CloseSessionRequest
    ) -> tools_pb2.CloseSessionResponse | Refusal:
        if self.sessions.pop(request.session_id, None) is None:
            return Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
        return tools_pb2.CloseSessionResponse()
