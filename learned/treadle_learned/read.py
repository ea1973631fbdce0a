"""What has been read so far of a trajectory: the ids, and their keys and values in every layer.

Invariant: a decoder is causal, so the keys and values of a beginning are the same whatever follows it; whoever begins
alike (another window of the same trajectory, another sample of the same prompt) can read on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from treadle_learned.reading import Ids


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
