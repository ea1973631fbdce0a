"""What a training asks: the questions of all prompts but those of the test, with their answers.

Invariants: the test prompts are left out before anything else is looked at; what is drawn, where fewer are wanted, are
whole transcripts, of as many prompts as there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from treadle_learned.calibration import FEWEST
from treadle_learned.errors import TooFewError
from treadle_learned.head import pinball
from treadle_learned.moments import Moment, replay_apart
from treadle_learned.split import VALIDATION, Part, fold_of, part_of, split
from treadle_learned.transcript import Transcript


@dataclass(frozen=True)
class Questions:
    """moments: numbered by `transcripts`. folds: of each moment the member of an ensemble that is fitted without it
    (`split.fold_of`), below 0 for none."""

    transcripts: Sequence[Transcript]
    moments: Sequence[Moment]
    folds: Sequence[int]

    @property
    def train(self) -> list[Moment]:
        """Those that a backbone may be trained on."""
        return [moment for moment, fold in zip(self.moments, self.folds, strict=True) if fold != VALIDATION]

    @property
    def validation(self) -> list[Moment]:
        """The others."""
        return [moment for moment, fold in zip(self.moments, self.folds, strict=True) if fold == VALIDATION]

    @property
    def judged(self) -> list[Moment]:
        """Those that some member is fitted without."""
        return [moment for moment, fold in zip(self.moments, self.folds, strict=True) if fold >= 0]

    def for_one(self) -> Questions:
        """The same for a single member, which is fitted without the validation prompts: a backbone that was trained has
        read all others."""
        return replace(self, folds=[fold if fold == VALIDATION else -1 for fold in self.folds])

    @property
    def has_text(self) -> bool:
        """Whether any transcript says anything."""
        return any(transcript.has_text for transcript in self.transcripts)

    def counts(self) -> dict[str, dict[str, int]]:
        """Prompts, trajectories, questions and those of them that are censored, of each part."""
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


def questions(transcripts: Sequence[Transcript], seed: int = 0, most: int = 0) -> Questions:
    """`most`: at most so many, 0 for all. Raises TooFewError."""
    some = drawn([each for each in transcripts if part_of(each.prompt_id, seed) is not Part.TEST], seed, most)
    for part, own in split(some, seed).items():
        count = sum(len(transcript.turns) for transcript in own)
        if part is not Part.TEST and count < FEWEST:
            prompts = len({transcript.prompt_id for transcript in transcripts})
            raise TooFewError(
                f"{count} {part} tuples of {prompts} prompts in all, at least {FEWEST} are needed: harvest more"
            )
    moments = replay_apart(some, [fold_of(transcript.prompt_id, seed) for transcript in some])
    return Questions(some, moments, [fold_of(moment.prompt_id, seed) for moment in moments])


def drawn(transcripts: Sequence[Transcript], seed: int, most: int) -> list[Transcript]:
    """In their order, as many whole ones as ask no more than `most` questions: one of each prompt, then a second of
    each, and so on. All where `most` is 0."""
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
        if room < 0:  # a shorter one further on would still fit, but short ones are not to be preferred
            break
        chosen.append(index)
    return [transcripts[index] for index in sorted(chosen)]


def loss_without_a_model(moments: Sequence[Moment]) -> float:
    """What `fitting.loss_unseen` measures, over tokens and turns, of what the estimators without a model said."""
    said = [(moment.forecast.remaining_tokens, moment.forecast.remaining_turns) for moment in moments]
    quantiles = torch.tensor([[[each.p10, each.p50, each.p90] for each in both] for both in said], dtype=torch.float32)
    answers = torch.tensor([[moment.remaining_tokens, moment.remaining_turns] for moment in moments]).float()
    censored = torch.tensor([moment.censored for moment in moments])
    return float(pinball(torch.log1p(quantiles), torch.log1p(answers), censored).mean())
