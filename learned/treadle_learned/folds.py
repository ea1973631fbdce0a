"""Every trajectory as a test: prompts are dealt over folds, and each fold is asked about by estimators that were fitted
on the others.

For data sets too small to hold a part out: a fifth of 200 trajectories has four long ones. Invariant: of a prompt that
an estimator is asked about it has seen nothing, in the test and where validation chooses between estimators.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from treadle_learned.asking import remaining_tokens
from treadle_learned.boosted import Boosted
from treadle_learned.calibration import unseen
from treadle_learned.comparison import Asked, forecasts, truth
from treadle_learned.errors import TooFewError
from treadle_learned.examples import Examples, States, Track, examples
from treadle_learned.fitting import Fitting, fit
from treadle_learned.history import OVERRUN, PromptAverage
from treadle_learned.moments import Moment, replay, replay_apart
from treadle_learned.scores import Floats, pinball_each
from treadle_learned.transcript import Transcript

FOLDS = 5
LAST_TURN = 8  # questions beyond it are left out: the report ends there, and states cost a pass over the text

Estimator = Callable[[Sequence[Moment]], Floats]  # remaining tokens [n, 3]


@dataclass(frozen=True)
class Fold:
    """Moments of both parts, numbered by the transcripts of the whole. apart: of each of train a number for the fold
    that it was dealt to, from 0. before: the transcripts of train."""

    train: list[Moment]
    test: list[Moment]
    apart: list[int]
    before: list[Transcript]


@dataclass(frozen=True)
class Fitted:
    """An estimator, and what it says of the training moments where those that it is asked about were left out of its
    fit: as a service judges it before it is asked about others."""

    says: Estimator
    unseen: Floats


def folds(
    transcripts: Sequence[Transcript], count: int = FOLDS, seed: int = 0, *, task_of: Callable[[str], str] = str
) -> list[Fold]:
    """Each fold gets as many tasks as another, give or take one. task_of: what a prompt's name says of its text;
    prompts of one task are in one fold, so that no text that is asked about was trained on. Raises ValueError for
    fewer than 3, TooFewError for too few tasks."""
    if count < 3:
        raise ValueError(f"folds must be >= 3, one to test and two to train and validate, are {count}")
    tasks = {task_of(transcript.prompt_id) for transcript in transcripts}
    if len(tasks) < count:
        raise TooFewError(f"{len(tasks)} prompts are too few for {count} folds: harvest more rollouts")
    shuffled = sorted(tasks, key=lambda task: (zlib.crc32(f"{seed}/{task}".encode()), task))
    number = {task: at % count for at, task in enumerate(shuffled)}
    dealt: list[list[int]] = [[] for _ in range(count)]
    for index, transcript in enumerate(transcripts):
        dealt[number[task_of(transcript.prompt_id)]].append(index)
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
    numbers (the head without text), oracle; with `states` also prompt-only (told once, before the first step) and
    learned; chosen: of siblings, numbers and learned the best on the training prompts, as `training.train` chooses what
    is served. Raises TooFewError."""
    answers: dict[str, list[Floats]] = {}
    if states is not None:
        every = [moment for fold in dealt for moment in (*fold.train, *fold.test)]
        states.read(every, track)
    for fold in dealt:
        average = PromptAverage(fold.before)
        told = {
            "history": average.predict(fold.test, transcripts),
            "oracle": truth(fold.test),
            "boosted": Boosted(fold.train).predict(fold.test),
        }
        candidates = _candidates(fold, states, hidden_size, how)
        told |= {name: candidate.says(fold.test) for name, candidate in candidates.items()}
        losses = {name: _loss(candidate.unseen, fold.train) for name, candidate in candidates.items()}
        told["chosen"] = told[min(losses, key=losses.__getitem__)]
        if states is not None:
            told["prompt-only"] = _prompt_only(fold, states, hidden_size, how)
        for name, said in told.items():
            answers.setdefault(name, []).append(said)
    return Asked(
        [moment for fold in dealt for moment in fold.test],
        transcripts,
        {name: np.concatenate(said) for name, said in answers.items()},
        np.repeat(np.arange(len(dealt)), [len(fold.test) for fold in dealt]),
    )


def _candidates(fold: Fold, states: States | None, hidden_size: int, how: Fitting | None) -> dict[str, Fitted]:
    """What a service chooses from."""
    found = {
        "siblings": Fitted(forecasts, forecasts(fold.train)),
        "numbers": _head(fold.train, fold.apart, None, hidden_size, how),
    }
    if states is not None:
        found["learned"] = _head(fold.train, fold.apart, states, hidden_size, how)
    return found


def _loss(quantiles: Floats, moments: Sequence[Moment]) -> float:
    """Mean pinball loss."""
    left = np.array([moment.remaining_tokens for moment in moments], np.float64)
    censored = np.array([moment.censored for moment in moments])
    return float(pinball_each(quantiles, left, censored).mean())


def _fold(transcripts: Sequence[Transcript], dealt: Sequence[Sequence[int]], number: int) -> Fold:
    test = dealt[number]
    numbers = {index: at - (at > number) for at, own in enumerate(dealt) if at != number for index in own}
    train = list(numbers)
    before = [transcripts[index] for index in train]

    def of(part: Sequence[int], found: list[Moment]) -> list[Moment]:
        return [replace(moment, index=part[moment.index]) for moment in found]

    def asked(turn: int) -> bool:
        return turn <= LAST_TURN

    learned = of(train, replay_apart(before, list(numbers.values()), asked=asked))
    judged = of(test, replay([transcripts[index] for index in test], before, asked=asked))
    return Fold(learned, judged, [numbers[moment.index] for moment in learned], before)


def _head(
    train: Sequence[Moment], apart: Sequence[int], states: States | None, hidden_size: int, how: Fitting | None
) -> Fitted:
    """Without `states` on the numbers alone."""

    def made(moments: Sequence[Moment]) -> Examples:
        if states is None:
            return examples(moments, torch.zeros(len(moments), hidden_size), [False] * len(moments))
        return examples(moments, *states.read(moments))

    told, folds = made(train), torch.tensor(apart)
    head = fit(told, folds, hidden_size, how).head
    judged, quantiles = unseen(head, told, folds)
    logs = head.shifted(quantiles, judged.features)[:, 0]
    return Fitted(lambda moments: remaining_tokens(head, made(moments)), np.expm1(logs.numpy().astype(np.float64)))


def _prompt_only(fold: Fold, states: States, hidden_size: int, how: Fitting | None) -> Floats:
    """Of the test: asked before the first step alone; later that, less what was sampled since."""
    first = [at for at, moment in enumerate(fold.train) if moment.turn == 0]
    apart = [fold.apart[at] for at in first]
    head = _head([fold.train[at] for at in first], apart, states, hidden_size, how)
    begins = [moment for moment in fold.test if moment.turn == 0]
    of = {moment.index: row for moment, row in zip(begins, head.says(begins), strict=True)}
    done = np.array([moment.gen_tokens for moment in fold.test], np.float64)[:, None]
    totals = np.stack([of[moment.index] for moment in fold.test])
    return np.maximum(totals - done, OVERRUN * done)
