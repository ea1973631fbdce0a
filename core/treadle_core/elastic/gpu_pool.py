"""GPUs of 8-GPU nodes as buddy chunks, to be shared by waiting actions (ARL-Tangram §5.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.elastic.action import GPUS
from treadle_core.elastic.chunk_table import ChunkTable
from treadle_core.elastic.chunks import LEVELS, NODE_GPUS, Chunk, free_chunks, level_of, take
from treadle_core.elastic.curves import Indexes
from treadle_core.elastic.pools import InvalidPoolError, Share


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A machine of 8 GPUs. free: those that nothing runs on, as numbers from 0 to 7."""

    node_id: str
    free: frozenset[int]


@dataclass(frozen=True, slots=True)
class GpuNodes:
    """GPUs, handed out as chunks, each on one node; an action holds the whole chunk that its GPUs are in."""

    members: tuple[GpuNode, ...]
    dimensions: ClassVar[tuple[str, ...]] = (GPUS,)
    nodes: ClassVar[tuple[str | None, ...]] = (None,)

    def capacities(self) -> Mapping[str, int]:
        return {GPUS: NODE_GPUS if self.members else 0}

    def check(self, field: str) -> None:
        if len({node.node_id for node in self.members}) < len(self.members):
            raise InvalidPoolError(f"{field}.members", "has a node_id twice")
        for index, node in enumerate(self.members):
            if not node.free <= frozenset(range(NODE_GPUS)):
                raise InvalidPoolError(f"{field}.members[{index}].free", f"must be of 0 to {NODE_GPUS - 1}")

    def seat(self, needs: Indexes, homes: Indexes) -> Indexes:
        return placeable(needs[:, 0], _counts(self._free()))

    def share(self, lane: int, dimension: int, others: Indexes) -> Share:
        counts = _counts(self._free())
        for units in others:
            take(counts, level_of(int(units)))
        return Share(int((counts << np.arange(LEVELS)).sum()), lambda curves: ChunkTable(curves, counts), counts)

    def chunks(self, units: Indexes) -> Sequence[Chunk | None]:
        """The smallest chunk that holds them; of equals the first by node and number."""
        free = self._free()
        found: list[Chunk | None] = []
        for asked in units:
            if asked == 0:
                found.append(None)
                continue
            size = 1 << level_of(int(asked))
            at = min((c.size, index) for index, c in enumerate(free) if c.size >= size)[1]
            chunk = free.pop(at)
            buddies = []
            while chunk.size > size:
                half = chunk.size // 2
                buddies.append(Chunk(chunk.node_id, chunk.first + half, half))
                chunk = Chunk(chunk.node_id, chunk.first, half)
            free[at:at] = reversed(buddies)
            found.append(chunk)
        return found

    def _free(self) -> list[Chunk]:
        return [chunk for node in self.members for chunk in free_chunks(node.node_id, node.free)]


def _counts(chunks: Sequence[Chunk]) -> Indexes:
    """int64[LEVELS]: how many there are of each size."""
    counts = np.zeros(LEVELS, np.int64)
    for chunk in chunks:
        counts[chunk.size.bit_length() - 1] += 1
    return counts


@compiled
def placeable(units: Indexes, counts: Indexes) -> Indexes:
    """int64[n]: 0 for each that gets its chunk, in order, -1 from the first that does not. counts: of free chunks."""
    left = counts.copy()
    seats = np.full(len(units), -1, np.int64)
    for i in range(len(units)):
        if units[i] > 0 and not take(left, level_of(units[i])):
            break
        seats[i] = 0
    return seats
