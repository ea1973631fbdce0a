"""Protobuf messages to core values and back. The only module of this service that knows both."""

import hashlib
from collections.abc import Mapping

from google.protobuf.message import Message
from treadle.rollout.v1 import rollout_pb2 as pb
from treadle_core.buffer import Batch, RolloutState
from treadle_core.groups import DropReason, Group, RolloutSpec, Sample, Verdict

from treadle_rollout.rollouts import BatchRequest, Rollout

STATES = {
    RolloutState.RUNNING: pb.ROLLOUT_STATE_RUNNING,
    RolloutState.FINISHED: pb.ROLLOUT_STATE_FINISHED,
    RolloutState.CANCELLED: pb.ROLLOUT_STATE_CANCELLED,
}
DROP_REASONS = {
    DropReason.GROUP_SETTLED: pb.DROP_REASON_GROUP_SETTLED,
    DropReason.STALE: pb.DROP_REASON_STALE,
    DropReason.FAILED: pb.DROP_REASON_FAILED,
    DropReason.CANCELLED: pb.DROP_REASON_CANCELLED,
}
NO_BOUND = -1  # of max_staleness on the wire


def spec_from(message: pb.RolloutSpec) -> RolloutSpec:
    """A checked spec: 0 keep is all, -1 staleness and 0 tokens are no bound."""
    return RolloutSpec(
        prompt_ids=tuple(message.prompt_ids),
        samples_per_prompt=message.samples_per_prompt,
        keep_per_prompt=message.keep_per_prompt or message.samples_per_prompt,
        max_staleness=None if message.max_staleness == NO_BOUND else message.max_staleness,
        max_total_tokens=message.max_total_tokens or None,
    )


def spec_to(spec: RolloutSpec) -> pb.RolloutSpec:
    """The spec as it is in force: keep_per_prompt is never 0."""
    return pb.RolloutSpec(
        prompt_ids=spec.prompt_ids,
        samples_per_prompt=spec.samples_per_prompt,
        keep_per_prompt=spec.keep_per_prompt,
        max_staleness=NO_BOUND if spec.max_staleness is None else spec.max_staleness,
        max_total_tokens=spec.max_total_tokens or 0,
    )


def rollout_to(rollout: Rollout) -> pb.Rollout:
    """The resource as it stands."""
    buffer = rollout.buffer
    message = pb.Rollout(
        rollout_id=rollout.rollout_id,
        spec=spec_to(buffer.spec),
        state=STATES[buffer.state],
        revision=buffer.revision,
        groups=[_group_to(group) for group in buffer.groups.values()],
        drops=[pb.DropCount(reason=DROP_REASONS[reason], count=count) for reason, count in buffer.drops.items()],
        buffered_trajectories=buffer.buffered,
        taken_trajectories=buffer.taken_total,
    )
    message.created_at.FromNanoseconds(round(rollout.created_at_s * 1e9))
    return message


def _group_to(group: Group) -> pb.GroupStatus:
    return pb.GroupStatus(
        prompt_id=group.prompt_id, received=group.received, kept=len(group.kept), settled=group.settled
    )


def sample_from(trajectory: pb.FinishedTrajectory, oldest_version: int | None) -> Sample:
    """What the buffer needs to know of a checked trajectory."""
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        prompt_id=trajectory.prompt_id,
        sample=trajectory.sample,
        failed=trajectory.failed,
        oldest_version=oldest_version,
        payload_bytes=trajectory.ByteSize(),
    )


def verdict_to(verdict: Verdict) -> pb.SubmitTrajectoryResponse:
    """The answer to a submission."""
    reason = verdict.drop_reason
    return pb.SubmitTrajectoryResponse(
        kept=verdict.kept,
        drop_reason=pb.DROP_REASON_UNSPECIFIED if reason is None else DROP_REASONS[reason],
        group_settled=verdict.group_settled,
    )


def batch_request_from(request: pb.GetBatchRequest) -> BatchRequest:
    """A checked request."""
    return BatchRequest(
        request_id=request.request_id,
        fingerprint=fingerprint_of(request),
        max_groups=request.max_groups,
        weight_version=request.weight_version,
        wait=request.wait,
    )


def fingerprint_of(message: Message) -> str:
    """Equal for equal requests, also after a restart."""
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()[:16]


def payload_from(trajectory: pb.FinishedTrajectory) -> bytes:
    """A trajectory as it is stored."""
    return trajectory.SerializeToString()


def batch_to(batch: Batch, payloads: Mapping[str, bytes]) -> pb.GetBatchResponse:
    """A batch with the stored tokens of its trajectories."""
    response = pb.GetBatchResponse(exhausted=batch.exhausted)
    for prompt_id, trajectory_ids in batch.groups:
        group = response.groups.add(prompt_id=prompt_id)
        for trajectory_id in trajectory_ids:
            group.trajectories.add().ParseFromString(payloads[trajectory_id])
    return response
