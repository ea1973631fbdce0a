"""Test every prompt by estimators that were fitted without it: prompts are dealt over folds, and
each fold is asked about by estimators fitted on the others.

For data sets too small to hold a part out: a fifth of 200 trajectories has four long ones.
Invariant: an estimator has seen nothing of a prompt that it is asked about, neither in the test nor
where validation chooses between estimators.

Two baselines stand beside the learned heads: `PromptAverage` predicts from history alone; `Boosted`
has gradient-boosted trees on the numeric features, and reads no text.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits
from treadle_learned.examples import Examples, States, Track, without_text
from treadle_learned.head import predict_held_out, remaining_tokens
from treadle_learned.moments import Moment, replay, replay_apart
from treadle_learned.scores import (
    QUANTILES,
    Asked,
    Flags,
    Floats,
    Numbers,
    PromptAverage,
    forecasts,
    pinball_each,
    subtract_sampled,
    truth,
)
from treadle_learned.training import Fitting, fit
from treadle_learned.transcript import LearnedError, Transcript

FOLDS = 5
LAST_TURN = (
    8  # later questions are left out: the report ends there, and states cost a pass over the text
)

ROUNDS = 3  # of fitting trees to what is censored

Read = Callable[[Sequence[Moment]], Examples]


@dataclass(frozen=True)
class Fold:
    """Moments of both parts, numbered by all transcripts. apart: the fold, from 0, that each moment
    of train was dealt to. before: the transcripts of train."""

    train: list[Moment]
    test: list[Moment]
    apart: list[int]
    before: list[Transcript]


def deal(
    transcripts: Sequence[Transcript],
    count: int = FOLDS,
    seed: int = 0,
    *,
    task_of: Callable[[str], str] = str,
) -> list[Fold]:
    """Deal the prompts over folds with the same number of tasks, give or take one. task_of: the
    part of a prompt's name that names its text; prompts of one task are in one fold, so that no
    text in a test was trained on. Raises ValueError for fewer than 3 folds, LearnedError for too
    few tasks."""
    if count < 3:
        raise ValueError(
            f"folds must be >= 3, one to test and two to train and validate, are {count}"
        )
    tasks = {task_of(transcript.prompt_id) for transcript in transcripts}
    if len(tasks) < count:
        raise LearnedError(
            f"{len(tasks)} prompts are too few for {count} folds: harvest more rollouts"
        )
    shuffled = sorted(tasks, key=lambda task: (zlib.crc32(f"{seed}/{task}".encode()), task))
    number = {task: at % count for at, task in enumerate(shuffled)}
    dealt: list[list[int]] = [[] for _ in range(count)]
    for index, transcript in enumerate(transcripts):
        dealt[number[task_of(transcript.prompt_id)]].append(index)
    return [_fold(transcripts, dealt, number) for number in range(count)]


def ask_estimators(
    transcripts: Sequence[Transcript],
    dealt: Sequence[Fold],
    states: States | None,
    *,
    hidden_size: int,
    how: Fitting | None = None,
    track: Track = lambda over, _: over,
) -> Asked:
    """The test questions of all folds with each estimator's answers: history, siblings (so far,
    then history), boosted, numbers (the head without text), oracle; with `states` also prompt-only
    (asked once, before the first step) and learned; chosen: of siblings, numbers and learned the
    best on the training prompts, as `training.train` chooses what is served. Raises LearnedError.
    """
    if states is not None:
        states.examples([moment for fold in dealt for moment in (*fold.train, *fold.test)], track)
    answers = [_ask_about(fold, states, hidden_size, how) for fold in dealt]
    return Asked(
        [moment for fold in dealt for moment in fold.test],
        transcripts,
        {name: np.concatenate([of_fold[name] for of_fold in answers]) for name in answers[0]},
        np.repeat(np.arange(len(dealt)), [len(fold.test) for fold in dealt]),
    )


def pool(deals: Sequence[Asked]) -> Asked:
    """The answers of several ways to deal the prompts of the same transcripts into folds: the
    chance of one deal counts less. Every fold of every deal is a part of its own."""
    parts: list[Numbers] = []
    for deal in deals:
        parts.append(deal.parts + (1 + parts[-1].max() if parts else 0))
    return Asked(
        [moment for deal in deals for moment in deal.moments],
        deals[0].transcripts,
        {name: np.concatenate([deal.answers[name] for deal in deals]) for name in deals[0].answers},
        np.concatenate(parts),
    )


def _ask_about(
    fold: Fold, states: States | None, hidden_size: int, how: Fitting | None
) -> dict[str, Floats]:
    """Each estimator's answers to the test questions of one fold."""
    answers = {
        "history": PromptAverage(fold.before).predict(fold.test),
        "oracle": truth(fold.test),
        "boosted": Boosted(fold.train).predict(fold.test),
        "siblings": forecasts(fold.test),
    }
    # A service chooses by what each estimator says of training prompts that it was not fitted on.
    held_out = {"siblings": forecasts(fold.train)}
    readers: dict[str, Read] = {"numbers": partial(without_text, hidden_size=hidden_size)}
    if states is not None:
        readers["learned"] = states.examples
    for name, read in readers.items():
        answers[name], held_out[name] = _fit_and_ask(fold.train, fold.apart, fold.test, read, how)
    left, censored = truth(fold.train)[:, 0], np.array([moment.censored for moment in fold.train])
    losses = {name: pinball_each(said, left, censored).mean() for name, said in held_out.items()}
    answers["chosen"] = answers[min(losses, key=losses.__getitem__)]
    if states is not None:
        answers["prompt-only"] = _ask_before_the_first_step(fold, states, how)
    return answers


