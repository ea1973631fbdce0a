"""Every trajectory as a test: prompts are dealt over folds, and each fold is asked about by estimators that were fitted
on the others.

For data sets too small to hold a part out: a fifth of 200 trajectories has four long ones. Invariant: of a prompt that
an estimator is asked about it has seen nothing; the validation prompts of a fit are neither its own nor the test's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from treadle_learned.asking import remaining_tokens
from treadle_learned.boosted import Boosted
from treadle_learned.comparison import Asked, forecasts, truth
from treadle_learned.crossfit import fit_across
from treadle_learned.errors import TooFewError
from treadle_learned.examples import States, Track, examples
from treadle_learned.fitting import Fitting
from treadle_learned.head import QuantileHead
from treadle_learned.history import OVERRUN, PromptAverage
from treadle_learned.moments import Moment, replay, replay_apart
from treadle_learned.scores import Floats, pinball_each
from treadle_learned.transcript import Transcript

FOLDS = 5
LAST_TURN = 8  # questions beyond it are left out: the report ends there, and states cost a pass over the text

CANDIDATES = ("learned", "numbers", "siblings", "boosted")  # what a service chooses from
Estimator = Callable[[Sequence[Moment]], Floats]  # remaining tokens [n, 3]


@dataclass(frozen=True)
class Fold:
    """Moments of all three parts, numbered by the transcripts of the whole. dealt: those of train and validation by the
    fold that they were dealt to, validation last. before: the transcripts of train."""

    train: list[Moment]
    validation: list[Moment]
    test: list[Moment]
    dealt: list[list[Moment]]
    before: list[Transcript]


def folds(
    transcripts: Sequence[Transcript], count: int = FOLDS, seed: int = 0, *, task_of: Callable[[str], str] = str
) -> list[Fold]:
    """task_of: what a prompt's name says of its text; prompts of one task are in one fold, so that no text that is
    asked about was trained on. Raises ValueError for fewer than 3, TooFewError for too few prompts."""
    if count < 3:
        raise ValueError(f"folds must be >= 3, one each to train, validate and test, are {count}")
    dealt: list[list[int]] = [[] for _ in range(count)]
    for index, transcript in enumerate(transcripts):
        dealt[zlib.crc32(f"{seed}/{task_of(transcript.prompt_id)}".encode()) % count].append(index)
    if not all(dealt):
        prompts = len({transcript.prompt_id for transcript in transcripts})
        raise TooFewError(f"{prompts} prompts are too few for {count} folds: harvest more rollouts")
    return [_fold(transcripts, dealt, number) for number in range(count)]


def answered(
    transcripts: Sequence[Transcript],
    dealt: Sequence[Fold],
    states: States | None,
    *,
    hidden_size: int,
    how: Fitting | None = None,
    track: Track = lambda over, _: over,
) -> Asked:
    """The test questions of all folds with each estimator's answers: history, siblings (so far, then history), boosted,
    numbers (the head without text), chosen (of CANDIDATES the best on the fold's validation prompts), oracle; with
    `states` also prompt-only (told once, before the first step) and learned. Raises TooFewError."""
    answers: dict[str, list[Floats]] = {}
    if states is not None:
        every = [moment for fold in dealt for moment in (*fold.train, *fold.validation, *fold.test)]
        states.read(every, track)
    for fold in dealt:
        estimators = _estimators(fold, transcripts, states, hidden_size, how)
        told = {name: estimate(fold.test) for name, estimate in estimators.items()}
        losses = {name: _loss(estimators[name], fold.validation) for name in CANDIDATES if name in estimators}
        told["chosen"] = told[min(losses, key=losses.__getitem__)]
        for name, said in told.items():
            answers.setdefault(name, []).append(said)
    return Asked(
        [moment for fold in dealt for moment in fold.test],
        transcripts,
        {name: np.concatenate(said) for name, said in answers.items()},
        np.repeat(np.arange(len(dealt)), [len(fold.test) for fold in dealt]),
    )


def _estimators(
    fold: Fold, transcripts: Sequence[Transcript], states: States | None, hidden_size: int, how: Fitting | None
) -> dict[str, Estimator]:
    average = PromptAverage(fold.before)
    found: dict[str, Estimator] = {
        "history": lambda moments: average.predict(moments, transcripts),
        "siblings": forecasts,
        "boosted": Boosted(fold.train).predict,
        "numbers": _head(fold.dealt, None, hidden_size, how),
        "oracle": truth,
    }
    if states is not None:
        found["prompt-only"] = _prompt_only(fold, states, hidden_size, how)
        found["learned"] = _head(fold.dealt, states, hidden_size, how)
    return found


def _loss(estimate: Estimator, moments: Sequence[Moment]) -> float:
    """Mean pinball loss."""
    left = np.array([moment.remaining_tokens for moment in moments], np.float64)
    censored = np.array([moment.censored for moment in moments])
    return float(pinball_each(estimate(moments), left, censored).mean())


def _fold(transcripts: Sequence[Transcript], dealt: Sequence[Sequence[int]], number: int) -> Fold:
    count = len(dealt)
    test, validation = dealt[number], dealt[(number + 1) % count]
    train = [index for at in range(count) if at not in (number, (number + 1) % count) for index in dealt[at]]
    before = [transcripts[index] for index in train]

    def of(part: Sequence[int], found: list[Moment]) -> list[Moment]:
        return [replace(moment, index=part[moment.index]) for moment in found]

    def asked(turn: int) -> bool:
        return turn <= LAST_TURN

    learned = of(train, replay_apart(before, asked=asked))
    judged = of(validation, replay([transcripts[index] for index in validation], before, asked=asked))
    others = [set(dealt[at]) for at in range(count) if at not in (number, (number + 1) % count)]
    return Fold(
        learned,
        judged,
        of(test, replay([transcripts[index] for index in test], before, asked=asked)),
        [*([moment for moment in learned if moment.index in own] for own in others), judged],
        before,
    )


def _head(parts: Sequence[Sequence[Moment]], states: States | None, hidden_size: int, how: Fitting | None) -> Estimator:
    """Fitted on these, stopped by the last; without `states` on the numbers alone."""

    def made(moments: Sequence[Moment]) -> tuple[Sequence[Moment], torch.Tensor, list[bool]]:
        if states is None:
            return moments, torch.zeros(len(moments), hidden_size), [False] * len(moments)
        return moments, *states.read(moments)

    head = fit_across([examples(*made(part)) for part in parts], hidden_size, how).head
    return lambda moments: predicted(head, *made(moments))


def _prompt_only(fold: Fold, states: States, hidden_size: int, how: Fitting | None) -> Estimator:
    """Asked before the first step alone; later that, less what was sampled since."""

    def first(moments: Sequence[Moment]) -> list[Moment]:
        return [moment for moment in moments if moment.turn == 0]

    head = _head([first(part) for part in fold.dealt], states, hidden_size, how)

    def says(moments: Sequence[Moment]) -> Floats:
        begins = first(moments)
        of = {moment.index: row for moment, row in zip(begins, head(begins), strict=True)}
        done = np.array([moment.gen_tokens for moment in moments], np.float64)[:, None]
        totals = np.stack([of[moment.index] for moment in moments])
        return np.maximum(totals - done, OVERRUN * done)

    return says


def predicted(head: QuantileHead, moments: Sequence[Moment], hidden: torch.Tensor, has_text: Sequence[bool]) -> Floats:
    """Remaining tokens [n, 3]."""
    told = examples(moments, hidden, has_text)
    return remaining_tokens(head, told)
