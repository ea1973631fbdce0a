"""Play the agent of one sample of a rollout to its end, and report the result to the rollout
service."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from treadle.common.v1 import tokens_pb2
from treadle.connection import Mesh, finish, request_id
from treadle.errors import TokensSpent, TreadleError, refused
from treadle.rewards import PendingReward
from treadle.rollout.v1 import rollout_pb2
from treadle.trajectory import TRAJECTORY_CLOSED, Trajectory
from treadle.types import (
    Distribution,
    LengthCap,
    Outcome,
    Shaping,
    ShapingReport,
    TrajectoryResult,
    VersionSpan,
    duration,
    pack_ids,
    pack_logprobs,
    words_of,
)

DROP_REASONS = {0: "", **words_of(rollout_pb2.DropReason)}

LAUNCH_VERSION = "default"

T = TypeVar("T")


def check_part(part: tuple[int, int]) -> None:
    """Raise ValueError unless it is one of so many parts."""
    index, count = part
    if not 0 <= index < count:
        raise ValueError(f"part must be (i, n) with 0 <= i < n, is {part}")


def shaping_fields(shaping: Shaping, most: int) -> dict[str, Any]:
    """Return the fields of RolloutSpec that are not the default. most: samples of a prompt. Raises
    ValueError."""
    rules = {word: number for number, word in words_of(rollout_pb2.SelectionRule).items()}
    if shaping.rule not in rules:
        raise ValueError(f"shaping.rule must be one of {sorted(rules)}, is {shaping.rule!r}")
    selection = rollout_pb2.Selection(
        rule=rollout_pb2.SelectionRule.ValueType(rules[shaping.rule]),
        longest=shaping.longest,
        saturated_samples=shaping.saturated_samples,
        success_reward=shaping.success_reward,
        keep_uniform=shaping.keep_uniform,
    )
    cap, first = shaping.length_cap, rules[Shaping().rule]
    if shaping.budget and shaping.samples:
        raise ValueError("shaping.budget gives each prompt its samples: leave shaping.samples out")
    return {
        "selection": selection if selection.rule != first else None,
        "history": shaping.history,
        "redundancy": rollout_pb2.Redundancy(budget=shaping.budget, most_samples=most)
        if shaping.budget
        else None,
        "length_cap": _cap_message(cap) if cap is not None else None,
        "samples": shaping.samples,
        "keep_groups": shaping.keep_groups,
        "max_open_groups": shaping.max_open_groups,
        "replace_stale": shaping.replace_stale,
        "batch_groups": shaping.batch_groups,
    }


def _cap_message(cap: LengthCap) -> rollout_pb2.LengthCap:
    ways = {word: number for number, word in words_of(rollout_pb2.CutReward).items()}
    if cap.cut_reward not in ways:
        raise ValueError(
            f"length_cap.cut_reward must be one of {sorted(ways)}, is {cap.cut_reward!r}"
        )
    return rollout_pb2.LengthCap(**asdict(cap) | {"cut_reward": ways[cap.cut_reward]})


async def read_shaping(mesh: Mesh, rollout_id: str, history: str) -> ShapingReport:
    """Read the report on shaping; see Client.shaping_report."""
    if bool(rollout_id) == bool(history):
        raise ValueError("give rollout_id or history, and not both")
    service = await mesh.rollout()
    request = rollout_pb2.GetShapingRequest(rollout_id=rollout_id, history=history)
    return _report_of(await mesh.call(service.GetShaping, request, mesh.timeouts.control_s))


def _report_of(answer: rollout_pb2.GetShapingResponse) -> ShapingReport:

    def distribution(message: rollout_pb2.Distribution) -> Distribution:
        return Distribution(tuple(message.sampled), tuple(message.trained), message.distance)

    return ShapingReport(
        length=distribution(answer.length),
        reward=distribution(answer.reward),
        success_rate=distribution(answer.success_rate),
        sampled=answer.sampled,
        trained=answer.trained,
        sampled_tokens=answer.sampled_tokens,
        trained_tokens=answer.trained_tokens,
        kept_fraction=answer.kept_fraction,
        kept_verdict=answer.kept_verdict,
        drops=dict(answer.drops),
        stale_tokens=dict(answer.stale_tokens),
        alarms=tuple(answer.alarms),
        length_cap_tokens=answer.length_cap_tokens,
        length_cap_report=answer.length_cap_report,
    )


def finished_message(result: TrajectoryResult) -> rollout_pb2.FinishedTrajectory:
    """Make the message of a trajectory for SubmitTrajectory. No reward counts as 0; a cancelled
    trajectory as failed.

    A sample without a trajectory is submitted under an id of its own, so that its group does not
    wait for it.
    """
    return rollout_pb2.FinishedTrajectory(
        trajectory_id=result.trajectory_id or f"unopened-{request_id()}",
        prompt_id=result.prompt_id,
        sample=result.sample,
        tokens=tokens_pb2.TokenIds(int32_le=pack_ids(result.tokens)),
        loss_mask=bytes(result.loss_mask),
        logprobs=tokens_pb2.Logprobs(float32_le=pack_logprobs(result.logprobs)),
        version_spans=[tokens_pb2.VersionSpan(**asdict(span)) for span in result.version_spans],
        reward=result.reward or 0.0,
        truncated=result.outcome == "truncated",
        failed=result.outcome in ("failed", "cancelled"),
        turns=len(result.steps),
        elapsed=duration(result.elapsed_s),
    )


async def play_to_end(agent: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return the agent's finished task, whatever it raised. A cancellation of the caller ends the
    agent first."""
    task = asyncio.get_running_loop().create_task(agent)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await finish(asyncio.wait({task}))
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise
    return task


