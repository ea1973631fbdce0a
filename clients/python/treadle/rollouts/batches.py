"""Take batches of settled groups from the rollout service, for training.

A batch is streamed in parts, and can be repeated under its id until it is confirmed. Tokens, loss
mask and logprobs of a trajectory are equally long; a trajectory where they are not raises
StreamBroken.
"""

from collections.abc import AsyncIterable
from contextlib import suppress

import grpc

from treadle.connection import Mesh, request_id
from treadle.errors import StreamBroken, TreadleError, error_from
from treadle.rollout.v1 import rollout_pb2
from treadle.rollouts.samples import check_part
from treadle.types import (
    Batch,
    Group,
    TrainingTrajectory,
    VersionSpan,
    duration,
    seconds,
    unpack_ids,
    unpack_logprobs,
)


async def take_batch(
    mesh: Mesh,
    rollout_id: str,
    *,
    max_groups: int,
    weight_version: int,
    wait: bool,
    wait_at_most_s: float,
    batch_id: str,
    part: tuple[int, int],
    timeout_s: float,
) -> Batch:
    """Take a batch as a trainer reads it; see Client.get_batch. Without a batch_id it is confirmed
    once it has arrived."""
    check_part(part)
    if part[1] > 1 and not batch_id:
        raise ValueError(
            "part needs batch_id=...: the name by which the other ranks find the batch"
        )
    request = rollout_pb2.GetBatchRequest(
        request_id=batch_id or request_id(),
        rollout_id=rollout_id,
        max_groups=max_groups,
        weight_version=weight_version,
        wait=wait,
        wait_at_most=duration(wait_at_most_s) if wait_at_most_s else None,
        part=part[0],
        parts=part[1],
    )
    batch = await _until_whole(mesh, request, timeout_s)
    if not batch_id:
        with suppress(TreadleError):  # without it, the service removes the tokens later
            await confirm_batch(mesh, rollout_id, request.request_id, part)
    return batch


async def _until_whole(mesh: Mesh, request: rollout_pb2.GetBatchRequest, timeout_s: float) -> Batch:
    """Read a batch; read a stream that breaks again from its beginning."""
    service = await mesh.rollout()
    backoff = mesh.backoff(timeout_s)
    while True:
        try:
            return await _read_batch(
                service.StreamBatch(request, timeout=max(backoff.remaining_s, 0.001))
            )
        except grpc.aio.AioRpcError as failure:
            error = error_from(failure)
        if not error.retryable:
            raise error
        await backoff.wait(error, error.retry_after_s)


async def confirm_batch(mesh: Mesh, rollout_id: str, batch_id: str, part: tuple[int, int]) -> None:
    """Let the service remove the tokens of a part of a batch, which cannot be repeated
    afterwards."""
    check_part(part)
    confirm = rollout_pb2.ConfirmBatchRequest(
        request_id=request_id(),
        rollout_id=rollout_id,
        batch_request_id=batch_id,
        part=part[0],
        parts=part[1],
    )
    service = await mesh.rollout()
    await mesh.call(service.ConfirmBatch, confirm, mesh.timeouts.cleanup_s)


async def _read_batch(parts: AsyncIterable[rollout_pb2.StreamBatchResponse]) -> Batch:
    groups: dict[str, list[TrainingTrajectory]] = {}
    data, last = bytearray(), rollout_pb2.StreamBatchResponse()
    async for last in parts:
        data += last.data
        if last.trajectory_end:
            message = rollout_pb2.FinishedTrajectory.FromString(bytes(data))
            groups.setdefault(last.prompt_id, []).append(_training(message))
            data.clear()
    if not last.batch_end:
        raise StreamBroken("the batch ended before its last message")
    return Batch(
        tuple(Group(name, tuple(members)) for name, members in groups.items()), last.exhausted
    )


def _training(message: rollout_pb2.FinishedTrajectory) -> TrainingTrajectory:
    tokens, logprobs = (
        unpack_ids(message.tokens.int32_le),
        unpack_logprobs(message.logprobs.float32_le),
    )
    if not len(tokens) == len(logprobs) == len(message.loss_mask):
        lengths = (
            f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(message.loss_mask)} of loss mask"
        )
        raise StreamBroken(f"trajectory {message.trajectory_id} is not whole: {lengths}")
    return TrainingTrajectory(
        trajectory_id=message.trajectory_id,
        prompt_id=message.prompt_id,
        sample=message.sample,
        tokens=tokens,
        loss_mask=list(message.loss_mask),
        logprobs=logprobs,
        version_spans=tuple(
            VersionSpan(s.weight_version, s.start_token, s.end_token) for s in message.version_spans
        ),
        reward=message.reward,
        truncated=message.truncated,
        failed=message.failed,
        turns=message.turns,
        elapsed_s=seconds(message.elapsed),
        unshaped_reward=message.unshaped_reward if message.HasField("unshaped_reward") else None,
    )
