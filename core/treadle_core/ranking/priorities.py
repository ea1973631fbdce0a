"""Work that is left of a trajectory, and the priority of its next step under each ordering.

What is left follows from the last prediction and what was sampled since; it is never negative and
never more than the trajectory's cap leaves, as one prediction that is far too long would otherwise
decide every plan.

A priority is a float; the step with the larger one starts first in an engine's queue and may evict
a preemptible step with a smaller one. It is computed when the step is requested and changes only
with a new prediction. Aging needs no messages: all waiting steps age at the same rate, so `work -
(now - requested) * rate` orders any two steps as `work + requested * rate` does at any time. Times
in a priority count from `epoch_s`, the controller's first start, which keeps the numbers short.

- PROGRESSIVE (Heddle 4.2): predicted remaining time, of tokens and tool calls together as either
  can be the bound, on a log2 scale, so that hysteresis and aging are ratios and suit small and
  large models alike. For the makespan it is not the median: the last trajectory is one that might
  have been long, so what is not known is begun early (LATE_Z).
- ROUND_ROBIN: steps in the order of requests, as the engines of verl and slime do with a returning
  step.
- FCFS: trajectories in the order of opening; a returning step keeps its trajectory's place.
- LEAST_ATTAINED (Autellix's program-level attained service, PLAS): the trajectory that has been
  served least starts first. Autellix counts seconds of service in a few queue levels, demotes a
  call while it runs and raises it by its ratio of waiting to service; here sampled tokens on a log2
  scale stand for the levels, and all steps age alike.
- SHORTEST_FIRST: least predicted remaining tokens first (SRPT), which Heddle's text compares itself
  with under Autellix's name; it needs a predictor, which Autellix does not have.
"""

import math
from dataclasses import dataclass, field

from treadle_core.model import (
    DEFAULT_BASE_S,
    EngineSpec,
    Estimate,
    Objective,
    Ordering,
    Policy,
    TrajectoryRecord,
)
from treadle_core.placing.question import MOST_LOG_SIGMA
from treadle_core.tuning import Tuning

# standard deviations from the median to the 90th percentile of a normal distribution
P90_Z = 1.2815515655446004
# Standard deviations above the median at which the makespan ranks. On CPU-sized batches of two
# traces in simulation (16 seeds), 0.8 to 1.3 ended even batches 1 to 4% sooner than the median, and
# skewed ones 0 to 2%.
LATE_Z = 1.0
LEAST_WORK_S = 1e-3  # work below a millisecond ranks as this, since log2 of 0 is no number


def remaining_tokens(record: TrajectoryRecord, tuning: Tuning) -> float:
    """Return the tokens left to sample: the predicted median less what was sampled since, within
    the cap."""
    if record.prediction is None:
        left = tuning.default_remaining_tokens
    else:
        sampled_since = max(0, record.gen_tokens - record.prediction.gen_tokens)
        left = max(
            record.prediction.remaining_tokens.p50 - sampled_since, tuning.least_remaining_tokens
        )
    return min(left, room_tokens(record))


def room_tokens(record: TrajectoryRecord) -> float:
    """Return the tokens that the trajectory's cap leaves; infinite without one."""
    return (
        float(max(0, record.max_total_tokens - record.gen_tokens))
        if record.max_total_tokens
        else math.inf
    )


def log_sigma(record: TrajectoryRecord) -> float:
    """Return the standard deviation of ln(tokens left) by the prediction; 0 without one."""
    return (
        log_deviation(record.prediction.remaining_tokens) if record.prediction is not None else 0.0
    )


def log_deviation(estimate: Estimate) -> float:
    """Return the standard deviation of the logarithm, from the median and the 90th percentile; at
    most MOST_LOG_SIGMA, which plans accept, as a median near 0 beside a long upper quantile would
    give more."""
    if not estimate.p90 > estimate.p50 > 0.0:
        return 0.0
    return min((math.log(estimate.p90) - math.log(estimate.p50)) / P90_Z, MOST_LOG_SIGMA)


