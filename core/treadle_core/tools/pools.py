"""What one kind of resource has, and what a decision asks of it; a flat pool and CPU nodes (ARL-Tangram §5.1, §5.2).

A pool consists of lanes: an action takes all it asks of the pool from one of them, and lanes are arranged apart. A flat
pool (bandwidth, a quota) is one lane, a node is one, all GPUs are one (`gpu_pool`).

GPUs of 8-GPU nodes as buddy chunks, to be shared by waiting actions (ARL-Tangram §5.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.refusals import CoreError
from treadle_core.tools.action import CPU_CORES, GPUS, MEMORY_BYTES
from treadle_core.tools.arrangement import Arrangement, Curves, FlatTable, Indexes, MarginalGains, convex
from treadle_core.tools.chunks import LEVELS, NODE_GPUS, Chunk, ChunkTable, free_chunks, level_of, take
from treadle_core.tools.queue import seated


class InvalidPoolError(CoreError):
    """A pool whose figures contradict each other, or an id or dimension twice."""


class Share(NamedTuple):
    """What a lane's candidates share of one dimension: so many free units, and how they are arranged on them."""

    free: int
    arrange: Callable[[Curves], Arrangement]


class Pool(Protocol):
    """A resource manager as the scheduler sees it. Another topology is another class with these."""

    @property
    def dimensions(self) -> tuple[str, ...]: ...

    @property
    def nodes(self) -> tuple[str | None, ...]:
        """The node that each lane is; None: the lane is no node."""
        ...

    def capacities(self) -> Mapping[str, int]:
        """By dimension, the most that one action can get when nothing runs."""
        ...

    def check(self, field: str) -> None:
        """Raises InvalidPoolError with the path of the bad figure, which begins with `field`."""
        ...

    def seat(self, needs: Indexes, homes: Indexes) -> Indexes:
        """R.accommodate (Algorithm 1, line 2): int64[n], the lane of each action in order, -1: it has to wait.

        needs: int64[n, dimensions], units at least. homes: int64[n], the lane it has to go to, -1: any. Nobody is
        seated in place of one that comes before and waits for the same.
        """
        ...

    def share(self, lane: int, dimension: int, others: Indexes) -> Share:
        """What seated candidates share of a lane's dimension when `others`, units in order, are served first."""
        ...

    def chunks(self, units: Indexes) -> Sequence[Chunk | None]:
        """The GPUs that each gets, of actions that start with so many; empty for a pool that is not of GPUs."""
        ...


@dataclass(frozen=True, slots=True)
class FlatPool:
    """Units of one dimension, any of which serves as well as another: a quota, concurrency, bandwidth."""

    dimension: str
    capacity: int
    free: int
    nodes: ClassVar[tuple[str | None, ...]] = (None,)

    @property
    def dimensions(self) -> tuple[str, ...]:
        return (self.dimension,)

    def capacities(self) -> Mapping[str, int]:
        return {self.dimension: self.capacity}

    def check(self, field: str) -> None:
        _check_free(f"{field}.free", self.free, self.capacity)

    def seat(self, needs: Indexes, homes: Indexes) -> Indexes:
        free = np.array([[self.free]])
        return seated(needs, np.full_like(homes, -1), free, np.array([[self.capacity]]))

    def share(self, lane: int, dimension: int, others: Indexes) -> Share:
        return shared(self.free - int(others.sum()))

    def chunks(self, units: Indexes) -> Sequence[Chunk | None]:
        return ()


@dataclass(frozen=True, slots=True)
class CpuNode:
    """A machine: exclusive cores, and memory that a trajectory keeps as long as it lives."""

    node_id: str
    cores: int
    free_cores: int
    memory_bytes: int
    free_memory_bytes: int


@dataclass(frozen=True, slots=True)
class CpuNodes:
    """Cores and memory, managed together. A trajectory's first action goes where the largest share of memory is free,
    its others where it is; each node is scheduled by itself."""

    members: tuple[CpuNode, ...]
    dimensions: ClassVar[tuple[str, ...]] = (CPU_CORES, MEMORY_BYTES)

    @property
    def nodes(self) -> tuple[str | None, ...]:
        return tuple(node.node_id for node in self.members)

    def capacities(self) -> Mapping[str, int]:
        return {
            CPU_CORES: max((node.cores for node in self.members), default=0),
            MEMORY_BYTES: max((node.memory_bytes for node in self.members), default=0),
        }

    def check(self, field: str) -> None:
        if len(set(self.nodes)) < len(self.members):
            raise InvalidPoolError(f"{field}.members", "has a node_id twice")
        for index, node in enumerate(self.members):
            path = f"{field}.members[{index}]"
            _check_free(f"{path}.free_cores", node.free_cores, node.cores)
            _check_free(f"{path}.free_memory_bytes", node.free_memory_bytes, node.memory_bytes)

    def seat(self, needs: Indexes, homes: Indexes) -> Indexes:
        capacity = np.array([[node.cores, node.memory_bytes] for node in self.members], np.int64).reshape(-1, 2)
        return seated(needs, homes, self._free(), capacity)

    def share(self, lane: int, dimension: int, others: Indexes) -> Share:
        return shared(int(self._free()[lane, dimension]) - int(others.sum()))

    def chunks(self, units: Indexes) -> Sequence[Chunk | None]:
        return ()

    def _free(self) -> Indexes:
        return np.array([[node.free_cores, node.free_memory_bytes] for node in self.members], np.int64).reshape(-1, 2)


def capacities(pools: Sequence[Pool]) -> dict[str, int]:
    """By dimension of all pools, the most that one action can get when nothing runs."""
    return {dimension: most for pool in pools for dimension, most in pool.capacities().items()}


def shared(free: int) -> Share:
    """Interchangeable units: by marginal gain where that is exact, by the table where it is not."""

    def arrange(curves: Curves) -> Arrangement:
        return MarginalGains(curves, free) if convex(curves) else FlatTable(curves, free)

    return Share(free, arrange)


def _check_free(field: str, free: int, capacity: int) -> None:
    if not 0 <= free <= capacity:  # NaN fails too
        raise InvalidPoolError(field, f"must be from 0 to {capacity}, all there is, is {free}")


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
        return Share(int((counts << np.arange(LEVELS)).sum()), lambda curves: ChunkTable(curves, counts))

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
