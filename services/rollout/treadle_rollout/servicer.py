"""Serve RolloutService: check the request, convert it, call the rollout, convert the answer."""

import time
from collections.abc import AsyncIterator

import grpc.aio
import structlog
from treadle.rollout.v1 import rollout_pb2 as pb
from treadle.rollout.v1 import rollout_pb2_grpc
from treadle_core.rollouts.group import DropReason
from treadle_core.rollouts.history import bias_of
from treadle_runtime.errors import FailedPrecondition, NotFound
from treadle_runtime.fields import identifier, minted, non_negative, require
from treadle_runtime.idempotency import RequestRecords, answered_once

from treadle_rollout import convert, convert_shaping
from treadle_rollout.metrics import Meters
from treadle_rollout.rollouts import Rollout, Rollouts

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[object, object]

# Bytes that a batch needs beside its trajectories: prompt ids, lengths, flags. 64 KiB are 400
# groups of 128-character ids.
BATCH_FRAME_BYTES = 64 * 1024


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Servicer of RolloutService, without state: that is in `rollouts`."""

    def __init__(
        self, rollouts: Rollouts, records: RequestRecords, meters: Meters, *, max_message_bytes: int
    ) -> None:
        self._rollouts = rollouts
        self._meters = meters
        self.records = records
        self._batch_bytes = max(1, max_message_bytes - BATCH_FRAME_BYTES)

    @answered_once
    async def CreateRollout(
        self, request: pb.CreateRolloutRequest, context: Context
    ) -> pb.CreateRolloutResponse:
        # The id is derived, not random: a repeat of a request whose answer was not recorded must
        # find what it created.
        rollout_id = identifier("rollout_id", request.rollout_id or minted("r", request.request_id))
        rollout = await self._rollouts.create(
            rollout_id, convert.spec_from(request.spec), request.request_id
        )
        return pb.CreateRolloutResponse(rollout=convert.rollout_to(rollout))

    async def GetRollout(
        self, request: pb.GetRolloutRequest, context: Context
    ) -> pb.GetRolloutResponse:
        return pb.GetRolloutResponse(
            rollout=convert.rollout_with_samples(await self._find(request.rollout_id))
        )

    async def WatchRollout(
        self, request: pb.WatchRolloutRequest, context: Context
    ) -> AsyncIterator[pb.WatchRolloutResponse]:
        """Send the whole state, then what changed by each settled group, batch and end of the
        rollout.

        A slow reader gets all changes since its last message in one.
        """
        rollout = await self._find(request.rollout_id)
        seen: object = None
        sent_revision: int | None = None
        while True:
            changed, buffer = rollout.changed, rollout.buffer
            news = (
                *(
                    buffer.state,
                    buffer.settlements,
                    buffer.taken_total,
                    buffer.drops[DropReason.STALE],
                ),
                *(buffer.newest_version, buffer.groups_admitted),
            )
            over = buffer.over  # read at the same moment: the state changes while we send
            if news != seen:
                seen = news
                message = convert.watch_to(rollout, sent_revision)
                sent_revision = buffer.revision
                yield message
            if over:
                return
            await rollout.wait(changed)

    @answered_once
    async def CancelRollout(
        self, request: pb.CancelRolloutRequest, context: Context
    ) -> pb.CancelRolloutResponse:
        """End a rollout; one that is over stays as it is."""
        rollout = await self._find(request.rollout_id)
        await rollout.cancel()
        return pb.CancelRolloutResponse(rollout=convert.rollout_to(rollout))

    @answered_once
    async def SubmitTrajectory(
        self, request: pb.SubmitTrajectoryRequest, context: Context
    ) -> pb.SubmitTrajectoryResponse:
        """Return the verdict on a finished trajectory."""
        rollout = await self._find(request.rollout_id)
        sample = convert.sample_from(request.trajectory, rollout.buffer)
        began_s = time.monotonic()
        trained = convert_shaping.shaped(request.trajectory, sample, rollout.buffer.spec)
        verdict = await rollout.submit(sample, trained.SerializeToString())
        answer = "kept" if verdict.drop_reason is None else verdict.drop_reason.name.lower()
        self._meters.record_submission(time.monotonic() - began_s, answer)
        if rollout.finished_by == sample.trajectory_id:
            self._meters.record_last_sample(rollout)
            self._judge(rollout)
        return convert.verdict_to(verdict)

    def _judge(self, rollout: Rollout) -> None:
        """Measure what shaping did in a rollout that has finished, and warn where it starves a kind
        of samples."""
        guard = bias_of(rollout.buffer)
        self._meters.record_kept_fraction(guard.kept.value)
        for alarm in guard.alarms():
            log.warning(
                "shaping changes what is trained", rollout_id=rollout.rollout_id, alarm=alarm
            )

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        """Return whole groups for training, in one message.

        Its record is the rollout's own log: a batch can be larger than a request record may be.
        """
        rollout = await self._find(request.rollout_id)
        asked = convert.batch_request_from(request, rollout.buffer.spec)
        batch = await rollout.take(asked, self._batch_bytes)
        size_bytes = rollout.buffer.bytes_of(batch)
        if size_bytes > self._batch_bytes:  # StreamBatch took it
            raise FailedPrecondition(
                "BATCH_TOO_LARGE",
                f"the batch has {size_bytes} bytes, a message may have {self._batch_bytes}: call "
                "StreamBatch with the same request_id",
            )
        self._meters.record_batch()
        return convert.batch_to(batch, await rollout.payloads_of(batch))

    async def StreamBatch(
        self, request: pb.GetBatchRequest, context: Context
    ) -> AsyncIterator[pb.StreamBatchResponse]:
        """Send whole groups for training in parts, of which one at a time is in memory."""
        rollout = await self._find(request.rollout_id)
        asked = convert.batch_request_from(request, rollout.buffer.spec)
        batch = await rollout.take(asked)
        self._meters.record_batch()
        for prompt_id, trajectory_ids in batch.groups:
            for trajectory_id in trajectory_ids:
                async for data, last in rollout.chunks_of(trajectory_id):
                    yield pb.StreamBatchResponse(
                        prompt_id=prompt_id,
                        trajectory_id=trajectory_id,
                        data=data,
                        trajectory_end=last,
                    )
        yield pb.StreamBatchResponse(batch_end=True, exhausted=batch.exhausted)

    @answered_once
    async def ConfirmBatch(
        self, request: pb.ConfirmBatchRequest, context: Context
    ) -> pb.ConfirmBatchResponse:
        """Free the room of a batch that has arrived."""
        batch_id = identifier("batch_request_id", request.batch_request_id)
        part, parts = convert.part_from(request)
        await (await self._find(request.rollout_id)).confirm(batch_id, part, parts)
        return pb.ConfirmBatchResponse()

    async def PushTokens(
        self, request: pb.PushTokensRequest, context: Context
    ) -> pb.PushTokensResponse:
        """Take tokens of running trajectories; no record is needed, as a repeat changes nothing."""
        rollout = await self._find(request.rollout_id)
        next_token, wanted = rollout.running.push(
            convert.stretch_from(request.chunk, rollout.buffer)
        )
        return pb.PushTokensResponse(next_token=next_token, wanted=wanted)

    async def StreamTokens(
        self, request: pb.StreamTokensRequest, context: Context
    ) -> AsyncIterator[pb.StreamTokensResponse]:
        """Send tokens of running trajectories, until the rollout is over."""
        non_negative("min_tokens", request.min_tokens)
        part, parts = convert.part_from(request)
        rollout = await self._find(request.rollout_id)
        prompt_ids = rollout.buffer.spec.prompt_ids[part::parts]
        async for event in rollout.running.read(max(request.min_tokens, 1), prompt_ids):
            yield convert.event_to(event)

    async def GetShaping(
        self, request: pb.GetShapingRequest, context: Context
    ) -> pb.GetShapingResponse:
        """Return what shaping does to what is trained."""
        one = bool(request.rollout_id) != bool(request.history)
        require(one, "rollout_id", "give it or `history`, and not both")
        if request.rollout_id:
            return convert_shaping.shaping_to(
                bias_of((await self._find(request.rollout_id)).buffer)
            )
        history = await self._rollouts.fold(identifier("history", request.history))
        if not history.folded:
            what = f"no rollout of history {request.history} is over yet"
            raise NotFound("HISTORY_NOT_FOUND", what, history=request.history)
        return convert_shaping.shaping_to(history.bias, history.cap, history.cap_report)

    async def _find(self, rollout_id: str) -> Rollout:
        return await self._rollouts.find(identifier("rollout_id", rollout_id))
