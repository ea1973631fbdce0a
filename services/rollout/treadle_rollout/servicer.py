"""Serve RolloutService: check the request, convert it, ask the rollout, convert the answer."""

import uuid
from collections.abc import AsyncIterator

import grpc.aio
from treadle.rollout.v1 import rollout_pb2 as pb
from treadle.rollout.v1 import rollout_pb2_grpc
from treadle_core.rollouts.buffer import DropReason, GroupTooLargeError
from treadle_runtime.errors import identifier
from treadle_runtime.idempotency import RequestRecords, answered_once

from treadle_rollout import convert
from treadle_rollout.rollouts import Rollout, Rollouts

Context = grpc.aio.ServicerContext[object, object]

# What a batch needs beside its trajectories: prompt ids, lengths, flags. 64 KiB are 400 groups of 128-character ids.
BATCH_FRAME_BYTES = 64 * 1024


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Owns nothing: state is in `rollouts`."""

    def __init__(self, rollouts: Rollouts, records: RequestRecords, *, max_message_bytes: int) -> None:
        self._rollouts = rollouts
        self.records = records
        self._batch_bytes = max(1, max_message_bytes - BATCH_FRAME_BYTES)

    @answered_once
    async def CreateRollout(self, request: pb.CreateRolloutRequest, context: Context) -> pb.CreateRolloutResponse:
        # Derived, not drawn: a repeat of a request whose answer was not recorded must find what it created.
        minted = f"r-{uuid.uuid5(uuid.NAMESPACE_OID, request.request_id).hex}"
        rollout_id = identifier("rollout_id", request.rollout_id or minted)
        rollout = await self._rollouts.create(rollout_id, convert.spec_from(request.spec), request.request_id)
        return pb.CreateRolloutResponse(rollout=convert.rollout_to(rollout))

    async def GetRollout(self, request: pb.GetRolloutRequest, context: Context) -> pb.GetRolloutResponse:
        return pb.GetRolloutResponse(rollout=convert.rollout_to(await self._find(request.rollout_id)))

    async def WatchRollout(
        self, request: pb.WatchRolloutRequest, context: Context
    ) -> AsyncIterator[pb.WatchRolloutResponse]:
        """The present state, then each settled group, batch and end of the rollout.

        A slow reader sees the newest only.
        """
        rollout = await self._find(request.rollout_id)
        seen: object = None
        while True:
            changed, buffer = rollout.changed, rollout.buffer
            news = (buffer.state, buffer.settled_total, buffer.taken_total, buffer.drops[DropReason.STALE])
            over = buffer.over  # at the same moment: the state moves on while we send
            if news != seen:
                seen = news
                yield pb.WatchRolloutResponse(rollout=convert.rollout_to(rollout))
            if over:
                return
            await rollout.wait(changed)

    @answered_once
    async def CancelRollout(self, request: pb.CancelRolloutRequest, context: Context) -> pb.CancelRolloutResponse:
        """Ends a rollout; one that is over stays as it is."""
        rollout = await self._find(request.rollout_id)
        await rollout.cancel()
        return pb.CancelRolloutResponse(rollout=convert.rollout_to(rollout))

    @answered_once
    async def SubmitTrajectory(
        self, request: pb.SubmitTrajectoryRequest, context: Context
    ) -> pb.SubmitTrajectoryResponse:
        """The verdict on a finished trajectory."""
        rollout = await self._find(request.rollout_id)
        sample = convert.sample_from(request.trajectory, rollout.buffer)
        group = rollout.buffer.groups[sample.prompt_id]
        needed = group.payload_bytes + sample.payload_bytes
        counts = sample.trajectory_id not in rollout.buffer.samples and not group.settled
        if counts and needed > self._batch_bytes:  # refused here, where the sender can still do something about it
            raise GroupTooLargeError(sample.prompt_id, needed, self._batch_bytes)
        return convert.verdict_to(await rollout.submit(sample, request.trajectory.SerializeToString()))

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        """Whole groups for training.

        Its record is the rollout's own log: a batch can be larger than a request record may be.
        """
        asked = convert.batch_request_from(request)
        rollout = await self._find(request.rollout_id)
        batch = await rollout.take(asked, self._batch_bytes)
        return convert.batch_to(batch, await rollout.payloads_of(batch))

    async def _find(self, rollout_id: str) -> Rollout:
        return await self._rollouts.find(identifier("rollout_id", rollout_id))
