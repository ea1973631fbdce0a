"""Transcripts as the questions that a predictor would have been asked, each with its answer.

Purpose: (what was known, what was left) for every trajectory before its first step and after each but the last (Heddle
4.1 decomposes history so). Invariant: all trajectories of a replay run side by side at one speed, a token at a time and
without tools, so that what is known of siblings at a moment is what an untroubled rollout would have told; nothing is
known of the future.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from treadle_core.ranking.estimator import FirstThatAnswers, Forecast, Prior, Progress, learned_from
from treadle_core.ranking.evidence import Ended, Evidence

from treadle_learned.features import Steps, Vector, features, versions_behind
from treadle_learned.transcript import Transcript


@dataclass(frozen=True)
class Moment:
    """A question: trajectory `index` of those replayed, of a prompt, after `turn` steps. remaining_tokens,
    remaining_turns: the answer; at least that, where the transcript is censored. forecast: what the estimators without
    a model said."""

    index: int
    prompt_id: str
    turn: int
    gen_tokens: int
    features: Vector
    forecast: Forecast
    remaining_tokens: int
    remaining_turns: int
    censored: bool


def replay(
    transcripts: Sequence[Transcript],
    earlier: Iterable[Transcript] = (),
    *,
    asked: Callable[[int], bool] = lambda turn: True,
    prior: Prior | None = None,
) -> list[Moment]:
    """The moments of all transcripts whose turn is `asked`, in the order in which they would have come. earlier: ended
    before the first begins. prior: what is said of a mesh's first trajectories."""
    evidence = Evidence()
    for transcript in earlier:
        evidence.closed(ended(transcript))
    estimator = learned_from(evidence, prior or Prior())
    tracks = [_Track(index, transcript) for index, transcript in enumerate(transcripts)]
    moments: list[Moment] = []
    for track, turn in _in_time(tracks):
        transcript = track.transcript
        if turn == 0:
            evidence.opened(transcript.trajectory_id, transcript.rollout_id, transcript.prompt_id)
        else:
            track.step(turn - 1)
            evidence.stepped(transcript.trajectory_id, turn - 1, transcript.turns[turn - 1].gen_tokens)
        if turn == len(transcript.turns):
            evidence.closed(ended(transcript))
        elif asked(turn):
            moments.append(track.moment(turn, evidence, estimator))
    return moments


def replay_apart(
    transcripts: Sequence[Transcript],
    folds: Sequence[int],
    *,
    asked: Callable[[int], bool] = lambda turn: True,
    prior: Prior | None = None,
) -> list[Moment]:
    """The moments of training transcripts: a fold of the prompts at a time, the others ended before. folds: of each
    transcript; a prompt's are of one.

    So they know as much of earlier trajectories as those that are asked about later will, and nothing of themselves;
    replayed all at once they would be a mesh's first, with a prior for history.
    """
    moments: list[Moment] = []
    for number in sorted(set(folds)):
        own = [index for index, fold in enumerate(folds) if fold == number]
        others = [transcripts[index] for index, fold in enumerate(folds) if fold != number]
        found = replay([transcripts[index] for index in own], others, asked=asked, prior=prior)
        moments += [replace(moment, index=own[moment.index]) for moment in found]
    return moments


def ended(transcript: Transcript) -> Ended:
    """A transcript as the evidence counts it."""
    return Ended(
        transcript.trajectory_id,
        transcript.rollout_id,
        transcript.prompt_id,
        transcript.gen_tokens,
        len(transcript.turns),
        own_end=not transcript.censored,
        weight_version=transcript.version_number,
    )


class _Track:
    """How far one trajectory has come in the replay."""

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

    def moment(self, turn: int, evidence: Evidence, estimator: FirstThatAnswers) -> Moment:
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
        found = evidence.group_of(transcript.trajectory_id, transcript.prompt_id)
        assert found is not None, "it was opened"
        group = found[1]
        running = [each for name, each in group.running.items() if name != transcript.trajectory_id]
        sampled_by = evidence.sampled_by(transcript.trajectory_id, transcript.prompt_id)
        behind = versions_behind(transcript.version_number, sampled_by)
        return Moment(
            index=self.index,
            prompt_id=transcript.prompt_id,
            turn=turn,
            gen_tokens=self._gen_tokens,
            features=features(progress, self._steps, group.ended.values(), running, forecast, behind),
            forecast=forecast,
            remaining_tokens=transcript.gen_tokens - self._gen_tokens,
            remaining_turns=len(transcript.turns) - turn,
            censored=transcript.censored,
        )


def _in_time(tracks: Sequence[_Track]) -> Iterator[tuple[_Track, int]]:
    """(trajectory, steps finished) in the order of tokens sampled by then."""
    at: list[int] = []
    of: list[tuple[int, int]] = []
    for track in tracks:
        gen_tokens = 0
        for turn in range(len(track.transcript.turns) + 1):
            at.append(gen_tokens)
            of.append((track.index, turn))
            if turn < len(track.transcript.turns):
                gen_tokens += track.transcript.turns[turn].gen_tokens
    for which in np.argsort(np.array(at), kind="stable").tolist():
        index, turn = of[which]
        yield tracks[index], turn
