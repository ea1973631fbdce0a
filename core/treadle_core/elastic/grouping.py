"""Groups of the queue by key dimension and lane (C.split of Algorithm 1, W.split of Algorithm 2).

An action without a key is grouped by the first dimension that it names, with one choice: its least. What other
dimensions' actions take of this one is served first and comes back when they end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle_core.elastic.candidates import WAITS, Candidates
from treadle_core.elastic.curves import Floats, Indexes
from treadle_core.elastic.group import Group
from treadle_core.elastic.pools import Pool
from treadle_core.elastic.waiting import Waiting


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
