"""Estimates of what is left of a trajectory, as quantiles of tokens and turns, from siblings and
earlier trajectories.

An estimate depends on the evidence and the question alone; 0 <= p10 <= p50 <= p90, and remaining
tokens never exceed what the trajectory's cap leaves. A trajectory that was cut counts as longer
than it was, a running sibling as longer than it is.

Each level is shrunk to the one below it (`evidence.posterior`), so that few observations bend an
estimate and many determine it: siblings of the group <- earlier trajectories of the prompt <-
trajectories of all prompts <- a stated prior. One ended trajectory is enough for a level to answer.
A learned model (Heddle §4.1) is preferred to these.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from treadle_core.compiled import Floats
from treadle_core.model import Estimate
from treadle_core.ranking.evidence import (
    TOKEN_KNOTS,
    TURN_KNOTS,
    Ended,
    Evidence,
    Group,
    GroupKey,
    Observed,
    Running,
    ToolUse,
    count_totals,
    log_moments,
    lognormal,
    posterior,
    remaining_quantiles,
)
from treadle_core.refusals import CoreError

# How many observations the level below counts as. Chosen on 11,322 tool-using runs (74 tasks, 39
# models): 1 to 4 for siblings and 8 to 20 for all change the pinball loss by about 1%, and 2 for
# all costs 2% while little is known. No prompt occurs twice in the runs, so the weight for prompts
# is a choice.
SIBLINGS_WEIGHT = 4.0  # a prompt's history against its group, which shares the policy too
# all prompts against one, whose share of the variance of lengths is from a tenth to three quarters
PROMPT_WEIGHT = 4.0
ALL_WEIGHT = 8.0  # the prior against all trajectories: negligible after a few groups

# Turns that the means of tools of the level below count as: tool times of one prompt vary less than
# its lengths.
USE_WEIGHT_TURNS = 8.0

# The prior: log-normal totals, in the middle of the published agentic workloads and wide, so that a
# few observations bend it. Trajectories that have ended also move its median and its spread, as
# those of PRIOR_WEIGHT observations: it is the estimate of a trajectory that is longer than all
# that were seen, whatever a workload's scale.
PRIOR_WEIGHT = 4.0
PRIOR_MEDIAN_TOKENS = 1_000.0
PRIOR_SIGMA_TOKENS = 1.2
PRIOR_MEDIAN_TURNS = 4.0
PRIOR_SIGMA_TURNS = 0.9
PRIOR_VERSION = "prior-1"

FIT_STEP = 0.02  # of the prior's logs: finer than any prediction
MOST_FITS = 64

MOST_CURVES = 1_024  # groups whose curves are kept, 13 kB each


class InvalidProgressError(CoreError):
    """A question with a negative count."""


class Source(enum.IntEnum):
    """Estimator that answered a question."""

    PRIOR = 1
    HISTORY = 2
    SIBLINGS = 3
    MODEL = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """Known facts of a trajectory after `turn` steps. Raises InvalidProgressError."""

    trajectory_id: str
    prompt_id: str
    turn: int = 0
    gen_tokens: int = 0
    context_tokens: int = 0
    prompt_tokens: int = 0
    max_total_tokens: int = 0  # cap on gen_tokens; 0 for none
    tool_s: float = 0.0  # of its tool calls so far

    def __post_init__(self) -> None:
        for name in (
            "turn",
            "gen_tokens",
            "context_tokens",
            "prompt_tokens",
            "max_total_tokens",
            "tool_s",
        ):
            if getattr(self, name) < 0:
                raise InvalidProgressError(name, f"must be >= 0, is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class TurnUse:
    """Mean use of a turn's tools: seconds, and tokens of the answer; 0 before anything is known."""

    tool_s: float = 0.0
    observed_tokens: float = 0.0

    def update(self, weight: float, seen: ToolUse) -> TurnUse:
        """Return the means after these sums, with the present means counting as `weight` turns."""
        turns = weight + seen.turns
        if turns <= 0.0:
            return self
        return TurnUse(
            (weight * self.tool_s + seen.tool_s) / turns,
            (weight * self.observed_tokens + seen.observed_tokens) / turns,
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of what remains, as quantiles. `model_version` names the evidence behind it, e.g.
    siblings-7. Its figures of tools are those of the turns left, each with what a turn's tools take
    on average."""

    remaining_tokens: Estimate
    remaining_turns: Estimate
    source: Source
    model_version: str
    turn_use: TurnUse = TurnUse()

    @property
    def remaining_tool_s(self) -> Estimate:
        """Return the seconds of tool calls that remain."""
        return self._of_turns(self.turn_use.tool_s)

    @property
    def remaining_observed_tokens(self) -> Estimate:
        """Return the tokens of tools' answers that remain."""
        return self._of_turns(self.turn_use.observed_tokens)

    def _of_turns(self, a_turn: float) -> Estimate:
        turns = self.remaining_turns
        return Estimate(turns.p10 * a_turn, turns.p50 * a_turn, turns.p90 * a_turn)


@dataclass(frozen=True, slots=True)
class Curves:
    """Survival curves P(total > t) of tokens and of turns, on TOKEN_KNOTS and TURN_KNOTS."""

    tokens: Floats
    turns: Floats

    def update(self, weight: float, tokens: Observed, turns: Observed) -> Curves:
        """Return the curves after observations, with these as the base that counts as `weight`
        observations."""
        return Curves(
            posterior(TOKEN_KNOTS, self.tokens, weight, tokens),
            posterior(TURN_KNOTS, self.turns, weight, turns),
        )

    def update_by(
        self, weight: float, ended: Collection[Ended], running: Collection[Running] = ()
    ) -> Curves:
        """Return the curves after observing trajectories, as `update`."""
        whole = [each for each in ended if each.own_end]
        cut: list[Ended | Running] = [*(each for each in ended if not each.own_end), *running]
        return self.update(
            weight,
            count_totals([each.gen_tokens for each in whole], [each.gen_tokens for each in cut]),
            count_totals([each.turns for each in whole], [each.turns for each in cut]),
        )

    def forecast(self, progress: Progress, source: Source, version: str) -> Forecast:
        """Return what remains beyond `progress`, within its cap."""
        tokens = np.array(remaining_quantiles(TOKEN_KNOTS, self.tokens, progress.gen_tokens))
        if progress.max_total_tokens:
            tokens = np.minimum(tokens, max(0, progress.max_total_tokens - progress.gen_tokens))
        turns = remaining_quantiles(TURN_KNOTS, self.turns, progress.turn)
        return Forecast(Estimate(*tokens.tolist()), Estimate(*turns), source, version)


class LogNormal:
    """Log-normal totals: median in tokens or turns, sigma of the natural log; both > 0."""

    def __init__(self, knots: Floats, median: float, sigma: float) -> None:
        self._knots = knots
        self._mean, self._variance = math.log(median), sigma * sigma
        self._curves: OrderedDict[tuple[int, int], Floats] = OrderedDict()

    def fit(self, seen: Observed) -> Floats:
        """Return the log-normal curve after these totals; without any, the stated one."""
        count, mean, variance = log_moments(seen)
        weight = PRIOR_WEIGHT + count
        # Steps of 2% in the median and of 0.02 in sigma, so that most curves are at hand.
        steps = (
            round((PRIOR_WEIGHT * self._mean + count * mean) / weight / FIT_STEP),
            max(
                round(
                    math.sqrt((PRIOR_WEIGHT * self._variance + count * variance) / weight)
                    / FIT_STEP
                ),
                1,
            ),
        )
        curve = self._curves.get(steps)
        if curve is None:
            curve = self._curves[steps] = lognormal(
                self._knots, math.exp(steps[0] * FIT_STEP), steps[1] * FIT_STEP
            )
            if len(self._curves) > MOST_FITS:
                self._curves.popitem(last=False)
        return curve


class Prior:
    """Stated default: log-normal totals, which observed totals move (`fit`). Medians in tokens and
    turns, sigmas of the natural log; all > 0."""

    def __init__(
        self,
        median_tokens: float = PRIOR_MEDIAN_TOKENS,
        sigma_tokens: float = PRIOR_SIGMA_TOKENS,
        median_turns: float = PRIOR_MEDIAN_TURNS,
        sigma_turns: float = PRIOR_SIGMA_TURNS,
    ) -> None:
        self._tokens = LogNormal(TOKEN_KNOTS, median_tokens, sigma_tokens)
        self._turns = LogNormal(TURN_KNOTS, median_turns, sigma_turns)

    def fit(self, tokens: Observed, turns: Observed) -> Curves:
        """Return the curves after these totals of all prompts."""
        return Curves(self._tokens.fit(tokens), self._turns.fit(turns))


class Estimator:
    """Estimator from ended and running siblings, shrunk to the prompt's history; where none has
    ended from the history alone; else from the prior."""

    def __init__(self, evidence: Evidence, prior: Prior) -> None:
        self._evidence = evidence
        self._prior = prior
        # The revision of the evidence, and its curves.
        self._of_all = (-1, prior.fit(evidence.tokens.observed, evidence.turns.observed))
        self._of_groups: OrderedDict[GroupKey, tuple[int, Curves]] = OrderedDict()

    def estimate(self, progress: Progress) -> Forecast:
        return replace(self._estimate(progress), turn_use=self._turn_use(progress))

    def _turn_use(self, progress: Progress) -> TurnUse:
        """Return the means over all, shrunk towards those of the prompt, of the group, and of the
        trajectory itself."""
        evidence = self._evidence
        found = evidence.group_of(progress.trajectory_id, progress.prompt_id)
        group = found[1].ended.values() if found is not None else ()
        own = ToolUse(
            progress.turn,
            progress.tool_s,
            max(0, progress.context_tokens - progress.prompt_tokens - progress.gen_tokens)
            if progress.turn
            else 0,
        )
        known = TurnUse().update(0.0, evidence.tool_use)
        weight = USE_WEIGHT_TURNS if evidence.ended_kept else 0.0
        for seen in (_sum(evidence.ended_of_prompt(progress.prompt_id)), _sum(group), own):
            known = known.update(weight, seen)
        return known

    def _estimate(self, progress: Progress) -> Forecast:
        evidence = self._evidence
        found = evidence.group_of(progress.trajectory_id, progress.prompt_id)
        if found is not None and found[1].ended:
            version = f"siblings-{len(found[1].ended)}"
            return self._curves_of_group(*found).forecast(progress, Source.SIBLINGS, version)
        own = evidence.ended_of_prompt(progress.prompt_id)
        count = len(own) or evidence.ended_kept
        if not count:
            return self._of_all[1].forecast(progress, Source.PRIOR, PRIOR_VERSION)
        version = f"history-{'prompt' if own else 'all'}-{count}"
        return (
            self._curves_of_all()
            .update_by(PROMPT_WEIGHT, own)
            .forecast(progress, Source.HISTORY, version)
        )

    def _curves_of_all(self) -> Curves:
        evidence = self._evidence
        if self._of_all[0] != evidence.revision:
            seen = (evidence.tokens.observed, evidence.turns.observed)
            self._of_all = (evidence.revision, self._prior.fit(*seen).update(ALL_WEIGHT, *seen))
        return self._of_all[1]

    def _curves_of_group(self, key: GroupKey, group: Group) -> Curves:
        """Return the curves of a group, shrunk to the curves of the prompt without the group
        itself."""
        revision, kept = self._evidence.revision, self._of_groups
        cached = kept.get(key)
        if cached is not None and cached[0] == revision:
            return cached[1]
        rollout_id, prompt_id = key
        earlier = [
            each
            for each in self._evidence.ended_of_prompt(prompt_id)
            if each.rollout_id != rollout_id
        ]
        before = self._curves_of_all().update_by(PROMPT_WEIGHT, earlier)
        curves = before.update_by(SIBLINGS_WEIGHT, group.ended.values(), group.running.values())
        kept[key] = (revision, curves)
        kept.move_to_end(key)
        if len(kept) > MOST_CURVES:
            kept.popitem(last=False)
        return curves


def _sum(ended: Collection[Ended]) -> ToolUse:
    found = ToolUse()
    for each in ended:
        found.add(each)
    return found


LONGEST = 0.10  # share of the trajectories that are the long tail (Heddle 7.2)


def recall_of_longest(total: Floats, predicted: Floats) -> float:
    """Return the share of the longest tenth that is in the tenth predicted longest; ties count as a
    random choice among them."""
    most = max(1, round(LONGEST * len(total)))
    longest = np.zeros(len(total), np.bool_)
    longest[np.argsort(-total, kind="stable")[:most]] = True
    least = -np.partition(-predicted, most - 1)[most - 1]
    above, level = predicted > least, predicted == least
    picked = (most - int(above.sum())) / int(level.sum())
    return float((longest[above].sum() + picked * longest[level].sum()) / most)


def correlation(one: Floats, other: Floats) -> float:
    """Return Pearson's correlation; 0 where either does not vary."""
    if len(one) < 2 or np.ptp(one) == 0.0 or np.ptp(other) == 0.0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])
