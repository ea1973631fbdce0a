"""Examples to train a head on: transcripts split by prompt, their moments, and moments as tensors.

Invariants: no prompt is in two parts; its part follows from its name and the seed alone, so that a
prompt that was held out stays held out when transcripts are added. The test prompts are left out
before anything else is looked at. Where fewer questions are wanted, whole transcripts are drawn, of
as many prompts as there are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from treadle_learned.backbone import Backbone
from treadle_learned.moments import Moment, replay_apart
from treadle_learned.reading import Bounds, Ids, windows
from treadle_learned.transcript import LearnedError, Transcript

# a progress bar: what to go over, and how many
Track = Callable[[Iterable[int], int], Iterable[int]]
Bar = Callable[[str], Track]  # a progress bar by its words

# of the prompts in a fold: it stops the training, calibrates, and chooses between estimators
VALIDATION_SHARE = 0.15
TEST_SHARE = 0.25  # of the prompts; they are only reported on
VALIDATION, FOLDS = 0, 5  # (1 - TEST_SHARE) / VALIDATION_SHARE
FEWEST = 8  # questions in a part; fewer teach and calibrate nothing
_HASHES = 1 << 32  # values of crc32


def silent(words: str) -> Track:
    """Return a track that shows no progress bar."""
    del words
    return lambda over, _: over


class Part(StrEnum):
    """Use of a prompt's trajectories."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


def fold_of(prompt_id: str, seed: int = 0) -> int:
    """Return the member of an ensemble that is fitted without the prompt: from 0 (VALIDATION, which
    a trained backbone has not read either) to FOLDS - 1. Below 0 for a test prompt."""
    at = zlib.crc32(f"{seed}/{prompt_id}".encode()) / _HASHES
    return math.floor((at - TEST_SHARE) / VALIDATION_SHARE)


def part_of(prompt_id: str, seed: int = 0) -> Part:
    """Return the part of a prompt."""
    fold = fold_of(prompt_id, seed)
    if fold < 0:
        return Part.TEST
    return Part.VALIDATION if fold == VALIDATION else Part.TRAIN


def split(transcripts: Sequence[Transcript], seed: int = 0) -> dict[Part, list[Transcript]]:
    """Return the transcripts of each part, in their order."""
    parts: dict[Part, list[Transcript]] = {part: [] for part in Part}
    for transcript in transcripts:
        parts[part_of(transcript.prompt_id, seed)].append(transcript)
    return parts


