"""What a training asks: the questions of the training prompts and of the validation prompts, with their answers.

Invariants: the test prompts are left out before anything else is looked at; what is drawn, where fewer are wanted, are
whole transcripts, of as many prompts as there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from treadle_learned.errors import TooFewError
from treadle_learned.fitting import FEWEST
from treadle_learned.head import pinball
from treadle_learned.moments import Moment, replay, replay_apart
from treadle_learned.split import Part, part_of, split
from treadle_learned.transcript import Transcript


@dataclass(frozen=True)
class Questions:
    """train, validation: moments, numbered by `transcripts`."""

    transcripts: Sequence[Transcript]
    train: Sequence[Moment]
    validation: Sequence[Moment]

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
    parts = split(
        drawn([each for each in transcripts if part_of(each.prompt_id, seed) is not Part.TEST], seed, most), seed
    )
    train, validation = parts[Part.TRAIN], parts[Part.VALIDATION]
    for part in (Part.TRAIN, Part.VALIDATION):
        count = sum(len(transcript.turns) for transcript in parts[part])
        if count < FEWEST:
            prompts = len({transcript.prompt_id for transcript in transcripts})
            raise TooFewError(
                f"{count} {part} tuples of {prompts} prompts in all, at least {FEWEST} are needed: harvest more"
            )
    later = [replace(moment, index=len(train) + moment.index) for moment in replay(validation, train)]
    return Questions([*train, *validation], replay_apart(train), later)


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
    """The loss that `fitting.loss_of` speaks of, over tokens and turns, of what the estimators without a model said."""
    said = [(moment.forecast.remaining_tokens, moment.forecast.remaining_turns) for moment in moments]
    quantiles = torch.tensor([[[each.p10, each.p50, each.p90] for each in both] for both in said], dtype=torch.float32)
    answers = torch.tensor([[moment.remaining_tokens, moment.remaining_turns] for moment in moments]).float()
    censored = torch.tensor([moment.censored for moment in moments])
    return float(pinball(torch.log1p(quantiles), torch.log1p(answers), censored))
