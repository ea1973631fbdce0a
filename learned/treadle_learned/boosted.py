"""Gradient-boosted trees on the numeric features: the baseline that reads no text.

One model a quantile of ln(1 + remaining tokens). What is censored is taken for as long as the model itself thinks,
where that is longer than it reached, and the models are fitted again: the fixed point is the fit under a loss that is
one-sided for the censored (`scores.pinball`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from treadle_learned.moments import Moment
from treadle_learned.scores import QUANTILES, Floats

ROUNDS = 3  # of fitting what is censored


class Boosted:
    """Fitted on moments; `predict` gives remaining tokens [n, 3]. Raises ValueError for no moments."""

    def __init__(self, moments: Sequence[Moment], seed: int = 0) -> None:
        if not moments:
            raise ValueError("moments must hold at least one")
        inputs, reached = _inputs(moments), np.log1p([moment.remaining_tokens for moment in moments])
        censored = np.array([moment.censored for moment in moments])
        with threadpool_limits(1):  # a few thousand rows gain nothing from threads that spin against whatever else runs
            self._models = [_fitted(inputs, reached, censored, level, seed) for level in QUANTILES]

    def predict(self, moments: Sequence[Moment]) -> Floats:
        """In the order of quantiles, which boosting alone does not promise."""
        inputs = _inputs(moments)
        with threadpool_limits(1):
            logs = np.column_stack([model.predict(inputs) for model in self._models])
        return np.asarray(np.expm1(np.maximum(np.sort(logs, axis=1), 0.0)), np.float64)


def _fitted(
    inputs: Floats, reached: Floats, censored: np.ndarray[tuple[int], np.dtype[np.bool_]], level: float, seed: int
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
