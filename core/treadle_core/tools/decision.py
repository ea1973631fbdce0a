"""Make a scheduling decision: which waiting actions start now, with how many units each, and where
(ARL-Tangram §4.2).

It is a function of the queue, the pools, the running actions and a typical duration; it changes
nothing. The queue has the waiting actions as columns of numbers, so that a decision over thousands
of them touches no object. Invariant: row r of every column belongs to `actions[r]`. Rows are in no
order: a removal moves the last row into the gap.

Candidates are waiting actions that could all start now, each with its least (Algorithm 1, lines 1
to 4). Where an action requires several pools and not all have room, it reserves its units in those
that have. The paper's prefix of the whole queue would hold up every later action; here only those
wait that require the units which the earlier one waits for.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes
from treadle_core.tools.action import Action, InvalidActionError, key_units, seconds_at
from treadle_core.tools.arrangement import Chunk, Curves
from treadle_core.tools.group import Group
from treadle_core.tools.pools import WAITS, Pool

FIRST_ROWS = 64
FIRST_CHOICES = 8

NOT_ASKED = -2  # in place of a partition: the action does not use this pool


class ActionQueue:
    """Waiting actions as columns by row r: least[r, d], the least units of dimension d, -1 where
    the action does not require it. key[r]: the dimension that decides its group. arrival[r].
    units[r, c] and seconds[r, c]: its c-th choice, of counts[r]; seconds are NaN where unknown. A
    duration is computed once, when the action is added."""

    def __init__(self, dimensions: Iterable[str]) -> None:
        self.dimensions = tuple(dimensions)
        self.actions: list[Action] = []
        self._rows: dict[str, int] = {}
        self.least: Indexes = np.empty((FIRST_ROWS, len(self.dimensions)), np.int64)
        self.key: Indexes = np.empty(FIRST_ROWS, np.int64)
        self.arrival: Indexes = np.empty(FIRST_ROWS, np.int64)
        self.counts: Indexes = np.empty(FIRST_ROWS, np.int64)
        self.units: Indexes = np.zeros((FIRST_ROWS, FIRST_CHOICES), np.int64)
        self.seconds: Floats = np.zeros((FIRST_ROWS, FIRST_CHOICES))

    def __len__(self) -> int:
        return len(self.actions)

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._rows

    def add(self, action: Action) -> None:
        """Append an action that `check_action` accepts and whose id does not wait."""
        # Without a key the group is that of the first dimension, of which the action gets the
        # least.
        key = action.sized_dimension
        choices: list[int] = []  # those that are faster than every choice with fewer units
        seconds: list[float] = []
        for units in key_units(action.cost[key]) if action.scalable else (action.cost[key].least,):
            took_s = seconds_at(action, units)
            if took_s is None or not seconds or took_s < seconds[-1]:
                choices.append(units)
                seconds.append(np.nan if took_s is None else took_s)
        row = len(self.actions)
        self._grow(row + 1, len(choices))
        self.least[row] = [
            action.cost[dimension].least if dimension in action.cost else -1
            for dimension in self.dimensions
        ]
        self.key[row] = self.dimensions.index(key)
        self.arrival[row] = action.arrival
        self.counts[row] = len(choices)
        self.units[row, : len(choices)] = choices
        self.seconds[row, : len(choices)] = seconds
        self.actions.append(action)
        self._rows[action.action_id] = row

    def remove(self, action_id: str) -> Action:
        """Remove and return an action. Raises KeyError for one that does not wait."""
        row, last = self._rows.pop(action_id), len(self.actions) - 1
        action, moved = self.actions[row], self.actions.pop()
        if row != last:
            for column in (
                self.least,
                self.key,
                self.arrival,
                self.counts,
                self.units,
                self.seconds,
            ):
                column[row] = column[last]
            self.actions[row] = moved
            self._rows[moved.action_id] = row
        return action

    def rows_by_arrival(self) -> Indexes:
        """Return int64[n], the rows first come, first served (§4.2). No action starves, and all are
        on their trajectories' critical paths."""
        return np.argsort(self.arrival[: len(self)], kind="stable")

    def curves(self, rows: Indexes, typical_s: float) -> Curves:
        """Return the choices of these rows; an unknown duration is taken to be `typical_s`."""
        widest = int(self.counts[rows].max(initial=1))
        seconds = self.seconds[rows, :widest]
        return Curves(
            self.units[rows, :widest],
            np.where(np.isnan(seconds), typical_s, seconds),
            self.counts[rows],
        )

    def _grow(self, rows: int, choices: int) -> None:
        have_rows, have_choices = self.units.shape
        if rows > have_rows:
            more = (0, have_rows)
            self.least = np.pad(self.least, (more, (0, 0)))
            self.key, self.arrival, self.counts = (
                np.pad(c, more) for c in (self.key, self.arrival, self.counts)
            )
            self.units, self.seconds = (
                np.pad(self.units, (more, (0, 0))),
                np.pad(self.seconds, (more, (0, 0))),
            )
        if choices > have_choices:
            wider = ((0, 0), (0, choices - have_choices))
            self.units, self.seconds = np.pad(self.units, wider), np.pad(self.seconds, wider)


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