@dataclass(frozen=True)
class TrainingSet:
    """Questions of all prompts but those of the test. moments: numbered by `transcripts`. folds:
    `fold_of` each moment's prompt, below 0 where every member is fitted on it."""

    transcripts: Sequence[Transcript]
    moments: Sequence[Moment]
    folds: Sequence[int]

    @property
    def train(self) -> list[Moment]:
        """Return the moments that a backbone may be trained on."""
        return [
            moment
            for moment, fold in zip(self.moments, self.folds, strict=True)
            if fold != VALIDATION
        ]

    @property
    def validation(self) -> list[Moment]:
        """Return the moments that a backbone may not be trained on."""
        return [
            moment
            for moment, fold in zip(self.moments, self.folds, strict=True)
            if fold == VALIDATION
        ]

    @property
    def held_out(self) -> list[Moment]:
        """Return the moments that some member is fitted without."""
        return [moment for moment, fold in zip(self.moments, self.folds, strict=True) if fold >= 0]

    @property
    def has_text(self) -> bool:
        """Return whether any transcript has a text."""
        return any(transcript.has_text for transcript in self.transcripts)

    def for_one_member(self) -> TrainingSet:
        """Return the same set for a head of one member, fitted without the validation prompts: a
        trained backbone has read all others."""
        return replace(self, folds=[fold if fold == VALIDATION else -1 for fold in self.folds])

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many prompts, trajectories, questions, and censored questions each part
        has."""
        found: dict[str, dict[str, int]] = {}
        for part, moments in ((Part.TRAIN, self.train), (Part.VALIDATION, self.validation)):
            of = [self.transcripts[index] for index in {moment.index for moment in moments}]
            found[part.value] = {
                "prompts": len({transcript.prompt_id for transcript in of}),
                "trajectories": len(of),
                "tuples": len(moments),
                "censored": sum(moment.censored for moment in moments),
            }
        return found


def training_set(transcripts: Sequence[Transcript], seed: int = 0, most: int = 0) -> TrainingSet:
    """Return the training set of some transcripts, with at most `most` questions, 0 for all. Raises
    LearnedError."""
    some = draw(
        [each for each in transcripts if part_of(each.prompt_id, seed) is not Part.TEST], seed, most
    )
    for part, own in split(some, seed).items():
        count = sum(len(transcript.turns) for transcript in own)
        if part is not Part.TEST and count < FEWEST:
            prompts = len({transcript.prompt_id for transcript in transcripts})
            raise LearnedError(
                f"{count} {part} tuples of {prompts} prompts in all, at least {FEWEST} are "
                "needed: harvest more"
            )
    moments = replay_apart(some, [fold_of(transcript.prompt_id, seed) for transcript in some])
    return TrainingSet(some, moments, [fold_of(moment.prompt_id, seed) for moment in moments])


def draw(transcripts: Sequence[Transcript], seed: int, most: int) -> list[Transcript]:
    """Return as many whole transcripts, in their order, as have at most `most` questions: one of
    each prompt, then a second of each, and so on. All where `most` is 0."""
    if not most:
        return list(transcripts)
    rng = np.random.default_rng(seed)
    taken: dict[str, int] = {}
    turn: dict[int, tuple[int, int]] = {}
    for place, index in enumerate(rng.permutation(len(transcripts)).tolist()):
        prompt = transcripts[index].prompt_id
        taken[prompt] = taken.get(prompt, 0) + 1
        turn[index] = (taken[prompt], place)
    chosen: list[int] = []
    room = most
    for index in sorted(turn, key=turn.__getitem__):
        room -= len(transcripts[index].turns)
        if (
            room < 0
        ):  # a shorter one later would still fit, but short transcripts are not to be preferred
            break
        chosen.append(index)
    return [transcripts[index] for index in sorted(chosen)]


@dataclass(frozen=True)
class Examples:
    """n questions as tensors. hidden [n, hidden_size]; features [n, FEATURES]; has_text bool [n];
    targets [n, 2]: ln(1 + remaining tokens), ln(1 + remaining turns); at least that where censored,
    bool [n]; prompts [n]: a number for each prompt."""

    hidden: Tensor
    features: Tensor
    has_text: Tensor
    targets: Tensor
    censored: Tensor
    prompts: Tensor

    def __len__(self) -> int:
        return len(self.features)

    def of(self, which: Tensor) -> Examples:
        """Return some of the questions, by index."""
        return Examples(*(getattr(self, each.name)[which] for each in fields(self)))


def examples(moments: Sequence[Moment], hidden: Tensor, has_text: Sequence[bool]) -> Examples:
    """Return moments as examples, with the hidden state of each and whether it has text."""
    answers = [[moment.remaining_tokens, moment.remaining_turns] for moment in moments]
    return Examples(
        hidden,
        torch.from_numpy(np.stack([moment.features for moment in moments])),
        torch.tensor(has_text),
        torch.log1p(torch.tensor(answers, dtype=torch.float32)),
        torch.tensor([moment.censored for moment in moments]),
        torch.tensor([zlib.crc32(moment.prompt_id.encode()) for moment in moments]),
    )


def without_text(moments: Sequence[Moment], hidden_size: int) -> Examples:
    """Return moments as examples for a head that does not read."""
    return examples(moments, torch.zeros(len(moments), hidden_size), [False] * len(moments))


class States:
    """Hidden states of the backbone at the moments of some transcripts, each computed once."""

    def __init__(
        self, backbone: Backbone, transcripts: Sequence[Transcript], bounds: Bounds
    ) -> None:
        self._backbone = backbone
        self._transcripts = transcripts
        self._bounds = bounds
        self._states: dict[int, dict[int, Tensor]] = {}  # by transcript and turn
        # samples with no text but the prompt are alike
        self._read: dict[tuple[Ids, tuple[int, ...]], Tensor] = {}

    def examples(self, moments: Sequence[Moment], track: Track = lambda over, _: over) -> Examples:
        """Return moments as examples with their states; zeros where a transcript has no text."""
        last: dict[int, int] = {}
        for moment in moments:
            if self._transcripts[moment.index].has_text:
                last[moment.index] = max(moment.turn, last.get(moment.index, 0))
        missing = [index for index, turn in last.items() if turn not in self._states.get(index, {})]
        for index in track(missing, len(missing)):
            self._states[index] = self._compute(index, last[index])
        nothing = torch.zeros(self._backbone.hidden_size)
        found = [self._states.get(moment.index, {}).get(moment.turn) for moment in moments]
        hidden = torch.stack([nothing if state is None else state for state in found])
        return examples(moments, hidden, [state is not None for state in found])

    def _compute(self, index: int, last_turn: int) -> dict[int, Tensor]:
        states: dict[int, Tensor] = {}
        for window in windows(self._transcripts[index], self._backbone.tokenize, self._bounds):
            ends = [(turn, end) for turn, end in window.ends if turn <= last_turn]
            if ends:
                key = window.ids[: ends[-1][1]], tuple(sorted({end for _, end in ends}))
                if key not in self._read:
                    self._read[key] = self._backbone.hidden(*key)
                state_at = dict(zip(key[1], self._read[key], strict=True))
                states.update((turn, state_at[end]) for turn, end in ends)
        return states
