"""Moments as tensors, with what the backbone made of their texts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treadle_learned.backbone import Backbone
from treadle_learned.moments import Moment
from treadle_learned.partial import Partial
from treadle_learned.reading import Bounds, Ids, windows
from treadle_learned.transcript import Transcript

Track = Callable[[Iterable[int], int], Iterable[int]]  # a progress bar: what to go over, and how many


@dataclass(frozen=True)
class Examples:
    """n questions. hidden [n, hidden_size]; features [n, FEATURES]; has_text bool [n]; targets [n, 2]: ln(1 + remaining
    tokens), ln(1 + remaining turns), at least that where censored, bool [n]; prompts [n]: a number for each."""

    hidden: Tensor
    features: Tensor
    has_text: Tensor
    targets: Tensor
    censored: Tensor
    prompts: Tensor

    def __len__(self) -> int:
        return len(self.features)

    def of(self, which: Tensor) -> Examples:
        """Some of them, by index."""
        return Examples(
            self.hidden[which],
            self.features[which],
            self.has_text[which],
            self.targets[which],
            self.censored[which],
            self.prompts[which],
        )


def examples(moments: Sequence[Moment], hidden: Tensor, has_text: Sequence[bool]) -> Examples:
    """`hidden` and `has_text` go with the moments, one by one."""
    answers = [[moment.remaining_tokens, moment.remaining_turns] for moment in moments]
    return Examples(
        hidden,
        torch.from_numpy(np.stack([moment.features for moment in moments])),
        torch.tensor(has_text),
        torch.log1p(torch.tensor(answers, dtype=torch.float32)),
        torch.tensor([moment.censored for moment in moments]),
        torch.tensor([zlib.crc32(moment.prompt_id.encode()) for moment in moments]),
    )


class States:
    """Hidden states of the transcripts that moments speak of, computed once each. `kept`: where they outlive the
    process that computed them."""

    def __init__(
        self, backbone: Backbone, transcripts: Sequence[Transcript], bounds: Bounds, kept: Partial | None = None
    ) -> None:
        self._backbone = backbone
        self._kept = kept
        self._transcripts = transcripts
        self._bounds = bounds
        self._states: dict[int, dict[int, Tensor]] = {}
        self._read: dict[tuple[Ids, tuple[int, ...]], Tensor] = {}  # where nothing but the prompt is said, all say it

    def read(self, moments: Sequence[Moment], track: Track = lambda over, _: over) -> tuple[Tensor, list[bool]]:
        """[n, hidden_size] and whether there was text, for each moment. Zeros where there was none."""
        last: dict[int, int] = {}
        for moment in moments:
            if self._transcripts[moment.index].has_text:
                last[moment.index] = max(moment.turn, last.get(moment.index, 0))
        missing = [index for index, turn in last.items() if turn not in self._found(index)]
        for index in track(missing, len(missing)):
            self._states[index] = self._of(index, last[index])
            if self._kept is not None:
                self._kept.put(f"states-{index}", self._states[index])
        nothing = torch.zeros(self._backbone.hidden_size)
        found = [self._states.get(moment.index, {}).get(moment.turn) for moment in moments]
        hidden = torch.stack([nothing if state is None else state for state in found])
        return hidden, [state is not None for state in found]

    def _found(self, index: int) -> dict[int, Tensor]:
        if index not in self._states and self._kept is not None:
            self._states[index] = self._kept.get(f"states-{index}") or {}
        return self._states.get(index, {})

    def _of(self, index: int, last_turn: int) -> dict[int, Tensor]:
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
