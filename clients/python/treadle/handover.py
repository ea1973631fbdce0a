"""Trajectories on their way to and from the rollout service: conversion between its messages and the client's nouns.

Invariant: tokens, loss mask and logprobs are equally long on both sides; a message where they are not raises
StreamBroken.
"""

from __future__ import annotations

from treadle.common.v1 import tokens_pb2
from treadle.durations import duration, seconds
from treadle.errors import StreamBroken
from treadle.mesh import request_id
from treadle.rollout.v1 import rollout_pb2
from treadle.tokens import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from treadle.trajectory import Trajectory
from treadle.types import Batch, Group, TrainingTrajectory, VersionSpan


def finished_message(trajectory: Trajectory) -> rollout_pb2.FinishedTrajectory:
    """A closed trajectory as SubmitTrajectory takes it; no reward counts as 0, and one that its agent gave up as
    failed.
    """
    closed_s = trajectory.closed_s if trajectory.closed_s is not None else trajectory.opened_s
    return rollout_pb2.FinishedTrajectory(
        trajectory_id=trajectory.trajectory_id,
        prompt_id=trajectory.prompt_id,
        sample=trajectory.sample,
        tokens=tokens_pb2.TokenIds(int32_le=pack_ids(trajectory.tokens)),
        loss_mask=bytes(trajectory.loss_mask),
        logprobs=tokens_pb2.Logprobs(float32_le=pack_logprobs(trajectory.logprobs)),
        version_spans=[
            tokens_pb2.VersionSpan(weight_version=s.weight_version, start_token=s.start_token, end_token=s.end_token)
            for s in trajectory.version_spans
        ],
        reward=trajectory.reward or 0.0,
        truncated=trajectory.outcome == "truncated",
        failed=trajectory.outcome in ("failed", "cancelled"),
        turns=len(trajectory.steps),
        elapsed=duration(closed_s - trajectory.opened_s),
    )


def never_opened_message(prompt_id: str, sample: int) -> rollout_pb2.FinishedTrajectory:
    """Stands for a sample that failed before it had a trajectory, so that its group does not wait for it."""
    trajectory_id = f"unopened-{request_id()}"
    return rollout_pb2.FinishedTrajectory(trajectory_id=trajectory_id, prompt_id=prompt_id, sample=sample, failed=True)


def batch_of(message: rollout_pb2.GetBatchResponse) -> Batch:
    """A batch as a trainer reads it."""
    groups = tuple(Group(g.prompt_id, tuple(_training(t) for t in g.trajectories)) for g in message.groups)
    return Batch(groups, message.exhausted)


def drop_reason_of(reason: rollout_pb2.DropReason.ValueType) -> str:
    """The reason in lower case, e.g. "group_settled"; empty where there is none."""
    if reason == rollout_pb2.DROP_REASON_UNSPECIFIED:
        return ""
    if reason not in rollout_pb2.DropReason.values():
        return str(reason)  # newer than this client
    return rollout_pb2.DropReason.Name(reason).removeprefix("DROP_REASON_").lower()


def _training(message: rollout_pb2.FinishedTrajectory) -> TrainingTrajectory:
    tokens, logprobs = unpack_ids(message.tokens.int32_le), unpack_logprobs(message.logprobs.float32_le)
    if not len(tokens) == len(logprobs) == len(message.loss_mask):
        lengths = f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(message.loss_mask)} of loss mask"
        raise StreamBroken(f"trajectory {message.trajectory_id} is not whole: {lengths}")
    return TrainingTrajectory(
        trajectory_id=message.trajectory_id,
        prompt_id=message.prompt_id,
        sample=message.sample,
        tokens=tokens,
        loss_mask=list(message.loss_mask),
        logprobs=logprobs,
        version_spans=tuple(VersionSpan(s.weight_version, s.start_token, s.end_token) for s in message.version_spans),
        reward=message.reward,
        truncated=message.truncated,
        failed=message.failed,
        turns=message.turns,
        elapsed_s=seconds(message.elapsed),
    )
