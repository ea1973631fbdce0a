"""A scheduling decision: which waiting actions start now, with how many units each, and where (ARL-Tangram §4.2).

A function of the queue, the pools, what runs and what a typical action takes. It changes nothing: who starts an action
takes it out of the queue and its units out of the pool.

Groups of the queue by key dimension and lane (C.split of Algorithm 1, W.split of Algorithm 2).

An action without a key is grouped by the first dimension that it names, with one choice: its least. What other
dimensions' actions take of this one is served first and comes back when they end.

The decision for one action that nobody waits before, and that has no choice: what `decide` gives, in a tenth of the
time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle_core.refusals import CoreError
from treadle_core.tools.action import Action
from treadle_core.tools.arrangement import Floats, Indexes
from treadle_core.tools.chunks import Chunk
from treadle_core.tools.completions import Executing, by_lane
from treadle_core.tools.group import NOT_ASKED, WAITS, Candidates, Group, select
from treadle_core.tools.pools import InvalidPoolError, Pool
from treadle_core.tools.queue import Ordering, Waiting, first_come


class Lane(NamedTuple):
    """One dimension of one lane of a pool, the at-th of the pools, and what runs there: when it ends, its units, and
    how many of it are scalable. keyed: bool[n], whose key it is; expected: int64[n], the lane that whoever waits is
    counted on."""

    pool: Pool
    at: int
    number: int
    dimension: str
    keyed: npt.NDArray[np.bool_]
    expected: Indexes
    ends_s: Floats
    units: Indexes
    scalable: int


def keyed_by(waiting: Waiting, candidates: Candidates) -> dict[str, npt.NDArray[np.bool_] | None]:
    """By dimension, bool[n]: whose key it is; None where it is no admitted candidate's."""
    keys = waiting.key[candidates.rows]
    found = {dimension: keys == column for column, dimension in enumerate(waiting.dimensions)}
    return {each: keyed if (keyed & candidates.admitted).any() else None for each, keyed in found.items()}


def expected(candidates: Candidates, at: int, lanes: int) -> Indexes:
    """int64[n]: the lane of the at-th pool that each is counted on while it waits: its home; for any lane, one in
    turn."""
    homes = candidates.homes[at]
    return np.where(homes >= 0, homes, np.arange(len(homes)) % lanes)


def grouped(
    waiting: Waiting, candidates: Candidates, lane: Lane, typical_s: float, depth: int
) -> tuple[Group, Indexes] | None:
    """The lane's group and, by its action, the place in order; None where no candidate has its key there."""
    rows, seats = candidates.rows, candidates.seats[lane.at]
    column = waiting.dimensions.index(lane.dimension)
    seated = seats == lane.number
    starting = lane.keyed & seated & candidates.admitted
    if not starting.any():
        return None
    members = np.flatnonzero(starting | (lane.keyed & (seats == WAITS) & (lane.expected == lane.number)))
    curves = waiting.curves(rows[members], typical_s)
    first = np.flatnonzero(starting[members])
    others = rows[seated & ~starting]
    others = others[waiting.least[others, column] > 0]
    taken = waiting.least[others, column]
    share = lane.pool.share(lane.number, lane.pool.dimensions.index(lane.dimension), taken)
    ends_s = np.concatenate((lane.ends_s, waiting.curves(others, typical_s).seconds[:, 0]))
    units = np.concatenate((lane.units, taken))
    return Group(curves, first, ends_s, units, share, depth, lane.scalable), members


def reseated(waiting: Waiting, candidates: Candidates, lane: Lane) -> Indexes:
    """The places of those that start where no candidate of the lane's group that can be scaled does: whoever cannot be
    is seated anew, so that one that waits for more keeps no seat from those that need only that.

    Seats of the lane are changed accordingly. Those that are free to go elsewhere keep the seats that they have.
    """
    rows, seats, homes = candidates.rows, candidates.seats[lane.at], candidates.homes[lane.at]
    here = (seats == lane.number) | ((seats == WAITS) & ((homes == lane.number) | (len(lane.pool.nodes) == 1)))
    others_seat = (np.delete(candidates.seats, lane.at, axis=0) != WAITS).all(axis=0)
    scalable = lane.keyed & (waiting.counts[rows] > 1)
    seats[here & scalable] = WAITS
    asking = np.flatnonzero(here & ~scalable & others_seat)
    columns = [waiting.dimensions.index(dimension) for dimension in lane.pool.dimensions]
    needs = np.maximum(waiting.least[rows[asking]][:, columns], 0)
    seats[asking] = lane.pool.seat(needs, np.full(len(asking), lane.number, np.int64))
    starts: Indexes = asking[lane.keyed[asking] & (seats[asking] != WAITS)]
    return starts


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


def start_alone(action: Action, pools: Sequence[Pool]) -> Start | None:
    """Where it starts with its least; None: it has to wait. The action has been checked (`action_input`)."""
    node_id: str | None = None
    chunk: Chunk | None = None
    cost = action.cost
    for pool in pools:
        needs = [cost[dimension].least if dimension in cost else 0 for dimension in pool.dimensions]
        if not any(needs):
            continue
        nodes = pool.nodes
        home = -1 if nodes == (None,) or action.node_id is None else nodes.index(action.node_id)
        seat = int(pool.seat(np.array([needs]), np.array([home]))[0])
        if seat < 0:
            return None
        if nodes != (None,):
            node_id = nodes[seat]
        for found in pool.chunks(np.array([needs[0]])):
            chunk = found
    return Start(action, cost[action.key or next(iter(cost))].least, node_id, chunk)
