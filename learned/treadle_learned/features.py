"""Numbers that speak of a trajectory at the end of a step: its own progress, its siblings so far, and what the
estimators without a model make of them.

Purpose: what joins the text in the learned predictor (Heddle 4.1 has text alone), and all that the gradient-boosted
baseline sees. Invariants: nothing that is known later than the moment; the vector has one entry a name of FEATURES, in
their order, all finite. Counts of tokens, turns and versions are ln(1 + x).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_core.ranking.estimator import Forecast, Progress
from treadle_core.ranking.evidence import Ended, Running

Vector = npt.NDArray[np.float32]

FEATURES = (
    "turn",
    "gen_tokens",
    "context_tokens",
    "prompt_tokens",
    "last_step_tokens",
    "longest_step_tokens",
    "mean_step_tokens",
    "last_obs_tokens",
    "room_tokens",
    "has_cap",
    "ended_siblings",
    "running_siblings",
    "ended_siblings_mean_tokens",
    "ended_siblings_most_tokens",
    "running_siblings_most_tokens",
    "running_siblings_ahead",
    "forecast_tokens_p10",
    "forecast_tokens_p50",
    "forecast_tokens_p90",
    "forecast_turns_p50",
    "forecast_source",
    "versions_behind",
)


@dataclass(frozen=True, slots=True)
class Steps:
    """Of a trajectory's finished steps; last_obs_tokens: that its last finished tool answered. All 0 before the
    first."""

    last_tokens: int = 0
    longest_tokens: int = 0
    last_obs_tokens: int = 0

    def after(self, gen_tokens: int, obs_tokens: int) -> Steps:
        """And one more."""
        return Steps(gen_tokens, max(self.longest_tokens, gen_tokens), obs_tokens)


def versions_behind(now: int | None, sampled_by: float | None) -> float:
    """By how many versions the policy's weights have moved on since they sampled what is known of a trajectory
    (`Evidence.sampled_by`): as they learn, lengths drift. 0 where either is not known."""
    return 0.0 if now is None or sampled_by is None else max(0.0, now - sampled_by)


def features(
    progress: Progress,
    steps: Steps,
    ended: Collection[Ended],
    running: Collection[Running],
    forecast: Forecast,
    behind: float = 0.0,
) -> Vector:
    """The vector. ended, running: of its group, itself left out; forecast: of the estimators without a model; behind:
    `versions_behind`."""
    room = max(0, progress.max_total_tokens - progress.gen_tokens) if progress.max_total_tokens else 0
    ahead = sum(each.gen_tokens > progress.gen_tokens for each in running)
    tokens, turns = forecast.remaining_tokens, forecast.remaining_turns
    values = (
        math.log1p(progress.turn),
        math.log1p(progress.gen_tokens),
        math.log1p(progress.context_tokens),
        math.log1p(progress.prompt_tokens),
        math.log1p(steps.last_tokens),
        math.log1p(steps.longest_tokens),
        math.log1p(progress.gen_tokens / progress.turn) if progress.turn else 0.0,
        math.log1p(steps.last_obs_tokens),
        math.log1p(room),
        1.0 if progress.max_total_tokens else 0.0,
        math.log1p(len(ended)),
        math.log1p(len(running)),
        math.log1p(sum(each.gen_tokens for each in ended) / len(ended)) if ended else 0.0,
        math.log1p(max((each.gen_tokens for each in ended), default=0)),
        math.log1p(max((each.gen_tokens for each in running), default=0)),
        ahead / len(running) if running else 0.0,
        math.log1p(tokens.p10),
        math.log1p(tokens.p50),
        math.log1p(tokens.p90),
        math.log1p(turns.p50),
        float(forecast.source),
        math.log1p(behind),
    )
    return np.array(values, np.float32)
