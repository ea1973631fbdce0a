"""Specification of a rollout: prompts, samples of each, how they are chosen, and bounds."""

from dataclasses import dataclass
from enum import Enum

from treadle_core.rollouts.group import DualEnd, FirstK, FirstMixed, Rule, ShortestFirst, darts_rule
from treadle_core.rollouts.length_cap import CapPolicy, CutReward


class RuleName(Enum):
    """Name of a rule. The values are stored: do not rename them."""

    FIRST = "first"
    DUAL_END = "dual_end"
    SHORTEST = "shortest"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Selection:
    """Choice of the samples of a group. longest, saturated_at: of DUAL_END; a prompt with
    `saturated_at` samples or more is pruned instead (DARTS §4.3.1), 0 for none. success_at,
    drop_uniform: of MIXED."""

    rule: RuleName = RuleName.FIRST
    longest: int = 0
    saturated_at: int = 0
    success_at: float = 1.0
    drop_uniform: bool = True

    def rule_of(self, keep: int, samples: int) -> Rule:
        """Return the rule of a group with `samples` samples. Raises ValueError for numbers that do
        not fit together."""
        match self.rule:
            case RuleName.FIRST:
                return FirstK(keep)
            case RuleName.SHORTEST:
                return ShortestFirst(keep)
            case RuleName.MIXED:
                return FirstMixed(keep, self.success_at, self.drop_uniform)
            case RuleName.DUAL_END if self.saturated_at:
                return darts_rule(samples, self.saturated_at, keep, self.longest)
            case RuleName.DUAL_END:
                return DualEnd(keep, self.longest)


@dataclass(frozen=True, slots=True)
class Redundancy:
    """Numbers of samples by the variance of lengths (DARTS §4.2). budget: of all prompts together,
    over those kept. most: of one prompt."""

    budget: float
    most: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The length cap of one rollout, in sampled tokens of a trajectory. in_force: it is not the
    ceiling."""

    limit_tokens: int
    soft_tokens: int
    reward: CutReward
    in_force: bool


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Specification of one rollout. None is no bound.

    samples: number of samples to start for each prompt, where these differ. history: name of the
    history that the rollout reads and extends; with redundancy it gives `samples`, with cap it
    gives `cut`. keep_groups: the rollout ends with so many groups, the others are withdrawn.
    max_open_groups: those that may be begun and not yet taken, in the order of the prompts.
    batch_groups: those that a trainer takes for each version of its weights, where the rollout
    keeps a pace (`pacing`). samples_in_flight: of all groups, that may run at a time.
    """

    prompt_ids: tuple[str, ...]
    samples_per_prompt: int
    keep_per_prompt: int  # K, 1..samples_per_prompt
    max_staleness: int | None = None  # weight versions
    max_total_tokens: int | None = None  # sampled tokens of one trajectory
    selection: Selection = Selection()
    samples: tuple[int, ...] = ()
    keep_groups: int | None = None
    max_open_groups: int | None = None
    replace_stale: bool = False
    batch_groups: int | None = None
    samples_in_flight: int | None = None
    history: str = ""
    redundancy: Redundancy | None = None
    cap: CapPolicy | None = None
    cut: Cut | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a spec that no group could satisfy."""
        if not self.prompt_ids or len(set(self.prompt_ids)) != len(self.prompt_ids):
            raise ValueError("prompt_ids must be at least one, and distinct")
        if not 1 <= self.keep_per_prompt <= self.samples_per_prompt:
            raise ValueError("keep_per_prompt must be 1..samples_per_prompt")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError("max_staleness must be >= 0, or None for no bound")
        if self.max_total_tokens is not None and self.max_total_tokens < 1:
            raise ValueError("max_total_tokens must be >= 1, or None for no cap")
        if self.samples and len(self.samples) != len(self.prompt_ids):
            raise ValueError("samples must have one number for each prompt, or none")
        if any(not self.keep_per_prompt <= each for each in self.samples):
            raise ValueError("samples must be keep_per_prompt or more for each prompt")
        if self.keep_groups is not None and not 1 <= self.keep_groups <= len(self.prompt_ids):
            raise ValueError("keep_groups must be 1..the number of prompts, or None for all")
        if self.max_open_groups is not None and self.max_open_groups < 1:
            raise ValueError("max_open_groups must be >= 1, or None for no bound")
        if self.replace_stale and (self.max_staleness is None or self.keep_groups is not None):
            raise ValueError("replace_stale needs max_staleness, and all groups: no keep_groups")
        if self.batch_groups is not None and (
            self.batch_groups < 1 or self.max_staleness is None or self.keep_groups is not None
        ):
            raise ValueError(
                "batch_groups must be >= 1, with max_staleness and all groups: no keep_groups"
            )
        if self.samples_in_flight is not None and (
            self.samples_in_flight < 1 or self.batch_groups is None
        ):
            raise ValueError("samples_in_flight must be >= 1, with batch_groups")
        if (self.redundancy is not None or self.cap is not None) and not self.history:
            raise ValueError("redundancy and cap need history")
        self.selection.rule_of(self.keep_per_prompt, self.samples_per_prompt)

    @property
    def limit_tokens(self) -> int | None:
        """Return the most tokens that a trajectory may sample; None for no bound."""
        bounds = [self.max_total_tokens, self.cut.limit_tokens if self.cut is not None else None]
        return min((each for each in bounds if each is not None), default=None)

    def samples_of(self, index: int) -> int:
        """Return how many samples the prompt at `index` has."""
        return self.samples[index] if self.samples else self.samples_per_prompt
