"""Finished trajectories and rollout calls for tests of the rollout service."""

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
from treadle.common.v1.tokens_pb2 import Logprobs, TokenIds, VersionSpan
from treadle.rollout.v1 import rollout_pb2 as pb
from treadle.rollout.v1 import rollout_pb2_grpc
from treadle_rollout.config import DEFAULT_TOKEN_STREAM_BYTES, RolloutSettings
from treadle_rollout.wire import wire
from treadle_runtime.config import DEFAULT_MAX_MESSAGE_BYTES
from treadle_runtime.server import serving

CALL_S = 30.0  # deadline of a call in a test; long enough for a busy machine
PROMPT_TOKENS = 3


def finished(
    trajectory_id: str,
    prompt_id: str = "p0",
    sample: int = 0,
    *,
    sampled: int = 4,
    versions: Sequence[str] = ("0",),
) -> pb.FinishedTrajectory:
    """Three prompt tokens, then `sampled` tokens shared among `versions` in equal spans."""
    tokens = array("i", range(PROMPT_TOKENS + sampled))
    logprobs = array("f", [0.0] * PROMPT_TOKENS + [-0.5] * sampled)
    bounds = [PROMPT_TOKENS + sampled * i // len(versions) for i in range(len(versions) + 1)]
    return pb.FinishedTrajectory(
        trajectory_id=trajectory_id,
        prompt_id=prompt_id,
        sample=sample,
        tokens=TokenIds(int32_le=tokens.tobytes()),
        loss_mask=bytes([0] * PROMPT_TOKENS + [1] * sampled),
        logprobs=Logprobs(float32_le=logprobs.tobytes()),
        version_spans=[
            VersionSpan(weight_version=version, start_token=bounds[i], end_token=bounds[i + 1])
            for i, version in enumerate(versions)
        ],
        reward=1.0,
        turns=1,
    )


class RolloutCalls:
    """One rollout as a trainer and its workers see it. Request ids are the callers' to give where
    they matter."""

    def __init__(self, channel: grpc.aio.Channel, rollout_id: str = "r", address: str = "") -> None:
        self.channel, self.address = channel, address
        self.stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        self.rollout_id = rollout_id

    async def create(
        self,
        prompts: int = 1,
        samples: int = 1,
        keep: int = 0,
        staleness: int = -1,
        request_id: str = "create",
    ) -> pb.Rollout:
        """Prompts p0, p1, …"""
        spec = pb.RolloutSpec(
            samples_per_prompt=samples,
            keep_per_prompt=keep,
            max_staleness=staleness,
            prompt_ids=[f"p{index}" for index in range(prompts)],
        )
        request = pb.CreateRolloutRequest(
            request_id=request_id, rollout_id=self.rollout_id, spec=spec
        )
        return (await self.stub.CreateRollout(request, timeout=CALL_S)).rollout

    async def get(self) -> pb.Rollout:
        """The rollout."""
        return (
            await self.stub.GetRollout(
                pb.GetRolloutRequest(rollout_id=self.rollout_id), timeout=CALL_S
            )
        ).rollout

    async def submit(
        self, trajectory: pb.FinishedTrajectory, request_id: str = ""
    ) -> pb.SubmitTrajectoryResponse:
        """The verdict."""
        request = pb.SubmitTrajectoryRequest(
            request_id=request_id or f"submit-{trajectory.trajectory_id}",
            rollout_id=self.rollout_id,
            trajectory=trajectory,
        )
        return await self.stub.SubmitTrajectory(request, timeout=CALL_S)

    def request(
        self, request_id: str, max_groups: int = 1, *, version: int = 0, wait: bool = False
    ) -> pb.GetBatchRequest:
        """A request for a batch."""
        return pb.GetBatchRequest(
            request_id=request_id,
            rollout_id=self.rollout_id,
            max_groups=max_groups,
            weight_version=version,
            wait=wait,
        )

    async def batch(
        self,
        request_id: str,
        max_groups: int = 1,
        *,
        version: int = 0,
        wait: bool = False,
        timeout_s: float = CALL_S,
    ) -> pb.GetBatchResponse:
        """A batch."""
        request = self.request(request_id, max_groups, version=version, wait=wait)
        return await self.stub.GetBatch(request, timeout=timeout_s)

    async def stream(
        self, request_id: str, max_groups: int = 1, *, version: int = 0, wait: bool = False
    ) -> pb.GetBatchResponse:
        """A streamed batch, put together; every message of it fits gRPC's default limit."""
        request = self.request(request_id, max_groups, version=version, wait=wait)
        batch, data, part = pb.GetBatchResponse(), b"", pb.StreamBatchResponse()
        async for part in self.stub.StreamBatch(request, timeout=CALL_S):
            assert part.ByteSize() < 4 * 1024 * 1024
            data += part.data
            if part.trajectory_end:
                if not batch.groups or batch.groups[-1].prompt_id != part.prompt_id:
                    batch.groups.add(prompt_id=part.prompt_id)
                trajectory = batch.groups[-1].trajectories.add()
                trajectory.ParseFromString(data)
                assert trajectory.trajectory_id == part.trajectory_id
                data = b""
        assert part.batch_end and not data
        batch.exhausted = part.exhausted
        return batch

    async def confirm(self, batch_request_id: str) -> None:
        """Say that the batch of a request has arrived."""
        request = pb.ConfirmBatchRequest(
            request_id=f"confirm-{batch_request_id}",
            rollout_id=self.rollout_id,
            batch_request_id=batch_request_id,
        )
        await self.stub.ConfirmBatch(request, timeout=CALL_S)


def members(batch: pb.GetBatchResponse) -> list[list[str]]:
    """The trajectory ids of a batch, by group."""
    return [
        [trajectory.trajectory_id for trajectory in group.trajectories] for group in batch.groups
    ]


@asynccontextmanager
async def rollout_service(
    nats_url: str,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    token_stream_bytes: int = DEFAULT_TOKEN_STREAM_BYTES,
) -> AsyncIterator[RolloutCalls]:
    """The service in this process, by a channel that takes large batches."""
    config = RolloutSettings(
        listen="127.0.0.1:0",
        nats_url=nats_url,
        drain_grace_s=1.0,
        max_message_bytes=max_message_bytes,
        token_stream_bytes=token_stream_bytes,
    )
    async with (
        serving(config, wire) as served,
        grpc.aio.insecure_channel(
            served.address, options=[("grpc.max_receive_message_length", -1)]
        ) as channel,
    ):
        yield RolloutCalls(channel, address=served.address)
