"""Text of a trajectory that the backbone reads: its prompt, its first step (the plan, which Heddle
4.1 calls the strongest early sign) and its newest steps, each shortened to a bound.

A question comes while the tool of the last step runs: that tool's answer is not known yet, and is
read with the next step. Invariants: the reading only grows, by a step at its end, so that the
hidden states of earlier readings are used again: in training one pass over a window answers for all
its steps, in serving only the new step runs. When a window is full, the next one starts with the
prompt, the plan and the steps that came after this one was half full; they are known early, so that
serving can read the next window before it is due. A transcript gives the same windows, whether it
is read at once or step by step. A decoder is causal: the keys and values of a beginning are the
same whatever follows, so another window, or another sample of the same prompt, can be read on from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from treadle_learned.transcript import Transcript

if TYPE_CHECKING:
    from transformers import DynamicCache

Ids = tuple[int, ...]
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Bounds:
    """Bounds in tokens of each part: prompt; first step; later steps; tool answers; the whole
    window. Raises ValueError for a window without room for a prompt, a plan and two steps."""

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
            raise ValueError(
                f"window_tokens must be >= {least} for these parts, is {self.window_tokens}"
            )


@dataclass(frozen=True)
class Window:
    """Token ids in one run of the backbone. ends: (steps finished, ids read by then) of each
    question that it answers."""

    ids: Ids
    ends: tuple[tuple[int, int], ...]


class Reader:
    """Reading of one trajectory while it runs. ids: of the present window; number: of the window,
    from 0. next_ids: the beginning of the next window as far as it is known; empty before the
    present one is half full."""

    def __init__(self, bounds: Bounds, prompt: Ids) -> None:
        self._bounds = bounds
        # something must be read before the first step
        self._head = shorten(prompt, bounds.prompt_tokens) or (0,)
        self._has_plan = False
        self.ids: Ids = self._head
        self.next_ids: Ids = ()
        self.number = 0

    @property
    def room(self) -> int:
        """Return how many tokens this window has left."""
        return self._bounds.window_tokens - len(self.ids)

    def step(self, observation: Ids, text: Ids) -> None:
        """Add a step, and the answer of the tool before it; empty before the first step."""
        bounds = self._bounds
        if not self._has_plan:
            self._has_plan = True
            self._head += shorten(text, bounds.plan_tokens)
            self.ids = self._head
            return
        more = shorten(observation, bounds.obs_tokens) + shorten(text, bounds.step_tokens)
        if len(more) > self.room:
            self.ids, self.next_ids = (self.next_ids or self._head) + more, ()
            self.number += 1
            return
        if 2 * self.room <= bounds.window_tokens - len(self._head):
            self.next_ids = (self.next_ids or self._head) + more
        self.ids += more


def windows(transcript: Transcript, tokenize: Tokenize, bounds: Bounds) -> list[Window]:
    """Return the windows of a transcript, with a question before the first step and after each but
    the last."""
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


def shorten(ids: Ids, most: int) -> Ids:
    """Return at most `most` ids, half from the beginning, which has the intention, and half from
    the end, which has the result."""
    if len(ids) <= most:
        return ids
    head = (most + 1) // 2
    return ids[:head] + (ids[len(ids) - (most - head) :] if most > head else ())


@dataclass
class Read:
    """Beginning of a trajectory that has been read: the ids, and their keys and values in every
    layer."""

    ids: Ids
    cache: DynamicCache

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in layers(self.cache))

    def beginning(self, count: int) -> Read:
        """Return a copy of the first `count` ids."""
        return Read(self.ids[:count], cut(self.cache, 0, 0, count))

    def usable_for(self, ids: Ids) -> Read | None:
        """Return the reading from which reading `ids` can continue, with at least one id left to
        read: itself, or a copy of the beginning that both share; None where they share nothing."""
        count = min(shared_prefix(self.ids, ids), len(ids) - 1)
        if count == len(self.ids):
            return self
        return self.beginning(count) if count > 0 else None


def shared_prefix(one: Ids, other: Ids) -> int:
    """Return the length of the common beginning of two texts."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:  # the usual case, compared in C
        return most
    return next(at for at in range(most) if one[at] != other[at])


def new_cache() -> DynamicCache:
    """Return a cache without keys and values."""
    from transformers import DynamicCache  # seconds to import, and only readers of text need it

    return DynamicCache()


def layers(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values, [batch, heads, tokens, width], of each layer."""
    plain: Sequence[Any] = cache.layers  # plain attention, which alone `new_cache` makes
    return [(layer.keys, layer.values) for layer in plain]


def cut(cache: DynamicCache, row: int, first: int, end: int) -> DynamicCache:
    """Return a copy of the tokens from `first` up to `end` of one row."""
    own = new_cache()
    which = slice(row, row + 1), slice(None), slice(first, end)
    for number, (keys, values) in enumerate(layers(cache)):
        own.update(keys[which].clone(), values[which].clone(), number)
    return own
