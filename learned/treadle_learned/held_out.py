"""Test every prompt by estimators that were fitted without it: prompts are dealt over folds, and each fold is asked
about by estimators fitted on the others.

For data sets too small to hold a part out: a fifth of 200 trajectories has four long ones. Invariant: an estimator has
seen nothing of a prompt that it is asked about, neither in the test nor where validation chooses between estimators.

Two baselines stand beside the learned heads. `PromptAverage` predicts from history alone, which Heddle 4.1 calls
static. `Boosted` has gradient-boosted trees on the numeric features, and reads no text.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from treadle_learned.errors import TooFewError
from treadle_learned.examples import Examples, States, Track, without_text
from treadle_learned.fitting import Fitting, fit
from treadle_learned.head import predict_held_out, remaining_tokens
from treadle_learned.moments import Moment, replay, replay_apart
from treadle_learned.scores import QUANTILES, Asked, Flags, Floats, forecasts, pinball_each, truth
from treadle_learned.transcript import Transcript

FOLDS = 5
LAST_TURN = 8  # later questions are left out: the report ends there, and states cost a pass over the text

NEWEST = 0.3  # the weight of the newest trajectory in a prompt's average
OVERRUN = 0.25  # of what it has done is taken to be left of a trajectory that has outlived its average
Z_90 = 1.2816  # standard deviations from the median to p90 of a normal distribution
WIDEST = 1.0  # the spread of ln tokens where too little came before to tell
ROUNDS = 3  # of fitting trees to what is censored

Estimator = Callable[[Sequence[Moment]], Floats]  # remaining tokens [n, 3]


@dataclass(frozen=True)
class Fold:
    """Moments of both parts, numbered by all transcripts. apart: the fold, from 0, that each moment of train was dealt
    to. before: the transcripts of train."""

    train: list[Moment]
    test: list[Moment]
    apart: list[int]
    before: list[Transcript]


@dataclass(frozen=True)
class _Candidate:
    """An estimator, and its predictions for the training moments by members that were fitted without them: by these a
    service chooses before it is asked about others."""

    predict: Estimator
    held_out: Floats


def deal(
    transcripts: Sequence[Transcript], count: int = FOLDS, seed: int = 0, *, task_of: Callable[[str], str] = str
) -> list[Fold]:
    """Deal the prompts over folds with the same number of tasks, give or take one. task_of: the part of a prompt's
    name that names its text; prompts of one task are in one fold, so that no text in a test was trained on. Raises
    ValueError for fewer than 3 folds, TooFewError for too few tasks."""
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


def ask_estimators(
    transcripts: Sequence[Transcript],
    dealt: Sequence[Fold],
    states: States | None,
    *,
    hidden_size: int,
    how: Fitting | None = None,
    track: Track = lambda over, _: over,
) -> Asked:
    """The test questions of all folds with each estimator's answers: history, siblings (so far, then history), boosted,
    numbers (the head without text), oracle; with `states` also prompt-only (asked once, before the first step) and
    learned; chosen: of siblings, numbers and learned the best on the training prompts, as `training.train` chooses what
    is served. Raises TooFewError."""
    answers: dict[str, list[Floats]] = {}
    if states is not None:
        every = [moment for fold in dealt for moment in (*fold.train, *fold.test)]
        states.examples(every, track)
    for fold in dealt:
        average = PromptAverage(fold.before)
        answer = {
            "history": average.predict(fold.test, transcripts),
            "oracle": truth(fold.test),
            "boosted": Boosted(fold.train).predict(fold.test),
        }
        candidates = _candidates(fold, states, hidden_size, how)
        answer |= {name: candidate.predict(fold.test) for name, candidate in candidates.items()}
        losses = {name: _loss(candidate.held_out, fold.train) for name, candidate in candidates.items()}
        answer["chosen"] = answer[min(losses, key=losses.__getitem__)]
        if states is not None:
            answer["prompt-only"] = _prompt_only(fold, states, hidden_size, how)
        for name, quantiles in answer.items():
            answers.setdefault(name, []).append(quantiles)
    return Asked(
        [moment for fold in dealt for moment in fold.test],
        transcripts,
        {name: np.concatenate(each) for name, each in answers.items()},
        np.repeat(np.arange(len(dealt)), [len(fold.test) for fold in dealt]),
    )


def _candidates(fold: Fold, states: States | None, hidden_size: int, how: Fitting | None) -> dict[str, _Candidate]:
    """The estimators that a service chooses from."""
    found = {
        "siblings": _Candidate(forecasts, forecasts(fold.train)),
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

    trained = of(train, replay_apart(before, list(numbers.values()), asked=asked))
    tested = of(test, replay([transcripts[index] for index in test], before, asked=asked))
    return Fold(trained, tested, [numbers[moment.index] for moment in trained], before)


def _head(
    train: Sequence[Moment], apart: Sequence[int], states: States | None, hidden_size: int, how: Fitting | None
) -> _Candidate:
    """A head fitted to the states, or without `states` to the numbers alone."""

    def read(moments: Sequence[Moment]) -> Examples:
        return without_text(moments, hidden_size) if states is None else states.examples(moments)

    examples, folds = read(train), torch.tensor(apart)
    head = fit(examples, folds, hidden_size, how).head
    held_out, quantiles = predict_held_out(head, examples, folds)
    logs = head.apply_shift(quantiles, held_out.features)[:, 0]
    return _Candidate(lambda moments: remaining_tokens(head, read(moments)), np.expm1(logs.numpy().astype(np.float64)))


def _prompt_only(fold: Fold, states: States, hidden_size: int, how: Fitting | None) -> Floats:
    """The answers of a head that is asked before the first step only: later that, less what was sampled since."""
    first = [at for at, moment in enumerate(fold.train) if moment.turn == 0]
    apart = [fold.apart[at] for at in first]
    head = _head([fold.train[at] for at in first], apart, states, hidden_size, how)
    begins = [moment for moment in fold.test if moment.turn == 0]
    of = {moment.index: row for moment, row in zip(begins, head.predict(begins), strict=True)}
    done = np.array([moment.gen_tokens for moment in fold.test], np.float64)[:, None]
    totals = np.stack([of[moment.index] for moment in fold.test])
    return np.maximum(totals - done, OVERRUN * done)


class PromptAverage:
    """An exponential moving average of ln(1 + tokens) for each prompt; a prompt without history has the average of all.

    The spread is that of all earlier trajectories around their own prompt's average before them. Of the trajectory
    itself only its sampled tokens are used. A cut trajectory counts as it is: that is what such predictors do. earlier:
    in the order in which they ended.
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
            self._of_prompt[transcript.prompt_id] = length if known is None else known + NEWEST * (length - known)
            self._of_all += (length - self._of_all) / (number + 1)
        self._spread = float(np.std(errors)) if len(errors) > 1 else WIDEST

    def predict(self, moments: Sequence[Moment], transcripts: Sequence[Transcript]) -> Floats:
        """Remaining tokens [n, 3]."""
        logs = np.array([self._of_prompt.get(transcripts[moment.index].prompt_id, self._of_all) for moment in moments])
        done = np.array([moment.gen_tokens for moment in moments], np.float64)
        totals = np.expm1(logs[:, None] + self._spread * np.array([-Z_90, 0.0, Z_90]))
        return np.maximum(totals - done[:, None], OVERRUN * done[:, None])


class Boosted:
    """One model a quantile of ln(1 + remaining tokens). Raises ValueError for no moments.

    A censored answer is taken to be what the model itself predicts, where that is longer than it reached, and the
    models are fitted again: the fixed point is the fit under a loss that is one-sided for the censored.
    """

    def __init__(self, moments: Sequence[Moment], seed: int = 0) -> None:
        if not moments:
            raise ValueError("moments must hold at least one")
        inputs, reached = _inputs(moments), np.log1p([moment.remaining_tokens for moment in moments])
        censored = np.array([moment.censored for moment in moments])
        with threadpool_limits(1):  # a few thousand rows gain nothing from threads that spin against whatever else runs
            self._models = [_fit_trees(inputs, reached, censored, level, seed) for level in QUANTILES]

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
