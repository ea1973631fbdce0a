"""Estimators of what is left of a trajectory, as quantiles of tokens and turns, from siblings and earlier trajectories.

An estimate depends on the evidence and the question alone; 0 <= p10 <= p50 <= p90, and remaining tokens never exceed
what the trajectory's cap leaves. A trajectory that was cut counts as longer than it was, a running sibling as longer
than it is.

Each level is shrunk to the one below it (`evidence.posterior`), so that few observations bend an estimate and many
determine it: siblings of the group <- earlier trajectories of the prompt <- trajectories of all prompts <- a stated
prior. A learned model (Heddle §4.1) is one more `Estimator`, asked before these.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from treadle_core.compiled import Floats
from treadle_core.model import Estimate
from treadle_core.ranking.evidence import (
    TOKEN_KNOTS,
    TURN_KNOTS,
    Ended,
    Evidence,
    GroupKey,
    Observed,
    Running,
    count_totals,
    lognormal,
    posterior,
    remaining_quantiles,
)
from treadle_core.refusals import CoreError

# How many observations the level below counts as. Chosen on 11,322 tool-using runs (74 tasks, 39 models): 1 to 4 for
# siblings and 8 to 20 for all change the pinball loss by about 1%, and 2 for all costs 2% while little is known. No
# prompt occurs twice in the runs, so the weight for prompts is a choice.
SIBLINGS_WEIGHT = 4.0  # a prompt's history against its group, which shares the policy too
PROMPT_WEIGHT = 4.0  # all prompts against one, whose share of the variance of lengths is from a tenth to three quarters
ALL_WEIGHT = 8.0  # the prior against all trajectories: negligible after a few groups

# A level answers from this many ended trajectories on; one is enough, since the estimate is shrunk.
LEAST_ENDED_SIBLINGS = 1
LEAST_ENDED_HISTORY = 1

# The prior: log-normal totals, in the middle of the published agentic workloads and wide, so that a few observations
# bend it.
PRIOR_MEDIAN_TOKENS = 1_000.0
PRIOR_SIGMA_TOKENS = 1.2
PRIOR_MEDIAN_TURNS = 4.0
PRIOR_SIGMA_TURNS = 0.9
PRIOR_VERSION = "prior-1"

MOST_CURVES = 1_024  # groups whose curves are kept, 13 kB each


class InvalidProgressError(CoreError):
    """A question with a negative count."""


class Source(enum.IntEnum):
    """The estimator that answered."""

    PRIOR = 1
    HISTORY = 2
    SIBLINGS = 3
    MODEL = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a trajectory after `turn` steps. Raises InvalidProgressError."""

    trajectory_id: str
    prompt_id: str
    turn: int = 0
    gen_tokens: int = 0
    context_tokens: int = 0
    prompt_tokens: int = 0
    max_total_tokens: int = 0  # cap on gen_tokens; 0 for none

    def __post_init__(self) -> None:
        for name in ("turn", "gen_tokens", "context_tokens", "prompt_tokens", "max_total_tokens"):
            if getattr(self, name) < 0:
                raise InvalidProgressError(name, f"must be >= 0, is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What remains, as quantiles. `model_version` names the evidence behind it, e.g. siblings-7."""

    remaining_tokens: Estimate
    remaining_turns: Estimate
    source: Source
    model_version: str


class Estimator(Protocol):
    """Estimates how much is left of a trajectory."""

    def estimate(self, progress: Progress) -> Forecast | None:
        """None where it has no evidence; then the next estimator is asked."""


@dataclass(frozen=True, slots=True)
class Curves:
    """P(total > t) of tokens and of turns, on TOKEN_KNOTS and TURN_KNOTS."""

    tokens: Floats
    turns: Floats

    def update(self, weight: float, tokens: Observed, turns: Observed) -> Curves:
        """The curves after observations, with these as the base that counts as `weight` observations."""
        return Curves(
            posterior(TOKEN_KNOTS, self.tokens, weight, tokens), posterior(TURN_KNOTS, self.turns, weight, turns)
        )

    def update_by(self, weight: float, ended: Collection[Ended], running: Collection[Running] = ()) -> Curves:
        """`update` by trajectories."""
        whole = [each for each in ended if each.own_end]
        cut: list[Ended | Running] = [*(each for each in ended if not each.own_end), *running]
        return self.update(
            weight,
            count_totals([each.gen_tokens for each in whole], [each.gen_tokens for each in cut]),
            count_totals([each.turns for each in whole], [each.turns for each in cut]),
        )

    def forecast(self, progress: Progress, source: Source, version: str) -> Forecast:
        """What remains beyond `progress`, within its cap."""
        tokens = np.array(remaining_quantiles(TOKEN_KNOTS, self.tokens, progress.gen_tokens))
        if progress.max_total_tokens:
            tokens = np.minimum(tokens, max(0, progress.max_total_tokens - progress.gen_tokens))
        turns = remaining_quantiles(TURN_KNOTS, self.turns, progress.turn)
        return Forecast(Estimate(*tokens.tolist()), Estimate(*turns), source, version)


class Prior:
    """A stated default: log-normal totals. Medians in tokens and turns, sigmas of the natural log; all > 0."""

    def __init__(
        self,
        median_tokens: float = PRIOR_MEDIAN_TOKENS,
        sigma_tokens: float = PRIOR_SIGMA_TOKENS,
        median_turns: float = PRIOR_MEDIAN_TURNS,
        sigma_turns: float = PRIOR_SIGMA_TURNS,
    ) -> None:
        self.curves = Curves(
            lognormal(TOKEN_KNOTS, median_tokens, sigma_tokens), lognormal(TURN_KNOTS, median_turns, sigma_turns)
        )

    def estimate(self, progress: Progress) -> Forecast:
        return self.curves.forecast(progress, Source.PRIOR, PRIOR_VERSION)


class History:
    """Ended trajectories of the same prompt, shrunk to those of all prompts."""

    def __init__(self, evidence: Evidence, prior: Prior) -> None:
        self._evidence = evidence
        self._prior = prior
        self._all = (-1, prior.curves)  # and of which revision of the evidence

    def estimate(self, progress: Progress) -> Forecast | None:
        own = self._evidence.ended_of_prompt(progress.prompt_id)
        count = len(own) or self._evidence.ended_kept
        if count < LEAST_ENDED_HISTORY:
            return None
        version = f"history-{'prompt' if own else 'all'}-{count}"
        return self._all_curves().update_by(PROMPT_WEIGHT, own).forecast(progress, Source.HISTORY, version)

    def before(self, key: GroupKey) -> Curves:
        """The curves of a prompt without the group itself, to which the group's siblings are shrunk."""
        rollout_id, prompt_id = key
        earlier = [each for each in self._evidence.ended_of_prompt(prompt_id) if each.rollout_id != rollout_id]
        return self._all_curves().update_by(PROMPT_WEIGHT, earlier)

    def _all_curves(self) -> Curves:
        evidence = self._evidence
        if self._all[0] != evidence.revision:
            curves = self._prior.curves.update(ALL_WEIGHT, evidence.tokens.observed, evidence.turns.observed)
            self._all = (evidence.revision, curves)
        return self._all[1]


class SiblingsSoFar:
    """Ended samples of the group, and running ones as censored, shrunk to the prompt's history."""

    def __init__(self, evidence: Evidence, history: History) -> None:
        self._evidence = evidence
        self._history = history
        self._curves: OrderedDict[GroupKey, tuple[int, Curves]] = OrderedDict()

    def estimate(self, progress: Progress) -> Forecast | None:
        found = self._evidence.group_of(progress.trajectory_id, progress.prompt_id)
        if found is None:
            return None
        key, group = found
        if len(group.ended) < LEAST_ENDED_SIBLINGS:
            return None
        cached = self._curves.get(key)
        if cached is None or cached[0] != self._evidence.revision:
            curves = self._history.before(key).update_by(SIBLINGS_WEIGHT, group.ended.values(), group.running.values())
            cached = self._curves[key] = (self._evidence.revision, curves)
            self._curves.move_to_end(key)
            if len(self._curves) > MOST_CURVES:
                self._curves.popitem(last=False)
        return cached[1].forecast(progress, Source.SIBLINGS, f"siblings-{len(group.ended)}")


class FirstThatAnswers:
    """Asks estimators in order, then the prior."""

    def __init__(self, estimators: Sequence[Estimator], prior: Prior) -> None:
        self._estimators = tuple(estimators)
        self._prior = prior

    def estimate(self, progress: Progress) -> Forecast:
        for estimator in self._estimators:
            forecast = estimator.estimate(progress)
            if forecast is not None:
                return forecast
        return self._prior.estimate(progress)


def best_source(evidence: Evidence) -> Source:
    """The best estimator that can answer now."""
    return Source.SIBLINGS if evidence.closed_total >= LEAST_ENDED_SIBLINGS else Source.PRIOR


def learned_from(evidence: Evidence, prior: Prior) -> FirstThatAnswers:
    """Siblings, then history, then the prior."""
    history = History(evidence, prior)
    return FirstThatAnswers((SiblingsSoFar(evidence, history), history), prior)


LONGEST = 0.10  # share of the trajectories that are the long tail (Heddle 7.2)


def recall_of_longest(total: Floats, predicted: Floats) -> float:
    """Share of the longest tenth that is in the tenth predicted longest; ties count as a random choice among them."""
    most = max(1, round(LONGEST * len(total)))
    longest = np.zeros(len(total), np.bool_)
    longest[np.argsort(-total, kind="stable")[:most]] = True
    least = -np.partition(-predicted, most - 1)[most - 1]
    above, level = predicted > least, predicted == least
    picked = (most - int(above.sum())) / int(level.sum())
    return float((longest[above].sum() + picked * longest[level].sum()) / most)


def correlation(one: Floats, other: Floats) -> float:
    """Pearson's; 0 where either does not vary."""
    if len(one) < 2 or np.ptp(one) == 0.0 or np.ptp(other) == 0.0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])
