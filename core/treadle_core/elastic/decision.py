"""A scheduling decision: which waiting actions start now, with how many units each, and where (ARL-Tangram §4.2).

A function of the queue, the pools, what runs and what a typical action takes. It changes nothing: who starts an action
takes it out of the queue and its units out of the pool.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treadle_core.elastic.action import Action
from treadle_core.elastic.candidates import NOT_ASKED, WAITS, Candidates, select
from treadle_core.elastic.chunks import Chunk
from treadle_core.elastic.curves import Indexes
from treadle_core.elastic.executing import Executing, by_lane
from treadle_core.elastic.grouping import Lane, expected, grouped, keyed_by, reseated
from treadle_core.elastic.ordering import Ordering, first_come
from treadle_core.elastic.pools import InvalidPoolError, Pool
from treadle_core.elastic.waiting import Waiting
from treadle_core.errors import CoreError

# How many choices of units the first of those that wait may try in the objective; the paper finds 2 or 3 enough.
DEPTH = 2


class InvalidEstimateError(CoreError):
    """A typical duration or a depth that is no such number."""


class Start(NamedTuple):
    """An action that starts now with so many units of its key dimension (without a key: of the first it names) and the
    least of all others. node_id: the CPU node, if it asks for one; chunk: its GPUs, if it asks for any."""

    action: Action
    units: int
    node_id: str | None
    chunk: Chunk | None


def decide(
    waiting: Waiting,
    pools: Sequence[Pool],
    executing: Sequence[Executing],
    typical_s: float,
    order: Ordering = first_come,
    depth: int = DEPTH,
) -> tuple[Start, ...]:
    """Those that start now, in the order that `order` gives.

    typical_s: seconds that an action of unknown duration is taken to last. Raises InvalidEstimateError,
    InvalidPoolError, InvalidExecutingError, and InvalidActionError for an action on a node that is gone.
    """
    _check(waiting, pools, typical_s, depth)
    running = by_lane(executing, [(each, node) for pool in pools for each in pool.dimensions for node in pool.nodes])
    candidates = select(waiting, order(waiting), pools)
    by_key = keyed_by(waiting, candidates)
    units = np.full(len(candidates.rows), WAITS, np.int64)
    for at, pool in enumerate(pools):
        counted_on = expected(candidates, at, len(pool.nodes))
        for dimension, (number, node) in itertools.product(pool.dimensions, enumerate(pool.nodes)):
            keyed = by_key[dimension]
            if keyed is None:
                continue
            lane = Lane(pool, at, number, dimension, keyed, counted_on, *running[dimension, node])
            found = grouped(waiting, candidates, lane, typical_s, depth)
            if found is None:
                continue
            group, members = found
            chosen = group.started()
            if chosen is None:
                starts = reseated(waiting, candidates, lane)
                units[members] = WAITS
                units[starts] = waiting.units[candidates.rows[starts], 0]
            else:
                starts = group.candidates[: len(chosen)]
                units[members[starts]] = group.curves.units[starts, chosen]
    return _starts(waiting, candidates, pools, units)


def _starts(waiting: Waiting, candidates: Candidates, pools: Sequence[Pool], units: Indexes) -> tuple[Start, ...]:
    starting = np.flatnonzero(units != WAITS)
    rows, units = candidates.rows[starting], units[starting]
    nodes: list[str | None] = [None] * len(rows)
    chunks: list[Chunk | None] = [None] * len(rows)
    for at, pool in enumerate(pools):
        asking = np.flatnonzero(candidates.seats[at, starting] != NOT_ASKED)
        names = pool.nodes
        if names != (None,):
            for index, seat in zip(asking.tolist(), candidates.seats[at, starting[asking]].tolist(), strict=True):
                nodes[index] = names[seat]
        column = waiting.dimensions.index(pool.dimensions[0])
        held = np.where(waiting.key[rows] == column, units, waiting.least[rows, column])[asking]
        for index, chunk in zip(asking.tolist(), pool.chunks(held), strict=False):
            chunks[index] = chunk
    return tuple(map(Start, [waiting.actions[row] for row in rows.tolist()], units.tolist(), nodes, chunks))


def _check(waiting: Waiting, pools: Sequence[Pool], typical_s: float, depth: int) -> None:
    if not (math.isfinite(typical_s) and typical_s >= 0.0):
        raise InvalidEstimateError("typical_s", f"must be a number of seconds, at least 0, is {typical_s}")
    if depth < 1:
        raise InvalidEstimateError("depth", f"must be at least 1, is {depth}")
    managed = [dimension for pool in pools for dimension in pool.dimensions]
    if sorted(managed) != sorted(waiting.dimensions):
        raise InvalidPoolError("pools", f"have {sorted(managed)}, the queue was made for {sorted(waiting.dimensions)}")
    for index, pool in enumerate(pools):
        pool.check(f"pools[{index}]")
