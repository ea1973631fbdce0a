"""What the backbone reads of a trajectory: its prompt, its first step (the plan, which Heddle 4.1 calls the strongest
early sign), and its newest steps, each squeezed to a bound.

A question is asked while the tool of the last step runs: what that tool will say is not known yet, and is read with the
step after it.
Invariants: what is read only ever grows by a step at its end, so that the hidden states of what was read before are
reused, in training (one pass over a window answers for all its steps) as in serving (only the new step runs); when a
window is full the next one starts with the prompt, the plan and the steps that came after this one was half full. It is
known from then on which they are, so that serving can read the next window before it is due. The same transcript gives
the same windows, told at once or step by step.

What has been read so far of a trajectory: the ids, and their keys and values in every layer.

Invariant: a decoder is causal, so the keys and values of a beginning are the same whatever follows it; whoever begins
alike (another window of the same trajectory, another sample of the same prompt) can read on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from treadle_learned.transcript import Transcript

Ids = tuple[int, ...]
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Bounds:
    """Most tokens of each part. plan_tokens, step_tokens: of a step's text; obs_tokens: of what the tool before it
    answered; window_tokens: of everything. Raises ValueError for a window without room for a prompt, a plan and two
    steps."""

    prompt_tokens: int = 192
    plan_tokens: int = 96
    step_tokens: int = 32
    obs_tokens: int = 16
    window_tokens: int = 1_024

    def __post_init__(self) -> None:
        step = self.step_tokens + self.obs_tokens
        least = self.prompt_tokens + self.plan_tokens + 2 * step
        for name in ("prompt_tokens", "plan_tokens", "step_tokens", "obs_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, is {getattr(self, name)}")
        if self.window_tokens < least:
            raise ValueError(f"window_tokens must be >= {least} for these parts, is {self.window_tokens}")


@dataclass(frozen=True)
class Window:
    """Token ids in one run of the backbone. ends: (steps finished, ids read by then) of each question it answers."""

    ids: Ids
    ends: tuple[tuple[int, int], ...]


class Reader:
    """Reads one trajectory as it goes. `ids` is what is read now; a window that starts afresh has another `number`.
    `next_ids`: with what the next one begins, as far as it is told; nothing before this one is half full."""

    def __init__(self, bounds: Bounds, prompt: Ids) -> None:
        self._bounds = bounds
        self._head = squeezed(prompt, bounds.prompt_tokens) or (0,)  # something must be read before the first step
        self._has_plan = False
        self.ids: Ids = self._head
        self.next_ids: Ids = ()
        self.number = 0

    @property
    def room(self) -> int:
        """Tokens that this window has left."""
        return self._bounds.window_tokens - len(self.ids)

    def step(self, observation: Ids, text: Ids) -> None:
        """One more step, and what the tool before it answered: nothing before the first."""
        bounds = self._bounds
        if not self._has_plan:
            self._has_plan = True
            self._head += squeezed(text, bounds.plan_tokens)
            self.ids = self._head
            return
        more = squeezed(observation, bounds.obs_tokens) + squeezed(text, bounds.step_tokens)
        if len(more) > self.room:
            self.ids, self.next_ids = (self.next_ids or self._head) + more, ()
            self.number += 1
            return
        if 2 * self.room <= bounds.window_tokens - len(self._head):
            self.next_ids = (self.next_ids or self._head) + more
        self.ids += more


def windows(transcript: Transcript, tokenize: Tokenize, bounds: Bounds) -> list[Window]:
    """All that is read of a transcript, with a question before the first step and after each but the last."""
    reader = Reader(bounds, tuple(tokenize(transcript.prompt)))
    found: list[Window] = []
    ids, ends = reader.ids, [(0, len(reader.ids))]
    observation = ""
    for turn, done in enumerate(transcript.turns[:-1], start=1):
        number = reader.number
        reader.step(tuple(tokenize(observation)), tuple(tokenize(done.text)))
        observation = done.obs_text
        if reader.number != number:
            found.append(Window(ids, tuple(ends)))
            ends = []
        ids = reader.ids
        ends.append((turn, len(ids)))
    return [*found, Window(ids, tuple(ends))]


def squeezed(ids: Ids, most: int) -> Ids:
    """The first and the last of them, where there are more than `most`: the head says what, the end how it went."""
    if len(ids) <= most:
        return ids
    head = (most + 1) // 2
    return ids[:head] + (ids[len(ids) - (most - head) :] if most > head else ())


@dataclass
class Read:
    """See the module."""

    ids: Ids
    cache: DynamicCache

    @property
    def size_bytes(self) -> int:
        """Of its keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in layers(self.cache))

    def beginning(self, count: int) -> Read:
        """A copy of the first so many ids of it."""
        return Read(self.ids[:count], cut(self.cache, 0, 0, count))

    def usable_for(self, ids: Ids) -> Read | None:
        """From where `ids` can be read on, at least one of them: itself, or a copy of the beginning that both share;
        None where there is none."""
        count = min(shared(self.ids, ids), len(ids) - 1)
        if count == len(self.ids):
            return self
        return self.beginning(count) if count > 0 else None


def shared(one: Ids, other: Ids) -> int:
    """How many ids they begin with alike."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(at for at in range(most) if one[at] != other[at])


def layers(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values, [batch, heads, tokens, width], of each layer."""
    plain: Sequence[Any] = cache.layers  # plain attention, which alone `DynamicCache()` makes
    return [(layer.keys, layer.values) for layer in plain]


def cut(cache: DynamicCache, row: int, first: int, end: int) -> DynamicCache:
    """A copy of the tokens from `first` up to `end` of one row."""
    own = DynamicCache()
    which = slice(row, row + 1), slice(None), slice(first, end)
    for number, (keys, values) in enumerate(layers(cache)):
        own.update(keys[which].clone(), values[which].clone(), number)
    return own