def reserve_tokens(record: TrajectoryRecord, mean_observed_tokens: float, tuning: Tuning) -> int:
    """Return the KV tokens that an engine reserves: the present context and a share of its growth
    to the end.

    The growth is the tokens left to sample and those that tools will still answer.
    """
    growth = remaining_tokens(record, tuning) + remaining_observed_tokens(
        record, mean_observed_tokens
    )
    return (record.context_tokens or record.prompt_tokens) + math.ceil(
        tuning.reserve_share * growth
    )


def remaining_s(record: TrajectoryRecord, token_s: float, tuning: Tuning) -> float:
    """Return the seconds left without any waiting: `token_s` a token, and the tool calls of the
    predicted turns."""
    return remaining_tokens(record, tuning) * token_s + remaining_tool_s(record)


def token_s(spec: EngineSpec | None) -> float:
    """Return the seconds an engine takes for a token of one sequence while all its slots decode."""
    if spec is None:
        return DEFAULT_BASE_S
    return spec.decode_curve.base_s + spec.decode_curve.per_sequence_s * spec.slot_limit


def remaining_tool_s(record: TrajectoryRecord) -> float:
    """Return the seconds of tool calls left: as predicted, else those of the turns left, each as
    long as the mean of this trajectory's calls; 0 while no call was seen or turns are not
    predicted."""
    prediction = record.prediction
    if prediction is None:
        return 0.0
    if prediction.remaining_tool_s is not None:
        return prediction.remaining_tool_s.p50
    return (
        prediction.remaining_turns.p50 * record.tool_s
        if prediction.remaining_turns is not None
        else 0.0
    )


def remaining_observed_tokens(record: TrajectoryRecord, mean_observed_tokens: float = 0.0) -> float:
    """Return the tokens of tools' answers left: as predicted, else those of the turns left, each as
    long as this trajectory's were on average; before it had any, as `mean_observed_tokens`, the
    mean over all trajectories."""
    prediction = record.prediction
    if prediction is None:
        return 0.0
    if prediction.remaining_observed_tokens is not None:
        return prediction.remaining_observed_tokens.p50
    turns = prediction.remaining_turns.p50 if prediction.remaining_turns is not None else 0.0
    observed = record.observed_tokens
    a_turn = (
        observed / record.next_turn
        if record.next_turn > 0 and observed > 0
        else mean_observed_tokens
    )
    return max(0.0, turns - 1.0) * a_turn


class Priorities:
    """Priorities by the policy of each trajectory; the same record always gets the same one."""

    def __init__(self, tuning: Tuning, epoch_s: float) -> None:
        self._tuning = tuning
        self._epoch_s = epoch_s

    def priority(self, record: TrajectoryRecord, token_s: float, lower: float = 0.0) -> float:
        """Return the priority of the step requested at `record.requested_s`, on an engine that
        takes `token_s` a token. lower: so many doublings less (`GroupNeeds`), where the priority is
        work on a log2 scale."""
        policy = record.policy
        is_time = policy.objective is Objective.DEADLINE
        if lower and policy.ordering is Ordering.PROGRESSIVE and not is_time:
            return self.priority(record, token_s) - lower
        match record.policy.ordering:
            case Ordering.PROGRESSIVE:
                left_s = remaining_s(record, token_s, self._tuning)
                if record.policy.objective is Objective.MAKESPAN:
                    left_s *= math.exp(LATE_Z * log_sigma(record))
                return self._progressive(record, max(left_s, LEAST_WORK_S))
            case Ordering.FCFS:
                return -(record.opened_s - self._epoch_s)
            case Ordering.ROUND_ROBIN:
                return -(record.requested_s - self._epoch_s)
            case Ordering.SHORTEST_FIRST:
                return self._age(
                    -math.log2(max(remaining_tokens(record, self._tuning), 1.0)), record
                )
            case Ordering.LEAST_ATTAINED:
                return self._age(-math.log2(1.0 + record.gen_tokens), record)

    def must_report(self, policy: Policy, old: float, new: float) -> bool:
        """Return whether a priority has changed by enough to send it to an engine's queue
        (hysteresis)."""
        if policy.ordering in (Ordering.FCFS, Ordering.ROUND_ROBIN):
            return False  # these are times of requests, which do not change
        if policy.ordering is Ordering.PROGRESSIVE and policy.objective is Objective.DEADLINE:
            return abs(new - old) >= self._tuning.reprioritize_s
        return abs(new - old) >= self._tuning.reprioritize_doublings

    def _age(self, doublings: float, record: TrajectoryRecord) -> float:
        """Return the work with aging: the step requested earlier ranks higher by the doublings that
        the difference is worth."""
        return doublings - (record.requested_s - self._epoch_s) / self._tuning.aging_doubling_s

    def _progressive(self, record: TrajectoryRecord, left_s: float) -> float:
        match record.policy.objective:
            case Objective.DEADLINE:  # minus the slack, but for `now`, which is the same for all
                deadline_s = record.deadline_s
                if deadline_s is None:
                    deadline_s = record.opened_s + self._tuning.default_deadline_s
                return left_s - (deadline_s - self._epoch_s)
            case Objective.MEAN:
                return self._age(-math.log2(left_s), record)
            case Objective.MAKESPAN:
                return self._age(math.log2(left_s), record)