def _fit_and_ask(
    train: Sequence[Moment],
    apart: Sequence[int],
    test: Sequence[Moment],
    read: Read,
    how: Fitting | None,
) -> tuple[Floats, Floats]:
    """The answers of a head to the test questions, and of its members to the training questions
    that each was not fitted on."""
    examples, folds = read(train), torch.tensor(apart)
    head = fit(examples, folds, how).head
    held_out, quantiles = predict_held_out(head, examples, folds)
    logs = head.finish(quantiles, held_out.features)[:, 0]
    return remaining_tokens(head, read(test)), np.expm1(logs.numpy().astype(np.float64))


def _ask_before_the_first_step(fold: Fold, states: States, how: Fitting | None) -> Floats:
    """The answers of a head that is asked before the first step only: later that, less what was
    sampled since."""
    first = [at for at, moment in enumerate(fold.train) if moment.turn == 0]
    begins = [moment for moment in fold.test if moment.turn == 0]
    train, apart = [fold.train[at] for at in first], [fold.apart[at] for at in first]
    said, _ = _fit_and_ask(train, apart, begins, states.examples, how)
    total = {moment.index: row for moment, row in zip(begins, said, strict=True)}
    return subtract_sampled(np.stack([total[moment.index] for moment in fold.test]), fold.test)


def _fold(transcripts: Sequence[Transcript], dealt: Sequence[Sequence[int]], number: int) -> Fold:
    test = dealt[number]
    numbers = {
        index: at - (at > number) for at, own in enumerate(dealt) if at != number for index in own
    }
    train = list(numbers)
    before = [transcripts[index] for index in train]

    def by_transcript(part: Sequence[int], found: list[Moment]) -> list[Moment]:
        return [replace(moment, index=part[moment.index]) for moment in found]

    def asked(turn: int) -> bool:
        return turn <= LAST_TURN

    trained = by_transcript(train, replay_apart(before, list(numbers.values()), asked=asked))
    tested = by_transcript(
        test, replay([transcripts[index] for index in test], before, asked=asked)
    )
    return Fold(trained, tested, [numbers[moment.index] for moment in trained], before)


class Boosted:
    """One model a quantile of ln(1 + remaining tokens). Raises ValueError for no moments.

    A censored answer is taken to be what the model itself predicts, where that is longer than it
    reached, and the models are fitted again: the fixed point is the fit under a loss that is
    one-sided for the censored.
    """

    def __init__(self, moments: Sequence[Moment], seed: int = 0) -> None:
        if not moments:
            raise ValueError("moments must hold at least one")
        inputs, reached = (
            _inputs(moments),
            np.log1p([moment.remaining_tokens for moment in moments]),
        )
        censored = np.array([moment.censored for moment in moments])
        with threadpool_limits(
            1
        ):  # a few thousand rows gain nothing from threads that spin against whatever else runs
            self._models = [
                _fit_trees(inputs, reached, censored, level, seed) for level in QUANTILES
            ]

    def predict(self, moments: Sequence[Moment]) -> Floats:
        """Remaining tokens [n, 3], sorted, which boosting alone does not promise."""
        inputs = _inputs(moments)
        with threadpool_limits(1):
            logs = np.column_stack([model.predict(inputs) for model in self._models])
        return np.asarray(np.expm1(np.maximum(np.sort(logs, axis=1), 0.0)), np.float64)


def _fit_trees(
    inputs: Floats, reached: Floats, censored: Flags, level: float, seed: int
) -> HistGradientBoostingRegressor:
    target = reached
    for _ in range(ROUNDS if censored.any() else 1):
        model = HistGradientBoostingRegressor(
            loss="quantile",
            quantile=level,
            learning_rate=0.05,
            max_iter=200,
            max_leaf_nodes=15,
            min_samples_leaf=min(20, max(2, len(target) // 10)),
            l2_regularization=1.0,
            random_state=seed,
        ).fit(inputs, target)
        target = np.where(censored, np.maximum(reached, model.predict(inputs)), reached)
    return model


def _inputs(moments: Sequence[Moment]) -> Floats:
    return np.stack([moment.features for moment in moments]).astype(np.float64)
