"""Make a scheduling decision: which waiting actions start now, with how many units each, and where
(ARL-Tangram §4.2).

It is a function of the queue, the pools, the running actions and a typical duration; it changes
nothing.

Candidates are waiting actions that could all start now, each with its least (Algorithm 1, lines 1
to 4). Where an action requires several pools and not all have room, it reserves its units in those
that have. The paper's prefix of the whole queue would hold up every later action; here only those
wait that require the units which the earlier one waits for.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Flags, Indexes
from treadle_core.tools.action import Action, InvalidActionError
from treadle_core.tools.arrangement import Chunk
from treadle_core.tools.group import Group
from treadle_core.tools.pools import WAITS, Pool
from treadle_core.tools.queue import ActionQueue

NOT_ASKED = -2  # in place of a partition: the action does not use this pool


class Executing(NamedTuple):
    """Units of a dimension that come back in `ends_in_s` seconds; below 0 where the action is
    overdue.

    node_id: of a dimension that is managed by node. An action that holds several dimensions is
    several of these. scalable: it could have had more or fewer units, so that more such actions are
    likely to arrive while it runs.
    """

    dimension: str
    units: int
    ends_in_s: float
    node_id: str | None = None
    scalable: bool = False


class Start(NamedTuple):
    """Start of an action now with `units` of its `Action.sized_dimension` and the least of all
    others. node_id: the CPU node, chunk: the GPUs, if it requires them."""

    action: Action
    units: int
    node_id: str | None
    chunk: Chunk | None


def decide(
    queue: ActionQueue, pools: Sequence[Pool], executing: Sequence[Executing], typical_s: float
) -> tuple[Start, ...]:
    """Return the actions that start now, in the order of their arrival.

    typical_s: seconds that an action of unknown duration is taken to last. Raises
    InvalidActionError for an action on a node that is gone.
    """
    running: defaultdict[tuple[str, str | None], list[Executing]] = defaultdict(list)
    for each in executing:
        running[each.dimension, each.node_id].append(each)
    candidates = select_candidates(queue, pools)
    units = np.full(len(candidates.rows), WAITS, np.int64)
    for at, pool in enumerate(pools):
        for dimension in pool.dimensions:
            keyed = queue.key[candidates.rows] == queue.dimensions.index(dimension)
            if not (keyed & candidates.admitted).any():
                continue
            for partition, node in enumerate(pool.nodes):
                group = _PartitionGroup(queue, candidates, pool, at, partition, dimension, keyed)
                group.decide(running[dimension, node], typical_s, units)
    return _starts(queue, candidates, pools, units)


@dataclass(frozen=True)
class Candidates:
    """Candidates by place i in the order of arrival. rows[i]: the row of the queue. assigned[p, i]:
    the partition in pool p, or WAITS or NOT_ASKED. homes[p, i]: the partition that the action has
    to use, -1: any. admitted[i]: it waits for no pool."""

    rows: Indexes
    assigned: Indexes
    homes: Indexes
    admitted: Flags


def select_candidates(queue: ActionQueue, pools: Sequence[Pool]) -> Candidates:
    """Return the candidates among the waiting actions. Raises InvalidActionError for an action on a
    node that is not there."""
    rows = queue.rows_by_arrival()
    assigned = np.full((len(pools), len(rows)), NOT_ASKED, np.int64)
    homes = np.full((len(pools), len(rows)), -1, np.int64)
    for at, pool in enumerate(pools):
        columns = [queue.dimensions.index(dimension) for dimension in pool.dimensions]
        needs = queue.least[rows][:, columns]
        asking = np.flatnonzero((needs >= 0).any(axis=1))
        if pool.nodes != (None,):
            homes[at, asking] = _homes(queue, rows[asking], pool)
        assigned[at, asking] = pool.assign(np.maximum(needs[asking], 0), homes[at, asking])
    return Candidates(rows, assigned, homes, (assigned != WAITS).all(axis=0))


def _homes(queue: ActionQueue, rows: Indexes, pool: Pool) -> list[int]:
    partitions = {node: partition for partition, node in enumerate(pool.nodes)}
    partitions[None] = -1
    actions = queue.actions
    try:
        return [partitions[actions[row].node_id] for row in rows.tolist()]
    except KeyError as missing:
        raise InvalidActionError(
            "node_id", f"no node is called {missing}; place its trajectory anew"
        ) from missing


@dataclass(frozen=True)
class _PartitionGroup:
    """One dimension of one partition of the at-th pool, and the actions whose key it is (C.split of
    Algorithm 1)."""

    queue: ActionQueue
    candidates: Candidates
    pool: Pool
    at: int
    partition: int
    dimension: str
    keyed: Flags

    def decide(self, executing: Sequence[Executing], typical_s: float, units: Indexes) -> None:
        """Write the units of each action that starts, by its place. executing: what runs on the
        partition."""
        rows, assigned = self.candidates.rows, self.candidates.assigned[self.at]
        here = assigned == self.partition
        starting = self.keyed & here & self.candidates.admitted
        if not starting.any():
            return
        homes = self.candidates.homes[self.at]
        # A waiting action counts for its home; without one, each for another partition in turn.
        expected = np.where(homes >= 0, homes, np.arange(len(homes)) % len(self.pool.nodes))
        waiting = self.keyed & (assigned == WAITS) & (expected == self.partition)
        members = np.flatnonzero(starting | waiting)
        curves = self.queue.curves(rows[members], typical_s)
        # What actions with another key take of this dimension is served first and comes back when
        # they end.
        others = rows[here & ~starting]
        column = self.queue.dimensions.index(self.dimension)
        others = others[self.queue.least[others, column] > 0]
        taken = self.queue.least[others, column]
        share = self.pool.share(self.partition, self.pool.dimensions.index(self.dimension), taken)
        # an overdue action is expected to end now
        ends_s = [max(each.ends_in_s, 0.0) for each in executing]
        group = Group(
            curves,
            np.flatnonzero(starting[members]),
            np.concatenate((ends_s, self.queue.curves(others, typical_s).seconds[:, 0])),
            np.concatenate((np.array([each.units for each in executing], np.int64), taken)),
            share,
            sum(each.scalable for each in executing),
        )
        chosen = group.choose_starts()
        if chosen is not None:
            starts = group.candidates[: len(chosen)]
            units[members[starts]] = curves.units[starts, chosen]
            return
        units[members] = WAITS
        places = self._reassign()
        units[places] = self.queue.units[rows[places], 0]

    def _reassign(self) -> Indexes:
        """Assign the partition again without the group's scalable actions, which all wait, so that
        the first of them reserves nothing that other actions need. Return the places of the actions
        of the group that start.

        Actions that may use other partitions keep what they were assigned.
        """
        rows, assigned, homes = (
            self.candidates.rows,
            self.candidates.assigned[self.at],
            self.candidates.homes[self.at],
        )
        only = len(self.pool.nodes) == 1
        here = (assigned == self.partition) | (
            (assigned == WAITS) & ((homes == self.partition) | only)
        )
        others_fit = (np.delete(self.candidates.assigned, self.at, axis=0) != WAITS).all(axis=0)
        scalable = self.keyed & (self.queue.counts[rows] > 1)
        assigned[here & scalable] = WAITS
        asking = np.flatnonzero(here & ~scalable & others_fit)
        columns = [self.queue.dimensions.index(dimension) for dimension in self.pool.dimensions]
        needs = np.maximum(self.queue.least[rows[asking]][:, columns], 0)
        assigned[asking] = self.pool.assign(needs, np.full(len(asking), self.partition, np.int64))
        starts: Indexes = asking[self.keyed[asking] & (assigned[asking] != WAITS)]
        return starts


def _starts(
    queue: ActionQueue, candidates: Candidates, pools: Sequence[Pool], units: Indexes
) -> tuple[Start, ...]:
    starting = np.flatnonzero(units != WAITS)
    rows, units = candidates.rows[starting], units[starting]
    nodes: list[str | None] = [None] * len(rows)
    chunks: list[Chunk | None] = [None] * len(rows)
    for at, pool in enumerate(pools):
        asking = np.flatnonzero(candidates.assigned[at, starting] != NOT_ASKED)
        names = pool.nodes
        if names != (None,):
            partitions = candidates.assigned[at, starting[asking]].tolist()
            for index, partition in zip(asking.tolist(), partitions, strict=True):
                nodes[index] = names[partition]
        column = queue.dimensions.index(pool.dimensions[0])
        held = np.where(queue.key[rows] == column, units, queue.least[rows, column])[asking]
        for index, chunk in zip(asking.tolist(), pool.chunks(held), strict=False):
            chunks[index] = chunk
    return tuple(
        map(Start, [queue.actions[row] for row in rows.tolist()], units.tolist(), nodes, chunks)
    )


def start_alone(action: Action, pools: Sequence[Pool]) -> Start | None:
    """Start an action with its least while no other waits: the same as `decide`, in a tenth of the
    time. None: it has to wait. The action has been checked."""
    node_id: str | None = None
    chunk: Chunk | None = None
    cost = action.cost
    for pool in pools:
        needs = [cost[dimension].least if dimension in cost else 0 for dimension in pool.dimensions]
        if not any(needs):
            continue
        nodes = pool.nodes
        home = -1 if nodes == (None,) or action.node_id is None else nodes.index(action.node_id)
        partition = int(pool.assign(np.array([needs]), np.array([home]))[0])
        if partition == WAITS:
            return None
        if nodes != (None,):
            node_id = nodes[partition]
        for found in pool.chunks(np.array([needs[0]])):
            chunk = found
    return Start(action, cost[action.sized_dimension].least, node_id, chunk)