@dataclass(slots=True)
class _Group:
    """Open samples of a group that needs `keep` of them: work left, on a log2 scale in quarters,
    tokens sampled, negated, and the sample's number. finished: how many have."""

    keep: int
    finished: int = 0
    open: dict[str, tuple[int, int, int]] = field(default_factory=dict)


class GroupNeeds:
    """Needs of the groups that settle with the first samples that finish. The samples with the
    least work left are needed. The others rank below them: they run if a slot is free, or if a
    needed sample turns out to be long.

    Longest first alone would first run the samples that the group then ends (DARTS §4.3.1). A group
    without an open sample is forgotten.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._groups: dict[tuple[str, str], _Group] = {}

    def note(self, record: TrajectoryRecord, left_s: float) -> None:
        """Note how much work an open trajectory has left."""
        if record.group_keep:
            group = self._groups.setdefault(_group_of(record), _Group(record.group_keep))
            quarters = round(4.0 * math.log2(max(left_s, LEAST_WORK_S)))
            group.open[record.trajectory_id] = (quarters, -record.gen_tokens, record.sample)

    def note_end(self, record: TrajectoryRecord, *, finished: bool) -> None:
        """Note that a trajectory has ended; `finished`: its group may settle with it."""
        group = self._groups.get(_group_of(record))
        if group is not None and group.open.pop(record.trajectory_id, None) is not None:
            group.finished += finished
            if not group.open:
                del self._groups[_group_of(record)]

    def lower(self, record: TrajectoryRecord) -> float:
        """Return how many doublings lower a sample ranks than its work alone would rank it; 0 if
        its group needs it."""
        group = self._groups.get(_group_of(record)) if record.group_keep else None
        if group is None or record.trajectory_id not in group.open:
            return 0.0
        own, places = group.open[record.trajectory_id], sorted(group.open.values())
        needed = max(group.keep - group.finished, 1)
        others = places.index(own) - needed  # that are not needed either, before this one
        if others < 0:
            return 0.0
        above, sigma = 0.25 * (own[0] - places[needed - 1][0]), log_sigma(record)
        if sigma > 0.0:  # by as much as it is likely to be longer
            above *= math.erf(math.log(2.0) * above / (2.0 * sigma))
        tuning = self._tuning
        return above + tuning.surplus_doublings + others * tuning.surplus_step_doublings

    def siblings(self, record: TrajectoryRecord) -> list[str]:
        """Return the other open samples of a group that does not need all."""
        group = self._groups.get(_group_of(record)) if record.group_keep else None
        return [name for name in group.open if name != record.trajectory_id] if group else []


def _group_of(record: TrajectoryRecord) -> tuple[str, str]:
    return record.rollout_id, record.prompt_id
