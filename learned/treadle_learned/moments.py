"""Moments of a trajectory at which a predictor answers how much is left, with what is known then
and the answer.

A moment comes before the first step and after each step but the last (Heddle 4.1 decomposes history
so). Its features are numbers: the trajectory's own progress, its siblings so far, and the answers
of the estimators without a model. They stand beside the text in the learned predictor, and they are
all that the gradient-boosted baseline sees.

Invariants: nothing is known that came later than the moment. All trajectories of a replay run side
by side at one speed, a token at a time and without tools, so that siblings are as far as an
undisturbed rollout would have them. A feature vector has one entry a name of FEATURES, in their
order, all finite; counts of tokens, turns and versions are ln(1 + x).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from treadle_core.ranking.estimator import Estimator, Forecast, Prior, Progress
from treadle_core.ranking.evidence import Ended, Evidence

from treadle_learned.transcript import Transcript, version_number

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
    """Finished steps of a trajectory; last_obs_tokens: tokens of the last finished tool's answer.
    All 0 before the first."""

    last_tokens: int = 0
    longest_tokens: int = 0
    last_obs_tokens: int = 0

    def after(self, gen_tokens: int, obs_tokens: int) -> Steps:
        """Return the steps with one more."""
        return Steps(gen_tokens, max(self.longest_tokens, gen_tokens), obs_tokens)


@dataclass(frozen=True)
class Moment:
    """Question about trajectory `index` of those replayed, after `turn` steps. remaining_tokens,
    remaining_turns: the answer, or the least it can be where the transcript is censored. forecast:
    of the estimators without a model."""

    index: int
    prompt_id: str
    turn: int
    gen_tokens: int
    features: Vector
    forecast: Forecast
    remaining_tokens: int
    remaining_turns: int
    censored: bool


def features_of(
    progress: Progress,
    steps: Steps,
    evidence: Evidence,
    forecast: Forecast,
    weight_version: str = "",
) -> Vector | None:
    """Return the features of a trajectory by `evidence`; None where its group is not known.
    forecast: of the estimators without a model. weight_version: the version that samples the
    trajectory."""
    found = evidence.group_of(progress.trajectory_id, progress.prompt_id)
    if found is None:
        return None
    ended = found[1].ended.values()
    running = [each for name, each in found[1].running.items() if name != progress.trajectory_id]
    room = (
        max(0, progress.max_total_tokens - progress.gen_tokens) if progress.max_total_tokens else 0
    )
    ahead = sum(each.gen_tokens > progress.gen_tokens for each in running)
    tokens, turns = forecast.remaining_tokens, forecast.remaining_turns
    # By how many versions the weights have moved on since they sampled what is known of the prompt:
    # lengths drift.
    now, sampled_by = (
        version_number(weight_version),
        evidence.mean_version(progress.trajectory_id, progress.prompt_id),
    )
    behind = 0.0 if now is None or sampled_by is None else max(0.0, now - sampled_by)
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


def replay(
    transcripts: Sequence[Transcript],
    earlier: Iterable[Transcript] = (),
    *,
    asked: Callable[[int], bool] = lambda turn: True,
) -> list[Moment]:
    """Return the moments of all transcripts for whose turn `asked` is true, in the order in which
    they would have come. earlier: those that ended before the first begins."""
    evidence = Evidence()
    for transcript in earlier:
        evidence.close_trajectory(ended(transcript))
    estimator = Estimator(evidence, Prior())
    tracks = [_Track(index, transcript) for index, transcript in enumerate(transcripts)]
    moments: list[Moment] = []
    for track, turn in _in_time(tracks):
        transcript = track.transcript
        if turn == 0:
            evidence.open_trajectory(
                transcript.trajectory_id, transcript.rollout_id, transcript.prompt_id
            )
        else:
            track.step(turn - 1)
            evidence.add_step(
                transcript.trajectory_id, turn - 1, transcript.turns[turn - 1].gen_tokens
            )
        if turn == len(transcript.turns):
            evidence.close_trajectory(ended(transcript))
        elif asked(turn):
            moments.append(track.moment(turn, evidence, estimator))
    return moments


def replay_apart(
    transcripts: Sequence[Transcript],
    folds: Sequence[int],
    *,
    asked: Callable[[int], bool] = lambda turn: True,
) -> list[Moment]:
    """Return the moments of training transcripts: one fold of the prompts at a time, with the other
    folds as history. folds: the fold of each transcript; a prompt is in one fold.

    So they know as much of earlier trajectories as later questions will, and nothing of themselves;
    replayed all at once they would be the first of a mesh, with a prior for history.
    """
    moments: list[Moment] = []
    for number in sorted(set(folds)):
        own = [index for index, fold in enumerate(folds) if fold == number]
        others = [transcripts[index] for index, fold in enumerate(folds) if fold != number]
        found = replay([transcripts[index] for index in own], others, asked=asked)
        moments += [replace(moment, index=own[moment.index]) for moment in found]
    return moments


def ended(transcript: Transcript) -> Ended:
    """Return a transcript as evidence."""
    return Ended(
        transcript.trajectory_id,
        transcript.rollout_id,
        transcript.prompt_id,
        transcript.gen_tokens,
        len(transcript.turns),
        own_end=not transcript.censored,
        weight_version=version_number(transcript.weight_version),
    )


class _Track:
    """Progress of one trajectory in the replay."""

    def __init__(self, index: int, transcript: Transcript) -> None:
        self.index = index
        self.transcript = transcript
        self._gen_tokens = 0
        self._context_tokens = transcript.prompt_tokens
        self._running_tool_tokens = 0  # what its tool will answer is not known at the end of a step
        self._steps = Steps()

    def step(self, turn: int) -> None:
        done = self.transcript.turns[turn]
        self._gen_tokens += done.gen_tokens
        self._context_tokens += self._running_tool_tokens + done.gen_tokens
        self._steps = self._steps.after(done.gen_tokens, self._running_tool_tokens)
        self._running_tool_tokens = done.obs_tokens

    def moment(self, turn: int, evidence: Evidence, estimator: Estimator) -> Moment:
        transcript = self.transcript
        progress = Progress(
            transcript.trajectory_id,
            transcript.prompt_id,
            turn,
            self._gen_tokens,
            self._context_tokens,
            transcript.prompt_tokens,
            transcript.max_total_tokens,
        )
        forecast = estimator.estimate(progress)
        features = features_of(progress, self._steps, evidence, forecast, transcript.weight_version)
        assert features is not None, "it was opened"
        return Moment(
            index=self.index,
            prompt_id=transcript.prompt_id,
            turn=turn,
            gen_tokens=self._gen_tokens,
            features=features,
            forecast=forecast,
            remaining_tokens=transcript.gen_tokens - self._gen_tokens,
            remaining_turns=len(transcript.turns) - turn,
            censored=transcript.censored,
        )


def _in_time(tracks: Sequence[_Track]) -> list[tuple[_Track, int]]:
    """Return (trajectory, finished steps) in the order of tokens sampled by then."""
    events = [
        (gen_tokens, track, turn)
        for track in tracks
        for turn, gen_tokens in enumerate(
            accumulate((done.gen_tokens for done in track.transcript.turns), initial=0)
        )
    ]
    return [(track, turn) for _, track, turn in sorted(events, key=lambda event: event[0])]
