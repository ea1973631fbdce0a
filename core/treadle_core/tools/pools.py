"""Pools of resources as a decision sees them: which waiting actions fit, and how free units are
arranged.

A pool consists of partitions: an action takes all that it requires of the pool from one of them,
and each partition is arranged by itself. A flat pool (a quota, concurrency) is one partition, each
CPU node is one, all GPUs are one.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from treadle_core.compiled import Indexes, compiled
from treadle_core.refusals import CoreError
from treadle_core.tools.action import CPU_CORES, GPUS, MEMORY_BYTES
from treadle_core.tools.arrangement import (
    LEVELS,
    NODE_GPUS,
    Arrangement,
    Chunk,
    Curves,
    chunk_table,
    flat_table,
    free_chunks,
    is_convex,
    level_of,
    marginal_gains,
    take_chunk,
)

Amounts = tuple[int, int]  # cores, bytes of memory

WAITS = -1  # in place of a partition: the action has to wait


class InvalidPoolError(CoreError):
    """A resource whose figures contradict each other, or an id or dimension twice."""


class Share(NamedTuple):
    """Free units of one dimension that candidates of a partition share, and how to arrange them."""

    free: int
    arrange: Callable[[Curves], Arrangement]


class Pool(Protocol):
    """Free resources at one moment. Another topology is another class with these methods."""

    @property
    def dimensions(self) -> tuple[str, ...]: ...

    @property
    def nodes(self) -> tuple[str | None, ...]:
        """Return the node of each partition; None: the partition is no node."""

    def capacities(self) -> Mapping[str, int]:
        """Return by dimension the most that one action can get when nothing runs."""

    def assign(self, needs: Indexes, homes: Indexes) -> Indexes:
        """Return int64[n], the partition of each action in order, or WAITS: R.accommodate
        (Algorithm 1, line 2).

        needs: int64[n, dimensions], the least units. homes: int64[n], the partition that the action
        has to use, -1: any. No action is assigned in place of an earlier one that waits for the
        same units.
        """

    def share(self, partition: int, dimension: int, others: Indexes) -> Share:
        """Return the share of a partition's dimension that is left for candidates after `others`,
        units in order, are served."""

    def chunks(self, units: Indexes) -> Sequence[Chunk | None]:
        """Return the GPUs of actions that start with these units; empty for a pool of another
        resource."""
        return ()


@dataclass(frozen=True, slots=True)
class FlatPool(Pool):
    """Interchangeable units of one dimension, such as a quota or concurrency."""

    dimension: str
    capacity: int
    free: int
    nodes: ClassVar[tuple[str | None, ...]] = (None,)

    @property
    def dimensions(self) -> tuple[str, ...]:
        return (self.dimension,)

    def capacities(self) -> Mapping[str, int]:
        return {self.dimension: self.capacity}

    def assign(self, needs: Indexes, homes: Indexes) -> Indexes:
        return assign_partitions(
            needs, np.full_like(homes, -1), np.array([[self.free]]), np.array([[self.capacity]])
        )

    def share(self, partition: int, dimension: int, others: Indexes) -> Share:
        return share_units(self.free - int(others.sum()))


class CpuNodes(Pool):
    """Exclusive cores, and memory that a trajectory holds as long as it lives. A trajectory's first
    action goes to the node with the largest share of its memory free, its other actions to the same
    node (§5.2)."""

    dimensions: ClassVar[tuple[str, ...]] = (CPU_CORES, MEMORY_BYTES)
    nodes: tuple[str | None, ...] = ()

    def __init__(
        self, node_ids: Iterable[str], capacity: Sequence[Amounts], free: Sequence[Amounts]
    ) -> None:
        """Create the pool from cores and bytes of memory by node: how many it has, and how many are
        free."""
        self.nodes = tuple(node_ids)
        self.capacity = np.array(capacity, np.int64).reshape(-1, 2)
        self.free = np.array(free, np.int64).reshape(-1, 2)

    def capacities(self) -> Mapping[str, int]:
        return dict(
            zip(self.dimensions, self.capacity.max(axis=0, initial=0).tolist(), strict=True)
        )

    def assign(self, needs: Indexes, homes: Indexes) -> Indexes:
        # Demands are gathered by column; a kernel that was compiled ahead takes rows alone.
        needs = np.ascontiguousarray(needs)
        return assign_partitions(needs, homes, self.free, self.capacity)

    def share(self, partition: int, dimension: int, others: Indexes) -> Share:
        return share_units(int(self.free[partition, dimension]) - int(others.sum()))


@dataclass(frozen=True, slots=True)
class GpuNodes(Pool):
    """GPUs in buddy chunks, each on one node of 8; an action holds the whole chunk that its GPUs
    are in (§5.3).

    free: by node, the numbers, 0 to 7, of the GPUs on which nothing runs.
    """

    free: Mapping[str, Collection[int]]
    dimensions: ClassVar[tuple[str, ...]] = (GPUS,)
    nodes: ClassVar[tuple[str | None, ...]] = (None,)

    def capacities(self) -> Mapping[str, int]:
        return {GPUS: NODE_GPUS if self.free else 0}

    def assign(self, needs: Indexes, homes: Indexes) -> Indexes:
        return assign_chunks(needs[:, 0], _counts(self._free_chunks()))

    def share(self, partition: int, dimension: int, others: Indexes) -> Share:
        counts = _counts(self._free_chunks())
        for units in others:
            take_chunk(counts, level_of(int(units)))
        return Share(
            int((counts << np.arange(LEVELS)).sum()), lambda curves: chunk_table(curves, counts)
        )

    def chunks(self, units: Indexes) -> Sequence[Chunk | None]:
        """Return for each action the smallest free chunk that holds its GPUs; of equal chunks the
        first by node and number."""
        free = self._free_chunks()
        found: list[Chunk | None] = []
        for asked in units:
            if asked == 0:
                found.append(None)
                continue
            size = 1 << level_of(int(asked))
            _, at = min(
                (chunk.size, index) for index, chunk in enumerate(free) if chunk.size >= size
            )
            node_id, first, whole = free[at]
            buddies = [half for half in (1, 2, 4) if size <= half < whole]
            free[at : at + 1] = [Chunk(node_id, first + half, half) for half in buddies]
            found.append(Chunk(node_id, first, size))
        return found

    def _free_chunks(self) -> list[Chunk]:
        return [
            chunk for node_id, free in self.free.items() for chunk in free_chunks(node_id, free)
        ]


def capacities(pools: Sequence[Pool]) -> dict[str, int]:
    """Return by dimension of all pools the most that one action can get when nothing runs."""
    return {dimension: most for pool in pools for dimension, most in pool.capacities().items()}


def share_units(free: int) -> Share:
    """Return the share of interchangeable units: arranged by marginal gain where that is exact, by
    the table elsewhere."""

    def arrange(curves: Curves) -> Arrangement:
        return marginal_gains(curves, free) if is_convex(*curves) else flat_table(curves, free)

    return Share(free, arrange)


def _counts(chunks: Sequence[Chunk]) -> Indexes:
    """Return int64[LEVELS], how many chunks there are of each size."""
    counts = np.zeros(LEVELS, np.int64)
    for chunk in chunks:
        counts[chunk.size.bit_length() - 1] += 1
    return counts


@compiled
def assign_partitions(needs: Indexes, homes: Indexes, free: Indexes, capacity: Indexes) -> Indexes:
    """Return int64[n], as `Pool.assign`. free, capacity: int64[partitions, dimensions].

    Dimension 0 comes back with each action, the others may be held for longer. An action without a
    home goes where the largest share of the last dimension is free (§5.2: balance of memory). An
    action that waits for its home closes that partition to later ones. An action that waits for any
    partition closes all of them to later actions without a home, and to all actions those
    partitions where it lacks only dimension 0: elsewhere it waits until trajectories end, which
    they cannot do unless their actions pass it.
    """
    partitions, dimensions = free.shape
    last = dimensions - 1
    left = free.copy()
    closed, all_closed = np.zeros(partitions, np.bool_), False
    assigned = np.full(len(needs), WAITS, np.int64)
    for i in range(len(needs)):
        home = homes[i]
        best, best_share = -1, -1.0
        for at in range(partitions):
            if closed[at] or (home >= 0 and at != home) or (home < 0 and all_closed):
                continue
            fits = True
            for d in range(dimensions):
                fits = fits and needs[i, d] <= left[at, d]
            share = left[at, last] / max(capacity[at, last], 1)
            if fits and share > best_share:
                best, best_share = at, share
        assigned[i] = best
        if best >= 0:
            for d in range(dimensions):
                left[best, d] -= needs[i, d]
        elif home >= 0:
            closed[home] = True
        elif not all_closed:
            all_closed = True
            for at in range(partitions):
                others_fit = True
                for d in range(1, dimensions):
                    others_fit = others_fit and needs[i, d] <= left[at, d]
                closed[at] = closed[at] or others_fit
    return assigned


@compiled
def assign_chunks(units: Indexes, counts: Indexes) -> Indexes:
    """Return int64[n]: 0 for each action that gets its chunk, in order, WAITS from the first that
    does not. counts: of free chunks by level."""
    left = counts.copy()
    assigned = np.full(len(units), WAITS, np.int64)
    for i in range(len(units)):
        if units[i] > 0 and not take_chunk(left, level_of(units[i])):
            break
        assigned[i] = 0
    return assigned
