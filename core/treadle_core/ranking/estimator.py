"""How much is left of a trajectory: one protocol, and the estimators that need no model (a learned one: Heddle §4.1).

Purpose: remaining generated tokens and turns as quantiles, after every step, from what siblings and earlier
trajectories did.
Invariants: 0 <= p10 <= p50 <= p90; remaining tokens never exceed what the trajectory's cap leaves; an estimate depends
on the evidence and the question alone. A trajectory that was cut counts as longer than it was, a sibling that runs as
longer than it is.
Levels, each shrunk to the one below it (`survival.posterior`), so that few observations bend an estimate and many make
it: siblings of the group <- earlier trajectories of the prompt <- trajectories of all prompts <- a stated prior.
A learned model is one more `Estimator`, asked before these.

How well predicted lengths tell which trajectories are long: recall of the longest, and correlation (Heddle 7.2)."""

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
    lognormal,
    observed,
    posterior,
    remaining,
)
from treadle_core.refusals import CoreError

# How many observations the level below counts as. Chosen on 11,322 tool-using runs (74 tasks, 39 models) and not tried
# on others: there 1 to 4 for siblings and 8 to 20 for all change the pinball loss by about 1%, and 2 for all costs 2%
# while little is known. The runs hold no prompt twice, so the weight for prompts is a choice.
SIBLINGS_WEIGHT = 4.0  # a prompt's history against its group, which shares the policy too
PROMPT_WEIGHT = 4.0  # all prompts against one, whose share of the variance of lengths is from a tenth to three quarters
ALL_WEIGHT = 8.0  # the prior against everything: gone after a handful of groups

# From how many ended trajectories on a level answers in its own name; being shrunk, one is safe.
LEAST_ENDED_SIBLINGS = 1
LEAST_ENDED_HISTORY = 1

# Before anything was seen: half of all trajectories sample more than the median, a sixth more than e^sigma times it.
# The middle of the agentic workloads that were published, and wide, so that a handful of observations bends it.
PRIOR_MEDIAN_TOKENS = 1_000.0
PRIOR_SIGMA_TOKENS = 1.2
PRIOR_MEDIAN_TURNS = 4.0
PRIOR_SIGMA_TURNS = 0.9
PRIOR_VERSION = "prior-1"

MOST_CURVES = 1_024  # groups whose curves are kept, 13 kB each


class InvalidProgressError(CoreError):
    """A question with a negative count, or without ids."""


class Source(enum.IntEnum):
    """Which estimator answered."""

    PRIOR = 1
    HISTORY = 2
    SIBLINGS = 3
    MODEL = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a trajectory at the end of a step. `turn`: steps finished. Raises InvalidProgressError."""

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
    """Anything that can say how much is left."""

    def estimate(self, progress: Progress) -> Forecast | None:
        """None where it has nothing to go by; then the next one is asked."""


@dataclass(frozen=True, slots=True)
class Curves:
    """P(total > t) of tokens and of turns, on TOKEN_KNOTS and TURN_KNOTS."""

    tokens: Floats
    turns: Floats

    def updated(self, weight: float, tokens: Observed, turns: Observed) -> Curves:
        """These curves as the base of what was observed, counting as `weight` observations themselves."""
        return Curves(
            posterior(TOKEN_KNOTS, self.tokens, weight, tokens), posterior(TURN_KNOTS, self.turns, weight, turns)
        )

    def after(self, weight: float, ended: Collection[Ended], running: Collection[Running] = ()) -> Curves:
        """The same from trajectories one by one."""
        whole = [each for each in ended if each.own_end]
        cut: list[Ended | Running] = [*(each for each in ended if not each.own_end), *running]
        return self.updated(
            weight,
            observed([each.gen_tokens for each in whole], [each.gen_tokens for each in cut]),
            observed([each.turns for each in whole], [each.turns for each in cut]),
        )

    def forecast(self, progress: Progress, source: Source, version: str) -> Forecast:
        """What remains beyond `progress`, within its cap."""
        tokens = np.array(remaining(TOKEN_KNOTS, self.tokens, progress.gen_tokens))
        if progress.max_total_tokens:
            tokens = np.minimum(tokens, max(0, progress.max_total_tokens - progress.gen_tokens))
        turns = remaining(TURN_KNOTS, self.turns, progress.turn)
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
        return self._all_curves().after(PROMPT_WEIGHT, own).forecast(progress, Source.HISTORY, version)

    def before(self, key: GroupKey) -> Curves:
        """The curves of a prompt without those of the group itself: what the group's siblings are shrunk to."""
        rollout_id, prompt_id = key
        earlier = [each for each in self._evidence.ended_of_prompt(prompt_id) if each.rollout_id != rollout_id]
        return self._all_curves().after(PROMPT_WEIGHT, earlier)

    def _all_curves(self) -> Curves:
        evidence = self._evidence
        if self._all[0] != evidence.revision:
            curves = self._prior.curves.updated(ALL_WEIGHT, evidence.tokens.observed, evidence.turns.observed)
            self._all = (evidence.revision, curves)
        return self._all[1]


class SiblingsSoFar:
    """Ended samples of the group, and running ones as longer than they are, shrunk to the prompt's history."""

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
            curves = self._history.before(key).after(SIBLINGS_WEIGHT, group.ended.values(), group.running.values())
            cached = self._curves[key] = (self._evidence.revision, curves)
            self._curves.move_to_end(key)
            if len(self._curves) > MOST_CURVES:
                self._curves.popitem(last=False)
        return cached[1].forecast(progress, Source.SIBLINGS, f"siblings-{len(group.ended)}")


class FirstThatAnswers:
    """Asks estimators in order, the prior last."""

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
    """The best that can answer by now: some group, or nobody, has an ended trajectory."""
    return Source.SIBLINGS if evidence.closed_total >= LEAST_ENDED_SIBLINGS else Source.PRIOR


def learned_from(evidence: Evidence, prior: Prior) -> FirstThatAnswers:
    """Siblings, then history, then the prior."""
    history = History(evidence, prior)
    return FirstThatAnswers((SiblingsSoFar(evidence, history), history), prior)


LONGEST = 0.10  # of trajectories are the long tail whose recall counts


def recall_of_longest(total: Floats, predicted: Floats) -> float:
    """Of the longest tenth, the share among the tenth that was predicted longest. Where several are predicted equally
    long, what picking among them at random would find."""
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
