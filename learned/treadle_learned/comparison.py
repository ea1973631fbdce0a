"""Estimators side by side on the same questions: one row a step and an estimator.

Invariants: in the rows of steps 0, 1 and 2 scores are of the same trajectories, those that take more than two steps, so
that what differs is what was known; later steps of those that reach them. Shares of truths within quantiles are of all
that were asked at the step: nobody knew then who would take more than two. Every estimator is asked exactly the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from treadle_learned import scores
from treadle_learned.moments import Moment
from treadle_learned.scores import Answers, Floats, Numbers
from treadle_learned.transcript import Transcript

STEPS = (0, 1, 2, 4, 8)
COMMON = 2  # questions up to this step are compared on trajectories that go beyond it
COMPARED: Mapping[str, scores.Score] = {
    "recall_top10": scores.recall,
    "pearson": scores.pearson,
    "pearson_log": scores.pearson_log,
    "pinball": scores.pinball,
}
CALIBRATION: Mapping[str, scores.Score] = {
    "coverage_80": scores.coverage_80,
    "below_p10": partial(scores.below, level=0),
    "below_p50": partial(scores.below, level=1),
    "below_p90": partial(scores.below, level=2),
}


@dataclass(frozen=True)
class Asked:
    """Questions of test transcripts, and their answers [n, 3] by each estimator's name. parts: the fold whose
    estimators answered, None where there is one."""

    moments: Sequence[Moment]
    transcripts: Sequence[Transcript]
    answers: Mapping[str, Floats]
    parts: Numbers | None = None


def together(deals: Sequence[Asked]) -> Asked:
    """The same transcripts, asked about once for each way of dealing their prompts into folds: what one deal owes to
    chance counts for that much less. Every fold of every deal is a part of its own."""
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


def rows(data: str, asked: Asked, *, seed: int = 0, intervals: bool = True) -> list[dict[str, Any]]:
    """`data`, step, estimator, trajectories that are compared, and each score with its 95% interval, e.g. pinball and
    pinball_interval. Steps that no trajectory goes beyond have no rows."""
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
                answers = _answers(asked, estimator, which, numbers)
                row |= {name: score(answers) for name, score in judged.items()}
                if intervals:
                    found_intervals = scores.intervals(answers, judged, seed)
                    row |= {f"{name}_interval": interval for name, interval in found_intervals.items()}
            found.append(row)
    return found


def _answers(asked: Asked, estimator: str, which: Numbers, numbers: Numbers) -> Answers:
    """To some of the moments. numbers: the prompt of each transcript."""
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
    """What the estimators without a model said: siblings so far, history, the prior."""
    said = [moment.forecast.remaining_tokens for moment in moments]
    return np.array([[each.p10, each.p50, each.p90] for each in said], np.float64).reshape(len(said), 3)


def truth(moments: Sequence[Moment]) -> Floats:
    """The oracle's."""
    left = np.array([moment.remaining_tokens for moment in moments], np.float64)
    return np.column_stack([left, left, left])


def _turns(asked: Asked, at: int) -> int:
    """Of the trajectory that a question is about."""
    return len(asked.transcripts[asked.moments[at].index].turns)
