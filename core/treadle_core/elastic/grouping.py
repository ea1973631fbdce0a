"""Groups of the queue by key dimension and lane (C.split of Algorithm 1, W.split of Algorithm 2).

An action without a key is grouped by the first dimension that it names, with one choice: its least. What other
dimensions' actions take of this one is served first and comes back when they end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle_core.elastic.candidates import WAITS, Candidates
from treadle_core.elastic.curves import Floats, Indexes
from treadle_core.elastic.group import Group
from treadle_core.elastic.pools import Pool
from treadle_core.elastic.waiting import Waiting


class Lane(NamedTuple):
    """One dimension of one lane of a pool, the at-th of the pools, and what runs there: when it ends, its units, and
    how many of it are scalable."""

    pool: Pool
    at: int
    number: int
    dimension: str
    ends_s: Floats
    units: Indexes
    scalable: int


def grouped(
    waiting: Waiting, candidates: Candidates, lane: Lane, typical_s: float, depth: int
) -> tuple[Group, Indexes] | None:
    """The lane's group and, by its action, the place in order; None where no candidate has its key there."""
    rows, seats, homes = candidates.rows, candidates.seats[lane.at], candidates.homes[lane.at]
    column = waiting.dimensions.index(lane.dimension)
    keyed = waiting.key[rows] == column
    seated = seats == lane.number
    starting = keyed & seated & candidates.admitted
    if not starting.any():
        return None
    # Whoever waits for any lane is counted on one, in turn.
    expected = np.where(homes >= 0, homes, np.arange(len(rows)) % len(lane.pool.nodes))
    members = np.flatnonzero(starting | (keyed & (seats == WAITS) & (expected == lane.number)))
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
    keyed = waiting.key[rows] == waiting.dimensions.index(lane.dimension)
    here = (seats == lane.number) | ((seats == WAITS) & ((homes == lane.number) | (len(lane.pool.nodes) == 1)))
    others_seat = (np.delete(candidates.seats, lane.at, axis=0) != WAITS).all(axis=0)
    scalable = keyed & (waiting.counts[rows] > 1)
    seats[here & scalable] = WAITS
    asking = np.flatnonzero(here & ~scalable & others_seat)
    columns = [waiting.dimensions.index(dimension) for dimension in lane.pool.dimensions]
    needs = np.maximum(waiting.least[rows[asking]][:, columns], 0)
    seats[asking] = lane.pool.seat(needs, np.full(len(asking), lane.number, np.int64))
    starts: Indexes = asking[keyed[asking] & (seats[asking] != WAITS)]
    return starts
