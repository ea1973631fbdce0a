"""Which step runs first: one interface, five orderings.

An ordering gives each step a float; the larger runs first in an engine's queue, and evicts the smallest of the running
ones that are preemptible. The float is fixed when the step is asked for and changes only with a new prediction: aging
needs no messages, because every step ages at the same rate, so that `work - (now - asked) * rate` orders any two steps
as `work + asked * rate` does at any time. The time stands in the float relative to `epoch_s` (the controller's first
start), which keeps it short.

PROGRESSIVE (Heddle 4.2): predicted remaining TIME, tokens and tool calls together (tools can be the bound), on a log2
scale, so that hysteresis and aging are ratios and fit a toy model and a large one alike.

The baselines, and whose they are:
- ROUND_ROBIN: steps in the order of asking, which is what verl's and slime's engines do with a returning step.
- FCFS: trajectories in the order of opening; a returning step keeps its trajectory's place.
- LEAST_ATTAINED: what Autellix calls program-level attained service (PLAS): whose program has been served least so far,
  its earlier calls together, runs first. Nothing is predicted. Where it differs: Autellix counts seconds of service in
  a few queue levels and demotes a call while it runs; here sampled tokens on a log2 scale stand for the levels and a
  call keeps what it started with. Autellix lifts a call by its ratio of waiting to service; here all age alike.
- SHORTEST_FIRST: shortest predicted remaining tokens first (SRPT), the shortest-job-first policy that Heddle's text
  compares itself with under Autellix's name; it needs the predictor, which Autellix does not have.
"""

import math
from collections.abc import Callable, Mapping

from treadle_core.model import Objective, Ordering, Policy, TrajectoryRecord
from treadle_core.ranking.remaining import remaining_s, remaining_tokens
from treadle_core.tuning import Tuning

# log2 of nothing is no number; a millisecond, or a token, is as little as anything is taken for.
LEAST_WORK_S = 1e-3


class Orderings:
    """Ranks steps by the policy of their trajectory. Pure: the same record gives the same float."""

    def __init__(self, tuning: Tuning, epoch_s: float) -> None:
        self._tuning = tuning
        self._epoch_s = epoch_s
        self._ranks: Mapping[Ordering, Callable[[TrajectoryRecord, float], float]] = {
            Ordering.PROGRESSIVE: self._progressive,
            Ordering.FCFS: self._fcfs,
            Ordering.ROUND_ROBIN: self._round_robin,
            Ordering.SHORTEST_FIRST: self._shortest_first,
            Ordering.LEAST_ATTAINED: self._least_attained,
        }

    def priority(self, record: TrajectoryRecord, token_s: float) -> float:
        """The priority of the trajectory's step asked for at `record.requested_s`, on an engine that takes `token_s` a
        token."""
        return self._ranks[record.policy.ordering](record, token_s)

    def changed(self, policy: Policy, old: float, new: float) -> bool:
        """Whether a priority has moved enough to tell a queue (hysteresis)."""
        return abs(new - old) >= self._threshold(policy)

    def _threshold(self, policy: Policy) -> float:
        if policy.ordering in (Ordering.FCFS, Ordering.ROUND_ROBIN):
            return math.inf  # times of arrival do not change
        if policy.ordering is Ordering.PROGRESSIVE and policy.objective is Objective.DEADLINE:
            return self._tuning.reprioritize_s
        return self._tuning.reprioritize_doublings

    def _aged(self, doublings: float, record: TrajectoryRecord) -> float:
        """Work with aging: who asked earlier stands higher by the doublings that the difference is worth."""
        return doublings - (record.requested_s - self._epoch_s) / self._tuning.aging_doubling_s

    def _progressive(self, record: TrajectoryRecord, token_s: float) -> float:
        left_s = max(remaining_s(record, token_s, self._tuning), LEAST_WORK_S)
        if record.policy.objective is Objective.DEADLINE:
            deadline_s = (
                record.deadline_s
                if record.deadline_s is not None
                else record.opened_s + self._tuning.default_deadline_s
            )
            return left_s - (deadline_s - self._epoch_s)  # minus the slack, but for `now`, which is the same for all
        if record.policy.objective is Objective.MEAN:
            return self._aged(-math.log2(left_s), record)
        return self._aged(math.log2(left_s), record)

    def _fcfs(self, record: TrajectoryRecord, _token_s: float) -> float:
        """Trajectories in the order of opening: a returning step keeps its trajectory's place."""
        return -(record.opened_s - self._epoch_s)

    def _round_robin(self, record: TrajectoryRecord, _token_s: float) -> float:
        """Steps in the order of asking: a returning step goes to the tail, which is what an engine's own FCFS queue
        does."""
        return -(record.requested_s - self._epoch_s)

    def _shortest_first(self, record: TrajectoryRecord, _token_s: float) -> float:
        return self._aged(-math.log2(max(remaining_tokens(record, self._tuning), 1.0)), record)

    def _least_attained(self, record: TrajectoryRecord, _token_s: float) -> float:
        return self._aged(-math.log2(1.0 + record.gen_tokens), record)
