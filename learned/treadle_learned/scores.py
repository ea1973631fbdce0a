"""How good predictions of remaining tokens are: what Heddle 7.2 reports, and whether the quantiles mean what they say.

recall: of the longest tenth of the trajectories, the share among the tenth that was predicted longest (totals).
pearson, pearson_log: of predicted and true totals, and of their logarithms. pinball: of ln(1 + remaining), the mean
over the three quantiles. coverage_80: share of the truths between p10 and p90; below_p10, below_p50, below_p90: share
of the truths at or below each. Arrays have one row a question; quantiles [n, 3].
Answers of several predictors (one a fold) are in parts: what ranks (recall, pearson, pearson_log) is scored within each
part and averaged by size. Pooled, a predictor that says the same of all would seem to rank: each fold's constant is the
mean of the others, which is low where its own is long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_core.ranking.estimator import correlation, recall_of_longest

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

QUANTILES = (0.1, 0.5, 0.9)
RESAMPLES = 500
INTERVAL = (2.5, 97.5)  # percentiles of the resamples


@dataclass(frozen=True)
class Answers:
    """Questions at one step, and one estimator's answers. gen_tokens: sampled by then; prompts: whose, by number;
    parts: of which predictor, by number (all of a prompt's of one), None where there is one."""

    gen_tokens: Floats
    remaining: Floats
    censored: Flags
    quantiles: Floats
    prompts: Numbers
    parts: Numbers | None = None

    def of(self, which: Numbers) -> Answers:
        """Some of them, by index."""
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
        """Those that the medians stand for."""
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
    """What is censored costs only where less than it reached was predicted."""
    return float(pinball_each(answers.quantiles, answers.remaining, answers.censored).mean())


def pinball_each(quantiles: Floats, remaining: Floats, censored: Flags) -> Floats:
    """`pinball`, one a row."""
    short = np.log1p(remaining)[:, None] - np.log1p(quantiles)
    levels = np.array(QUANTILES)
    loss = np.maximum(levels * short, (levels - 1.0) * short)
    each: Floats = np.where(censored[:, None] & (short < 0.0), 0.0, loss).mean(axis=1)
    return each


def coverage_80(answers: Answers) -> float:
    """Of those that ended by themselves."""
    return _share(answers, lambda remaining, q: (q[:, 0] <= remaining) & (remaining <= q[:, 2]))


def below(answers: Answers, level: int) -> float:
    """Of those that ended by themselves the share at or below p10 (0), p50 (1), p90 (2)."""
    return _share(answers, lambda remaining, q: remaining <= q[:, level])


def intervals(answers: Answers, of: Mapping[str, Score], seed: int = 0) -> dict[str, tuple[float, float]]:
    """The 95% bootstrap interval of each score, prompts drawn whole: samples of one prompt are not independent. Of each
    part as many prompts as it has."""
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
