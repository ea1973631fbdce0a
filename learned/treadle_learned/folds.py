"""Every trajectory as a test: prompts are dealt over folds, and each fold is asked about by estimators that were fitted
on the others.

For data sets too small to hold a part out: a fifth of 200 trajectories has four long ones. Invariant: of a prompt that
an estimator is asked about it has seen nothing; the validation prompts of a fit are neither its own nor the test's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from treadle_learned.boosted import Boosted
from treadle_learned.comparison import Asked, forecasts, truth
from treadle_learned.errors import TooFewError
from treadle_learned.examples import States, Track, examples
from treadle_learned.fitting import Fitting, fit
from treadle_learned.head import QuantileHead
from treadle_learned.history import OVERRUN, PromptAverage
from treadle_learned.moments import Moment, replay, replay_apart
from treadle_learned.scores import Floats
from treadle_learned.transcript import Transcript

FOLDS = 5
LAST_TURN = 12  # questions beyond it are left out: the report ends at step 8, and states cost a pass over the text


@dataclass(frozen=True)
class Fold:
    """Moments of all three parts, numbered by the transcripts of the whole."""

    train: list[Moment]
    validation: list[Moment]
    test: list[Moment]
    before: list[Transcript]


def folds(transcripts: Sequence[Transcript], count: int = FOLDS, seed: int = 0) -> list[Fold]:
    """Raises ValueError for fewer than 3, TooFewError for too few prompts."""
    if count < 3:
        raise ValueError(f"folds must be >= 3, one each to train, validate and test, are {count}")
    dealt: list[list[int]] = [[] for _ in range(count)]
    for index, transcript in enumerate(transcripts):
        dealt[zlib.crc32(f"{seed}/{transcript.prompt_id}".encode()) % count].append(index)
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
    numbers (the head without text), oracle; with `states` also prompt-only (told once, before the first step) and
    learned. Raises TooFewError."""
    moments: list[Moment] = []
    answers: dict[str, list[Floats]] = {}
    if states is not None:
        every = [moment for fold in dealt for moment in (*fold.train, *fold.validation, *fold.test)]
        states.read(every, track)
    for fold in dealt:
        moments += fold.test
        told = {
            "history": PromptAverage(fold.before).predict(fold.test, transcripts),
            "siblings": forecasts(fold.test),
            "boosted": Boosted(fold.train).predict(fold.test),
            "numbers": _head_says(fold.train, fold.validation, fold.test, None, hidden_size, how),
            "oracle": truth(fold.test),
        }
        if states is not None:
            told["prompt-only"] = _prompt_only(fold, states, hidden_size, how)
            told["learned"] = _head_says(fold.train, fold.validation, fold.test, states, hidden_size, how)
        for name, said in told.items():
            answers.setdefault(name, []).append(said)
    return Asked(moments, transcripts, {name: np.concatenate(said) for name, said in answers.items()})


def _fold(transcripts: Sequence[Transcript], dealt: Sequence[Sequence[int]], number: int) -> Fold:
    count = len(dealt)
    test, validation = dealt[number], dealt[(number + 1) % count]
    train = [index for at in range(count) if at not in (number, (number + 1) % count) for index in dealt[at]]
    before = [transcripts[index] for index in train]

    def of(part: Sequence[int], found: list[Moment]) -> list[Moment]:
        return [replace(moment, index=part[moment.index]) for moment in found]

    def asked(turn: int) -> bool:
        return turn <= LAST_TURN

    return Fold(
        of(train, replay_apart(before, asked=asked)),
        of(validation, replay([transcripts[index] for index in validation], before, asked=asked)),
        of(test, replay([transcripts[index] for index in test], before, asked=asked)),
        before,
    )


def _head_says(
    train: Sequence[Moment],
    validation: Sequence[Moment],
    test: Sequence[Moment],
    states: States | None,
    hidden_size: int,
    how: Fitting | None,
) -> Floats:
    def made(moments: Sequence[Moment]) -> tuple[Sequence[Moment], torch.Tensor, list[bool]]:
        if states is None:
            return moments, torch.zeros(len(moments), hidden_size), [False] * len(moments)
        return moments, *states.read(moments)

    head = fit(examples(*made(train)), examples(*made(validation)), hidden_size, how).head
    return predicted(head, *made(test))


def _prompt_only(fold: Fold, states: States, hidden_size: int, how: Fitting | None) -> Floats:
    """Asked before the first step alone; later that, less what was sampled since."""

    def first(moments: Sequence[Moment]) -> list[Moment]:
        return [moment for moment in moments if moment.turn == 0]

    begins = first(fold.test)
    said = _head_says(first(fold.train), first(fold.validation), begins, states, hidden_size, how)
    of = {moment.index: row for moment, row in zip(begins, said, strict=True)}
    done = np.array([moment.gen_tokens for moment in fold.test], np.float64)[:, None]
    totals = np.stack([of[moment.index] for moment in fold.test])
    return np.maximum(totals - done, OVERRUN * done)


@torch.inference_mode()
def predicted(head: QuantileHead, moments: Sequence[Moment], hidden: torch.Tensor, has_text: Sequence[bool]) -> Floats:
    """Remaining tokens [n, 3]."""
    told = examples(moments, hidden, has_text)
    logs = head(told.hidden, told.features, told.has_text)[:, 0]
    return np.asarray(torch.expm1(logs).numpy(), np.float64)
