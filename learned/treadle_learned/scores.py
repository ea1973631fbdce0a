"""Score predictions of remaining tokens, and put estimators side by side on the same questions.

recall: of the longest tenth of the trajectories, the share among the tenth that was predicted
longest (totals). pearson, pearson_log: of predicted and true totals, and of their logarithms.
pinball: of ln(1 + remaining), the mean over the three quantiles. coverage_80: share of the truths
between p10 and p90; below_p10, below_p50, below_p90: share of the truths at or below each. Arrays
have one row a question; quantiles [n, 3].

Answers of several predictors (one a fold) are in parts: what ranks (recall, pearson, pearson_log)
is scored within each part and averaged by size. Pooled, a predictor with the same answer for all
would seem to rank: each fold's constant is the mean of the others, which is low where its own is
long.

A comparison has a row for each step and estimator. Scores of steps 0, 1 and 2 are of the same
trajectories, those of more than two steps, so that only what is known differs; scores of later
steps are of those that reach them. Shares of truths within quantiles are of all questions at the
step: nobody knew then which trajectories take more than two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
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

NEWEST = 0.3  # the weight of the newest trajectory in a prompt's average
OVERRUN = (
    0.25  # of what it has done is taken to be left of a trajectory that has outlived its average
)
Z_90 = 1.2816  # standard deviations from the median to p90 of a normal distribution
WIDEST = 1.0  # the spread of ln tokens where too little came before to measure it


@dataclass(frozen=True)
class Answers:
    """Questions at one step, and one estimator's answers. gen_tokens: sampled by then; prompts: the
    number of each prompt; parts: the number of the predictor that answered (one for all questions
    of a prompt)."""

    gen_tokens: Floats
    remaining: Floats
    censored: Flags
    quantiles: Floats
    prompts: Numbers
    parts: Numbers

    def of(self, which: Numbers) -> Answers:
        """Return some of the questions, by index."""
        return Answers(*(getattr(self, each.name)[which] for each in fields(self)))

    @property
    def totals(self) -> Floats:
        """Return the tokens of the whole trajectories."""
        return self.gen_tokens + self.remaining

    @property
    def predicted(self) -> Floats:
        """Return the predicted tokens of the whole trajectories, by the medians."""
        return self.gen_tokens + self.quantiles[:, 1]


Score = Callable[[Answers], float]


def recall(answers: Answers) -> float:
    """Return the recall of the longest tenth; ties count as picked at random."""
    return _within_parts(answers, lambda some: recall_of_longest(some.totals, some.predicted))


def pearson(answers: Answers) -> float:
    """Return the correlation of predicted and true totals; 0 where either does not vary."""
    return _within_parts(answers, lambda some: correlation(some.totals, some.predicted))


def pearson_log(answers: Answers) -> float:
    """Return the correlation of the logarithms of predicted and true totals; 0 where either does
    not vary."""
    return _within_parts(
        answers, lambda some: correlation(np.log(some.totals), np.log1p(some.predicted))
    )


def pinball(answers: Answers) -> float:
    """Return the mean pinball loss. A censored question costs only where the prediction is less
    than its known part."""
    return float(pinball_each(answers.quantiles, answers.remaining, answers.censored).mean())


def pinball_each(quantiles: Floats, remaining: Floats, censored: Flags) -> Floats:
    """Return the pinball loss of each row, as in `pinball`."""
    short = np.log1p(remaining)[:, None] - np.log1p(quantiles)
    levels = np.array(QUANTILES)
    loss = np.maximum(levels * short, (levels - 1.0) * short)
    each: Floats = np.where(censored[:, None] & (short < 0.0), 0.0, loss).mean(axis=1)
    return each


def coverage_80(answers: Answers) -> float:
    """Return the coverage of p10 to p90, of the trajectories that ended by themselves."""
    return _share(answers, lambda remaining, q: (q[:, 0] <= remaining) & (remaining <= q[:, 2]))


def below(answers: Answers, level: int) -> float:
    """Return the share at or below p10 (0), p50 (1), p90 (2), of the trajectories that ended by
    themselves."""
    return _share(answers, lambda remaining, q: remaining <= q[:, level])


def intervals(
    answers: Answers, of: Mapping[str, Score], seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return the 95% bootstrap interval of each score. Prompts are drawn whole, since samples of
    one prompt are not independent; each part keeps its number of prompts."""
    rng = np.random.default_rng(seed)
    order = np.argsort(answers.prompts, kind="stable")
    _, first, count = np.unique(answers.prompts[order], return_index=True, return_counts=True)
    part_of = answers.parts[order][first]
    parts = [np.flatnonzero(part_of == part) for part in np.unique(part_of)]
    values = np.empty((RESAMPLES, len(of)))
    for row in values:
        drawn = np.concatenate([part[rng.integers(0, len(part), len(part))] for part in parts])
        counts = count[drawn]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        some = answers.of(order[np.repeat(first[drawn], counts) + within])
        row[:] = [score(some) for score in of.values()]
    low, high = np.percentile(values, INTERVAL, axis=0).tolist()
    return {name: (low[at], high[at]) for at, name in enumerate(of)}