def ending_of(
    trajectory: Trajectory, played: asyncio.Task[Any]
) -> tuple[float | PendingReward | None, Outcome, str]:
    """Return reward, outcome and error line of an agent that has ended."""
    if played.cancelled():
        return None, "cancelled", ""
    error = played.exception()
    if isinstance(error, TokensSpent):
        return None, "truncated", ""
    if is_unwanted(error):
        return None, "cancelled", ""
    if error is not None:
        return None, "failed", " ".join(f"{type(error).__name__}: {error}".split())
    reward = played.result()
    if reward is not None and not isinstance(reward, (int, float, PendingReward)):
        return (
            None,
            "failed",
            f"TypeError: the agent returned {type(reward).__name__}, not a reward",
        )
    return reward, "truncated" if trajectory.tokens_left == 0 else "finished", ""


def is_unwanted(error: BaseException | None) -> bool:
    """Return whether the scheduler has closed the trajectory because its group has settled, which
    ends running steps."""
    if not isinstance(error, TreadleError) or error.reason != TRAJECTORY_CLOSED:
        return False
    return error.metadata.get("state") == "cancelled"


async def await_score(result: TrajectoryResult, pending: PendingReward) -> TrajectoryResult:
    """Return the result with its score. A trajectory that gets none has failed."""
    try:
        scored = await pending.result()
        if scored.score is None:
            what = f"reward {scored.reward_id} is {scored.state}: {scored.error or 'no score'}"
            raise refused("NO_SCORE", what)
    except TreadleError as error:
        return replace(result, outcome="failed", error=result.error or f"reward: {error}")
    return replace(result, reward=scored.score)


def oldest_version_of(spans: Sequence[VersionSpan]) -> int | None:
    """Return the oldest weight version of a trajectory's tokens; None where there are none, or a
    name is not a number. The name of SGLang's launch weights counts as 0, as in the rollout
    service."""
    numbers = [
        "0" if span.weight_version == LAUNCH_VERSION else span.weight_version for span in spans
    ]
    return min(map(int, numbers)) if numbers and all(each.isdecimal() for each in numbers) else None


def submitted_of(rollout: rollout_pb2.Rollout) -> dict[tuple[str, int], TrajectoryResult]:
    """Return what is known of samples that another client has submitted, by prompt and sample."""
    return {
        (group.prompt_id, submitted.sample): TrajectoryResult(
            trajectory_id=submitted.trajectory_id,
            prompt_id=group.prompt_id,
            sample=submitted.sample,
            outcome="failed"
            if submitted.drop_reason == rollout_pb2.DROP_REASON_FAILED
            else "finished",
            kept=submitted.kept,
            drop_reason=DROP_REASONS.get(submitted.drop_reason, str(submitted.drop_reason)),
            submitted_before=True,
        )
        for group in rollout.groups
        for submitted in group.samples
    }


def result_of(trajectory: Trajectory, error: str) -> TrajectoryResult:
    """Make the result of a trajectory before the rollout service has answered."""
    closed_s = trajectory.closed_s if trajectory.closed_s is not None else trajectory.opened_s
    return TrajectoryResult(
        trajectory_id=trajectory.trajectory_id,
        prompt_id=trajectory.prompt_id,
        sample=trajectory.sample,
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        version_spans=tuple(trajectory.version_spans),
        steps=tuple(trajectory.steps),
        spans=tuple(trajectory.spans),
        reward=trajectory.reward,
        outcome=trajectory.outcome or "failed",
        error=error,
        elapsed_s=closed_s - trajectory.opened_s,
    )
