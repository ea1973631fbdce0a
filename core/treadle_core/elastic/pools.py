"""What one kind of resource has, and what a decision asks of it; a flat pool and CPU nodes (ARL-Tangram §5.1, §5.2).

A pool consists of lanes: an action takes all it asks of the pool from one of them, and lanes are arranged apart. A flat
pool (bandwidth, a quota) is one lane, a node is one, all GPUs are one (`gpu_pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from treadle_core.elastic.action import CPU_CORES, MEMORY_BYTES
from treadle_core.elastic.chunks import Chunk
from treadle_core.elastic.curves import Arrangement, Curves, Indexes
from treadle_core.elastic.flat_table import FlatTable
from treadle_core.elastic.lanes import seated
from treadle_core.elastic.marginal import MarginalGains, convex
from treadle_core.errors import CoreError


class InvalidPoolError(CoreError):
    """A pool whose figures contradict each other, or an id or dimension twice."""


class Share(NamedTuple):
    """What a lane's candidates share of one dimension: so many free units, and how they are arranged on them.

    chunks: int64[LEVELS], the free ones of 1, 2, 4, 8, where the units are GPUs; else int64[0].
    """

    free: int
    arrange: Callable[[Curves], Arrangement]
    chunks: Indexes = np.zeros(0, np.int64)


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
