"""Score predictions of remaining tokens, and put estimators side by side on the same questions.

recall: of the longest tenth of the trajectories, the share among the tenth that was predicted longest (totals).
pearson, pearson_log: of predicted and true totals, and of their logarithms. pinball: of ln(1 + remaining), the mean
over the three quantiles. coverage_80: share of the truths between p10 and p90; below_p10, below_p50, below_p90: share
of the truths at or below each. Arrays have one row a question; quantiles [n, 3].

Answers of several predictors (one a fold) are in parts: what ranks (recall, pearson, pearson_log) is scored within each
part and averaged by size. Pooled, a predictor that says the same of all would seem to rank: each fold's constant is the
mean of the others, which is low where its own is long.

A comparison has a row for each step and estimator. Scores of steps 0, 1 and 2 are of the same trajectories, those of
more than two steps, so that only what is known differs; scores of later steps are of those that reach them. Shares of
truths within quantiles are of all questions at the step: nobody knew then which trajectories take more than two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from treadle_core.ranking.estimator import correlation, recall_of_longest

from treadle_learned.moments import Moment
from treadle_learned.transcript import Transcript

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

QUANTILES = (0.1, 0.5, 0.9)
RESAMPLES = 500
INTERVAL = (2.5, 97.5)  # percentiles of the resamples


@dataclass(frozen=True)
class Answers:
    """Questions at one step, and one estimator's answers. gen_tokens: sampled by then; prompts: the number of each
    prompt; parts: the number of the predictor that answered (one for all questions of a prompt), None where there is
    one predictor."""

    gen_tokens: Floats
    remaining: Floats
    censored: Flags
    quantiles: Floats
    prompts: Numbers
    parts: Numbers | None = None

    def of(self, which: Numbers) -> Answers:
        """Some of the questions, by index."""
        return Answers(
            self.gen_tokens[which],
            self.remaining[which],
            self.censored[which],
            self.quantiles[which],
            self.prompts[which],
            None if self.parts is None else self.parts[which],
        )

    @property
    def totals(self) -> Floats:
        """Tokens of the whole trajectories."""
        return self.gen_tokens + self.remaining

    @property
    def predicted(self) -> Floats:
        """Predicted tokens of the whole trajectories, by the medians."""
        return self.gen_tokens + self.quantiles[:, 1]


Score = Callable[[Answers], float]


def recall(answers: Answers) -> float:
    """Ties count as picked at random."""
    return _within_parts(answers, lambda some: recall_of_longest(some.totals, some.predicted))


def pearson(answers: Answers) -> float:
    """0 where either does not vary."""
    return _within_parts(answers, lambda some: correlation(some.totals, some.predicted))


def pearson_log(answers: Answers) -> float:
    """0 where either does not vary."""
    return _within_parts(answers, lambda some: correlation(np.log(some.totals), np.log1p(some.predicted)))


def pinball(answers: Answers) -> float:
    """A censored question costs only where less than it reached was predicted."""
    return float(pinball_each(answers.quantiles, answers.remaining, answers.censored).mean())


def pinball_each(quantiles: Floats, remaining: Floats, censored: Flags) -> Floats:
    """`pinball` of each row."""
    short = np.log1p(remaining)[:, None] - np.log1p(quantiles)
    levels = np.array(QUANTILES)
    loss = np.maximum(levels * short, (levels - 1.0) * short)
    each: Floats = np.where(censored[:, None] & (short < 0.0), 0.0, loss).mean(axis=1)
    return each


def coverage_80(answers: Answers) -> float:
    """Of the trajectories that ended by themselves."""
    return _share(answers, lambda remaining, q: (q[:, 0] <= remaining) & (remaining <= q[:, 2]))


def below(answers: Answers, level: int) -> float:
    """Of the trajectories that ended by themselves, the share at or below p10 (0), p50 (1), p90 (2)."""
    return _share(answers, lambda remaining, q: remaining <= q[:, level])


def intervals(answers: Answers, of: Mapping[str, Score], seed: int = 0) -> dict[str, tuple[float, float]]:
    """The 95% bootstrap interval of each score. Prompts are drawn whole, since samples of one prompt are not
    independent; each part keeps its number of prompts."""
    rng = np.random.default_rng(seed)
    order = np.argsort(answers.prompts, kind="stable")
    _, first, count = np.unique(answers.prompts[order], return_index=True, return_counts=True)
    part_of = np.zeros(len(first), np.int64) if answers.parts is None else answers.parts[order][first]
    parts = [np.flatnonzero(part_of == part) for part in np.unique(part_of)]
    values: dict[str, list[float]] = {name: [] for name in of}
    for _ in range(RESAMPLES):
        drawn = np.concatenate([part[rng.integers(0, len(part), len(part))] for part in parts])
        counts = count[drawn]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        some = answers.of(order[np.repeat(first[drawn], counts) + within])
        for name, score in of.items():
            values[name].append(score(some))
    return {name: _middle(np.array(found)) for name, found in values.items()}


def _within_parts(answers: Answers, score: Score) -> float:
    if answers.parts is None:
        return score(answers)
    parts = [np.flatnonzero(answers.parts == part) for part in np.unique(answers.parts)]
    return sum(len(which) * score(answers.of(which)) for which in parts) / len(answers.gen_tokens)


def _middle(values: Floats) -> tuple[float, float]:
    low, high = np.percentile(values, INTERVAL)
    return float(low), float(high)


def _share(answers: Answers, holds: Callable[[Floats, Floats], Flags]) -> float:
    whole = ~answers.censored
    if not whole.any():
        return float("nan")
    return float(holds(answers.remaining[whole], answers.quantiles[whole]).mean())


STEPS = (0, 1, 2, 4, 8)
COMMON = 2  # questions up to this step are compared on trajectories that go beyond it
COMPARED: Mapping[str, Score] = {
    "recall_top10": recall,
    "pearson": pearson,
    "pearson_log": pearson_log,
    "pinball": pinball,
}
CALIBRATION: Mapping[str, Score] = {
    "coverage_80": coverage_80,
    "below_p10": partial(below, level=0),
    "below_p50": partial(below, level=1),
    "below_p90": partial(below, level=2),
}


@dataclass(frozen=True)
class Asked:
    """Questions of test transcripts, and the answers [n, 3] of each estimator by its name. parts: the fold whose
    estimators answered, None where there is one."""

    moments: Sequence[Moment]
    transcripts: Sequence[Transcript]
    answers: Mapping[str, Floats]
    parts: Numbers | None = None


def pool(deals: Sequence[Asked]) -> Asked:
    """The answers of several ways to deal the prompts of the same transcripts into folds: the chance of one deal counts
    less. Every fold of every deal is a part of its own."""
    parts: list[Numbers] = []
    for deal in deals:
        own = np.zeros(len(deal.moments), np.int64) if deal.parts is None else deal.parts
        parts.append(own + (1 + parts[-1].max(initial=-1) if parts else 0))
    return Asked(
        [moment for deal in deals for moment in deal.moments],
        deals[0].transcripts,
        {name: np.concatenate([deal.answers[name] for deal in deals]) for name in deals[0].answers},
        np.concatenate(parts),
    )


def rows(data: str, asked: Asked, *, seed: int = 0, with_intervals: bool = True) -> list[dict[str, Any]]:
    """One row for each step and estimator: data, step, estimator, number of trajectories compared, and each score with
    its 95% interval, e.g. pinball and pinball_interval. Steps that no trajectory goes beyond have no rows."""
    names = [transcript.prompt_id for transcript in asked.transcripts]
    numbers = np.unique(names, return_inverse=True)[1]
    found: list[dict[str, Any]] = []
    for step in STEPS:
        at_step = np.array([at for at, moment in enumerate(asked.moments) if moment.turn == step], np.int64)
        beyond = np.array([at for at in at_step if _turns(asked, at) > max(step, COMMON)], np.int64)
        if not len(beyond):
            continue
        trajectories = len({asked.moments[at].index for at in beyond})
        for estimator in asked.answers:
            row: dict[str, Any] = {"data": data, "step": step, "estimator": estimator, "trajectories": trajectories}
            for judged, which in ((COMPARED, beyond), (CALIBRATION, at_step)):
                answers = _select(asked, estimator, which, numbers)
                row |= {name: score(answers) for name, score in judged.items()}
                if with_intervals:
                    bounds = intervals(answers, judged, seed)
                    row |= {f"{name}_interval": interval for name, interval in bounds.items()}
            found.append(row)
    return found


def _select(asked: Asked, estimator: str, which: Numbers, numbers: Numbers) -> Answers:
    """One estimator's answers at some of the moments. numbers: the prompt of each transcript."""
    moments = [asked.moments[at] for at in which]
    return Answers(
        np.array([moment.gen_tokens for moment in moments], np.float64),
        np.array([moment.remaining_tokens for moment in moments], np.float64),
        np.array([moment.censored for moment in moments]),
        asked.answers[estimator][which],
        numbers[[moment.index for moment in moments]],
        None if asked.parts is None else asked.parts[which],
    )


def forecasts(moments: Sequence[Moment]) -> Floats:
    """The estimates without a model: siblings so far, history, the prior."""
    said = [moment.forecast.remaining_tokens for moment in moments]
    return np.array([[each.p10, each.p50, each.p90] for each in said], np.float64).reshape(len(said), 3)


def truth(moments: Sequence[Moment]) -> Floats:
    """The oracle's answers."""
    left = np.array([moment.remaining_tokens for moment in moments], np.float64)
    return np.column_stack([left, left, left])


def _turns(asked: Asked, at: int) -> int:
    """The number of turns of the trajectory that a question is about."""
    return len(asked.transcripts[asked.moments[at].index].turns)
