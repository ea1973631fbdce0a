"""Estimators side by side on the same questions: one row a step and an estimator.

Invariant: the rows of steps 0, 1 and 2 speak of the same trajectories, those that take more than two steps, so that
what differs is what was known; later steps of those that reach them. Every estimator is asked exactly the same.
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
COMMON = 2  # questions up to this step are asked of trajectories that go beyond it
SCORES: Mapping[str, scores.Score] = {
    "recall_top10": scores.recall,
    "pearson": scores.pearson,
    "pearson_log": scores.pearson_log,
    "pinball": scores.pinball,
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
    """`data`, step, estimator, trajectories, and each score with its 95% interval, e.g. pinball and
    pinball_interval. Steps that no trajectory goes beyond have no rows."""
    names = sorted({transcript.prompt_id for transcript in asked.transcripts})
    number = {name: at for at, name in enumerate(names)}
    found: list[dict[str, Any]] = []
    for step in STEPS:
        which = [at for at, moment in enumerate(asked.moments) if _asked_at(moment, step, asked.transcripts)]
        if not which:
            continue
        moments = [asked.moments[at] for at in which]
        for estimator, quantiles in asked.answers.items():
            answers = Answers(
                np.array([moment.gen_tokens for moment in moments], np.float64),
                np.array([moment.remaining_tokens for moment in moments], np.float64),
                np.array([moment.censored for moment in moments]),
                quantiles[which],
                np.array([number[asked.transcripts[moment.index].prompt_id] for moment in moments]),
                None if asked.parts is None else asked.parts[which],
            )
            trajectories = len({moment.index for moment in moments})
            row: dict[str, Any] = {"data": data, "step": step, "estimator": estimator, "trajectories": trajectories}
            row |= {name: score(answers) for name, score in SCORES.items()}
            if intervals:
                found_intervals = scores.intervals(answers, SCORES, seed)
                row |= {f"{name}_interval": interval for name, interval in found_intervals.items()}
            found.append(row)
    return found


def forecasts(moments: Sequence[Moment]) -> Floats:
    """What the estimators without a model said: siblings so far, history, the prior."""
    said = [moment.forecast.remaining_tokens for moment in moments]
    return np.array([[each.p10, each.p50, each.p90] for each in said], np.float64).reshape(len(said), 3)


def truth(moments: Sequence[Moment]) -> Floats:
    """The oracle's."""
    left = np.array([moment.remaining_tokens for moment in moments], np.float64)
    return np.column_stack([left, left, left])


def _asked_at(moment: Moment, step: int, transcripts: Sequence[Transcript]) -> bool:
    return moment.turn == step and len(transcripts[moment.index].turns) > max(step, COMMON)
