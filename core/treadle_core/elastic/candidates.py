"""The candidates: waiting actions that could all start now, each with its least (Algorithm 1, lines 1 to 4).

Where an action asks several pools and not all have room, those that have keep its place: what it asked for stays free
until it starts. The paper's prefix of the whole queue would keep those behind it waiting too, though they ask for
something else; here only those wait that want what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle_core.elastic.action_input import InvalidActionError
from treadle_core.elastic.curves import Indexes
from treadle_core.elastic.pools import Pool
from treadle_core.elastic.waiting import Waiting

NOT_ASKED = -2
WAITS = -1


@dataclass(frozen=True)
class Candidates:
    """rows[i]: the row of the queue that is i-th in order. seats[p, i]: its lane in pool p, or WAITS or NOT_ASKED.
    homes[p, i]: the lane that it has to go to, -1: any. admitted[i]: it has a seat wherever it asks for one."""

    rows: Indexes
    seats: Indexes
    homes: Indexes
    admitted: npt.NDArray[np.bool_]


def select(waiting: Waiting, rows: Indexes, pools: Sequence[Pool]) -> Candidates:
    """Raises InvalidActionError for an action on a node that is not there."""
    seats = np.full((len(pools), len(rows)), NOT_ASKED, np.int64)
    homes = np.full((len(pools), len(rows)), -1, np.int64)
    for at, pool in enumerate(pools):
        columns = [waiting.dimensions.index(dimension) for dimension in pool.dimensions]
        needs = waiting.least[rows][:, columns]
        asking = np.flatnonzero((needs >= 0).any(axis=1))
        if pool.nodes != (None,):
            homes[at, asking] = _homes(waiting, rows[asking], pool)
        seats[at, asking] = pool.seat(np.maximum(needs[asking], 0), homes[at, asking])
    return Candidates(rows, seats, homes, (seats != WAITS).all(axis=0))


def _homes(waiting: Waiting, rows: Indexes, pool: Pool) -> list[int]:
    lanes = {node: lane for lane, node in enumerate(pool.nodes)}
    lanes[None] = -1
    actions = waiting.actions
    try:
        return [lanes[actions[row].node_id] for row in rows.tolist()]
    except KeyError as missing:
        raise InvalidActionError("node_id", f"no node is called {missing}; place its trajectory anew") from missing
