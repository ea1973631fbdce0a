"""Cap on the length of trajectories that follows what successful ones need, and the rewards of
those that it cuts.

The cap aims at a percentile of SUCCESSFUL trajectories and moves to it by a bounded step each
update. Lengths above a cap cannot be seen while it cuts: percentiles of what is left would draw it
down without end. So every `open_every`-th update is followed by a step without a cap, and only
successes of such steps are remembered. From them also follows which share of successes the cap
would cut, the accuracy that it costs. Above `most_cut_share` it opens at once, as it does where a
step with the cap truncates more than `most_truncated_share` of all trajectories.

Off unless a caller gives `CapState.limit_tokens` to its trajectories. The percentile and the three
ways to reward cut trajectories are a public lesson's on long-tail rollouts; the soft penalty is
DAPO's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from treadle_core.rollouts.group import Candidate

ROUNDING = 1e-9  # 1 - 0.95 is a little more than 0.05


class CutReward(Enum):
    """Rule for the reward of a trajectory that reaches the cap or comes near it."""

    ZERO = "zero"  # a truncated one gets no reward: teaches hard prompts to end early
    SOFT = "soft"  # rewards fall linearly to 0 from the soft limit to the cap
    IGNORE = "ignore"  # a truncated one is not trained


@dataclass(frozen=True, slots=True)
class CapPolicy:
    """Rule by which the cap follows successes.

    ceiling_tokens: the limit of a step without a cap, e.g. the context length. floor_tokens: the
    cap never falls below. percentile, soft_percentile: of successful lengths, of the cap and of the
    soft limit. step_share: most that the cap moves in an update, of itself. least_successes:
    remembered before there is a cap. window: successes remembered.
    """

    ceiling_tokens: int
    floor_tokens: int
    percentile: float = 0.98
    soft_percentile: float = 0.95
    step_share: float = 0.1
    least_successes: int = 200
    window: int = 2_000
    open_every: int = 20
    most_cut_share: float = 0.05
    most_truncated_share: float = 0.2
    success_at: float = 1.0
    cut_reward: CutReward = CutReward.SOFT

    def __post_init__(self) -> None:
        """Raise ValueError that names the field that is wrong."""
        if not 1 <= self.floor_tokens <= self.ceiling_tokens:
            raise ValueError(
                f"floor_tokens must be 1 to ceiling_tokens ({self.ceiling_tokens}), is "
                f"{self.floor_tokens}"
            )
        if not 0.0 < self.soft_percentile <= self.percentile < 1.0:
            raise ValueError(
                "percentile and soft_percentile must be 0 < soft_percentile <= percentile < 1, are "
                f"{self.percentile} and {self.soft_percentile}"
            )
        if self.most_cut_share < 1.0 - self.percentile - ROUNDING:
            raise ValueError(
                f"most_cut_share must be at least 1 - percentile ({1.0 - self.percentile:.3g}), "
                f"which the cap cuts by itself; is {self.most_cut_share}"
            )
        for name in ("step_share", "most_truncated_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be above 0 and at most 1, is {getattr(self, name)}")
        if not 1 <= self.least_successes <= self.window:
            raise ValueError(
                f"least_successes must be 1 to window ({self.window}), is {self.least_successes}"
            )
        if self.open_every < 2:
            raise ValueError(
                f"open_every must be at least 2, is {self.open_every}; to have no cap, use none"
            )


class CapReport(NamedTuple):
    """Findings of an update. target_tokens: where the cap is going. cut_share: of the remembered
    successes, those that the next cap would cut. truncated_share: of the step's trajectories.
    opened: why there is no cap next, or empty."""

    limit_tokens: int
    target_tokens: int
    cut_share: float
    truncated_share: float
    opened: str


@dataclass
class CapState:
    """Cap of one rollout; a service can store its fields.

    cap_tokens: the cap, whether or not it is in force. open: the next step has no cap. successes:
    lengths, the newest last. since_open: updates since a step without a cap.
    """

    policy: CapPolicy
    cap_tokens: int = 0
    open: bool = True
    successes: list[int] = field(default_factory=list)
    since_open: int = 0

    def __post_init__(self) -> None:
        """Begin at the ceiling."""
        self.cap_tokens = self.cap_tokens or self.policy.ceiling_tokens

    @property
    def limit_tokens(self) -> int:
        """Return the limit of the next step's trajectories."""
        return self.policy.ceiling_tokens if self.open else self.cap_tokens

    @property
    def soft_limit_tokens(self) -> int:
        """Return where the soft penalty of the next step's rewards begins."""
        if self.open or not self.successes:
            return self.limit_tokens
        return min(int(np.quantile(self.successes, self.policy.soft_percentile)), self.limit_tokens)

    def update(self, candidates: Sequence[Candidate]) -> CapReport:
        """Learn from all trajectories of one step, which had the present limit, and set the limit
        of the next."""
        policy = self.policy
        valid = [each for each in candidates if not each.failed]
        truncated_share = sum(each.truncated for each in valid) / len(valid) if valid else 0.0
        was_open, self.since_open = self.open, self.since_open + 1
        if was_open:
            found = [
                each.length_tokens for each in valid if (each.reward or 0.0) >= policy.success_at
            ]
            self.successes = [*self.successes, *found][-policy.window :]
            self.since_open = 0
        if len(self.successes) < policy.least_successes:
            self.open = True
            few = f"{len(self.successes)} of {policy.least_successes} successes are known"
            return CapReport(self.limit_tokens, self.cap_tokens, 0.0, truncated_share, few)
        lengths = np.array(self.successes)
        target = int(
            np.clip(
                np.quantile(lengths, policy.percentile), policy.floor_tokens, policy.ceiling_tokens
            )
        )
        # Whole tokens, and at least one: a small cap must move too.
        step = max(int(policy.step_share * self.cap_tokens), 1)
        self.cap_tokens += int(np.clip(target - self.cap_tokens, -step, step))
        cut_share = float((lengths > self.cap_tokens).mean())
        opened = ""
        if cut_share > policy.most_cut_share:
            # Successes have grown. A cap that only crept after them would cut them for many steps.
            self.cap_tokens = target
            opened = (
                f"the cap would cut {cut_share:.1%} of successes, more than "
                f"{policy.most_cut_share:.1%}"
            )
        elif not was_open and truncated_share > policy.most_truncated_share:
            opened = (
                f"the cap cut {truncated_share:.1%} of trajectories, more than "
                f"{policy.most_truncated_share:.1%}"
            )
        elif self.since_open >= policy.open_every - 1:
            opened = (
                f"each {policy.open_every}th step has no cap, to see how long successes would be"
            )
        self.open = bool(opened)
        return CapReport(self.limit_tokens, target, cut_share, truncated_share, opened)


def shape_reward(
    how: CutReward, candidate: Candidate, soft_tokens: int, cap_tokens: int
) -> float | None:
    """Return the reward to train with; None: do not train this trajectory, or its reward is not
    known.

    Only rewards above 0 shrink: a penalty stays as it is. soft_tokens, cap_tokens: where the soft
    penalty begins, and where no reward is left.
    """
    reward = candidate.reward
    if reward is None or reward <= 0.0:
        return None if how is CutReward.IGNORE and candidate.truncated else reward
    if how is CutReward.SOFT:
        if candidate.length_tokens >= cap_tokens or candidate.truncated:
            return 0.0
        over = max(candidate.length_tokens - soft_tokens, 0)
        return reward * (1.0 - over / (cap_tokens - soft_tokens)) if over else reward
    if candidate.truncated:
        return None if how is CutReward.IGNORE else 0.0
    return reward