def _within_parts(answers: Answers, score: Score) -> float:
    parts = [np.flatnonzero(answers.parts == part) for part in np.unique(answers.parts)]
    return sum(len(which) * score(answers.of(which)) for which in parts) / len(answers.gen_tokens)


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
    """Questions of test transcripts, and the answers [n, 3] of each estimator by its name. parts:
    the fold whose estimators answered."""

    moments: Sequence[Moment]
    transcripts: Sequence[Transcript]
    answers: Mapping[str, Floats]
    parts: Numbers


def rows(
    data: str, asked: Asked, *, seed: int = 0, with_intervals: bool = True
) -> list[dict[str, Any]]:
    """Return one row for each step and estimator: data, step, estimator, number of trajectories
    compared, and each score with its 95% interval, e.g. pinball and pinball_interval. Steps that no
    trajectory goes beyond have no rows."""
    names = [transcript.prompt_id for transcript in asked.transcripts]
    numbers = np.unique(names, return_inverse=True)[1]
    found: list[dict[str, Any]] = []
    moments = asked.moments
    index, turn = np.array([(moment.index, moment.turn) for moment in moments]).T
    turns = np.array([len(transcript.turns) for transcript in asked.transcripts])[index]
    gen_tokens = np.array([moment.gen_tokens for moment in moments], np.float64)
    censored = np.array([moment.censored for moment in moments])
    for step in STEPS:
        at_step = np.flatnonzero(turn == step)
        beyond = at_step[turns[at_step] > max(step, COMMON)]
        if not len(beyond):
            continue
        trajectories = len(np.unique(index[beyond]))
        for estimator, quantiles in asked.answers.items():
            every = Answers(
                gen_tokens, truth(moments)[:, 0], censored, quantiles, numbers[index], asked.parts
            )
            row: dict[str, Any] = {
                "data": data,
                "step": step,
                "estimator": estimator,
                "trajectories": trajectories,
            }
            for judged, which in ((COMPARED, beyond), (CALIBRATION, at_step)):
                answers = every.of(which)
                row |= {name: score(answers) for name, score in judged.items()}
                if with_intervals:
                    bounds = intervals(answers, judged, seed)
                    row |= {f"{name}_interval": interval for name, interval in bounds.items()}
            found.append(row)
    return found


def forecasts(moments: Sequence[Moment]) -> Floats:
    """Return the estimates without a model: siblings so far, history, the prior."""
    said = [moment.forecast.remaining_tokens for moment in moments]
    return np.array([[each.p10, each.p50, each.p90] for each in said], np.float64).reshape(
        len(said), 3
    )


def truth(moments: Sequence[Moment]) -> Floats:
    """Return the oracle's answers."""
    left = np.array([moment.remaining_tokens for moment in moments], np.float64)
    return np.column_stack([left, left, left])


def subtract_sampled(totals: Floats, moments: Sequence[Moment]) -> Floats:
    """Return the rest of predicted totals, [n, 3]; still above 0 where a trajectory has outlived
    them."""
    done = np.array([moment.gen_tokens for moment in moments], np.float64)[:, None]
    return np.maximum(totals - done, OVERRUN * done)


class PromptAverage:
    """Predictor by an exponential moving average of ln(1 + tokens) for each prompt, which Heddle
    4.1 calls static; a prompt without history has the average of all.

    The spread is that of all earlier trajectories around their own prompt's average before them. Of
    the trajectory itself only its sampled tokens are used. A cut trajectory counts as it is: that
    is what such predictors do. earlier: in the order in which they ended.
    """

    def __init__(self, earlier: Sequence[Transcript]) -> None:
        self._of_prompt: dict[str, float] = {}
        self._of_all = 0.0
        errors: list[float] = []
        for number, transcript in enumerate(earlier):
            length = float(np.log1p(transcript.gen_tokens))
            known = self._of_prompt.get(transcript.prompt_id)
            if number:
                errors.append(length - (self._of_all if known is None else known))
            self._of_prompt[transcript.prompt_id] = (
                length if known is None else known + NEWEST * (length - known)
            )
            self._of_all += (length - self._of_all) / (number + 1)
        self._spread = float(np.std(errors)) if len(errors) > 1 else WIDEST

    def predict(self, moments: Sequence[Moment]) -> Floats:
        """Return the predicted remaining tokens [n, 3]."""
        logs = np.array([self._of_prompt.get(moment.prompt_id, self._of_all) for moment in moments])
        totals = np.expm1(logs[:, None] + self._spread * np.array([-Z_90, 0.0, Z_90]))
        return subtract_sampled(totals, moments)
