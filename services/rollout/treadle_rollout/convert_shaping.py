"""Convert the redundancy, cap and selection of a rollout, and the report of what shaping does to
what is trained."""

from treadle.rollout.v1 import rollout_pb2 as pb
from treadle_core.rollouts.bias import BiasGuard, Pair
from treadle_core.rollouts.group import Candidate, Sample
from treadle_core.rollouts.length_cap import CapPolicy, CapReport, CapState, CutReward, shape_reward
from treadle_core.rollouts.spec import Redundancy, RolloutSpec, RuleName, Selection
from treadle_runtime.errors import InvalidArgument
from treadle_runtime.fields import finite, non_negative, number_of, positive, require

RULES = {
    pb.SELECTION_RULE_UNSPECIFIED: RuleName.FIRST,
    **{number_of(rule, pb.SelectionRule): rule for rule in RuleName},
}
CUT_REWARDS = {
    pb.CUT_REWARD_UNSPECIFIED: CutReward.SOFT,
    **{number_of(how, pb.CutReward): how for how in CutReward},
}


def redundancy_from(spec: pb.RolloutSpec, keep: int) -> Redundancy:
    name, given, most = (
        "spec.redundancy",
        spec.redundancy,
        spec.redundancy.most_samples or spec.samples_per_prompt,
    )
    require(not spec.samples, "spec.samples", "must be empty with redundancy, which gives them")
    finite(f"{name}.budget", given.budget)
    require(
        given.budget >= 1,
        f"{name}.budget",
        f"must be 1 or more: samples over those kept, is {given.budget}",
    )
    require(
        keep <= most <= spec.samples_per_prompt,
        f"{name}.most_samples",
        f"must be keep_per_prompt ({keep}) to samples_per_prompt ({spec.samples_per_prompt}), is "
        f"{most}",
    )
    return Redundancy(given.budget, most)


def cap_from(cap: pb.LengthCap) -> CapPolicy:
    name, how = "spec.length_cap", CUT_REWARDS.get(cap.cut_reward)
    if how is None:
        raise InvalidArgument(
            f"{name}.cut_reward", f"is {cap.cut_reward}, which is newer than this service"
        )
    for field in ("percentile", "soft_percentile", "success_reward", "most_cut_share"):
        finite(f"{name}.{field}", getattr(cap, field))
    positive(f"{name}.floor_tokens", cap.floor_tokens)
    default = CapPolicy(ceiling_tokens=1, floor_tokens=1)
    try:
        return CapPolicy(
            ceiling_tokens=cap.ceiling_tokens,
            floor_tokens=cap.floor_tokens,
            percentile=cap.percentile or default.percentile,
            soft_percentile=cap.soft_percentile or default.soft_percentile,
            least_successes=cap.least_successes or default.least_successes,
            most_cut_share=cap.most_cut_share or default.most_cut_share,
            success_at=cap.success_reward or default.success_at,
            cut_reward=how,
        )
    except ValueError as error:
        raise InvalidArgument(name, str(error)) from error


def selection_from(selection: pb.Selection, keep: int) -> Selection:
    rule = RULES.get(selection.rule)
    if rule is None:
        raise InvalidArgument(
            "spec.selection.rule", f"is {selection.rule}, which is newer than this service"
        )
    dual_end = rule is RuleName.DUAL_END
    least = 2 if rule is RuleName.MIXED else 1
    require(
        keep >= least,
        "spec.keep_per_prompt",
        f"must be {least} or more under selection.rule MIXED, is {keep}",
    )
    for name in ("longest", "saturated_samples"):
        value = getattr(selection, name)
        non_negative(f"spec.selection.{name}", value)
        require(
            dual_end or not value,
            f"spec.selection.{name}",
            "is of rule DUAL_END alone: leave it out",
        )
    require(
        selection.longest <= keep, "spec.selection.longest", f"must be 0..keep_per_prompt ({keep})"
    )
    finite("spec.selection.success_reward", selection.success_reward)
    return Selection(
        rule=rule,
        longest=selection.longest,
        saturated_at=selection.saturated_samples,
        success_at=selection.success_reward
        if selection.HasField("success_reward")
        else Selection().success_at,
        drop_uniform=not selection.keep_uniform,
    )


def fill_shaping(message: pb.RolloutSpec, spec: RolloutSpec) -> None:
    """Fill in the settings of shaping that are not the default, as they are in force."""
    chosen = spec.selection
    if spec.redundancy is not None:
        message.redundancy.budget, message.redundancy.most_samples = (
            spec.redundancy.budget,
            spec.redundancy.most,
        )
    if spec.cap is not None:
        message.length_cap.CopyFrom(_cap_to(spec.cap))
    if chosen != Selection():
        message.selection.rule = number_of(chosen.rule, pb.SelectionRule)
        message.selection.longest, message.selection.saturated_samples = (
            chosen.longest,
            chosen.saturated_at,
        )
        message.selection.success_reward, message.selection.keep_uniform = (
            chosen.success_at,
            not chosen.drop_uniform,
        )


def _cap_to(cap: CapPolicy) -> pb.LengthCap:
    return pb.LengthCap(
        ceiling_tokens=cap.ceiling_tokens,
        floor_tokens=cap.floor_tokens,
        percentile=cap.percentile,
        soft_percentile=cap.soft_percentile,
        cut_reward=number_of(cap.cut_reward, pb.CutReward),
        success_reward=cap.success_at,
        most_cut_share=cap.most_cut_share,
        least_successes=cap.least_successes,
    )


def shaped(
    trajectory: pb.FinishedTrajectory, sample: Sample, spec: RolloutSpec
) -> pb.FinishedTrajectory:
    """Return the trajectory as it is trained: with the reward that the length cap leaves."""
    cut = spec.cut
    if cut is None or not cut.in_force:
        return trajectory
    candidate = Candidate(
        sample.trajectory_id, sample.length_tokens, sample.reward, sample.truncated
    )
    reward = shape_reward(cut.reward, candidate, cut.soft_tokens, cut.limit_tokens)
    if reward is None or reward == trajectory.reward:
        return trajectory
    trained = pb.FinishedTrajectory()
    trained.CopyFrom(trajectory)
    trained.unshaped_reward, trained.reward = trajectory.reward, reward
    return trained


def shaping_to(
    guard: BiasGuard, cap: CapState | None = None, report: CapReport | None = None
) -> pb.GetShapingResponse:
    """Return the counts of a guard, and of a history the cap of its next rollout."""
    kept = guard.kept
    response = pb.GetShapingResponse(
        length=_distribution(guard.length),
        reward=_distribution(guard.reward),
        success_rate=_distribution(guard.rate),
        sampled=int(guard.length.sampled.total),
        trained=int(guard.length.trained.total),
        sampled_tokens=guard.sampled_tokens,
        trained_tokens=guard.trained_tokens,
        kept_fraction=kept.value,
        kept_verdict=kept.verdict,
        drops=guard.drops,
        stale_tokens=guard.stale_tokens,
        alarms=guard.alarms(),
    )
    if cap is not None and report is not None:
        response.length_cap_tokens = cap.limit_tokens
        share = f"the cap would cut {report.cut_share:.1%} of successes"
        response.length_cap_report = (
            report.opened or f"{share}, and cut {report.truncated_share:.1%} of trajectories"
        )
    return response


def _distribution(pair: Pair) -> pb.Distribution:
    return pb.Distribution(**pair.quantiles(), distance=pair.distance)
