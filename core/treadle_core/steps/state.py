"""What the controller holds, as one bundle that its handlers share. Each part owns its own invariants; this file adds
none.

What falls due when: a heap that a tick asks, so that no tick walks over everything there is.

Invariant: each id has at most one time that counts, the last one set; what it said before is passed over. A time that
turns out too early (the trajectory was touched since) is set again by the caller, so that a touch costs nothing.

Those that wait to begin, in a line for each engine.

Invariants: nobody stands in two lines, and each line is in order: the best ranked first, of equals whoever asked first.
A place in a line is as of when it was last given (`put`): what is predicted since changes nothing until then."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from treadle_core.events import StepRequested
from treadle_core.model import Policy, TrajectoryRecord
from treadle_core.planning.plans import Planner
from treadle_core.planning.siting import Siting
from treadle_core.ranking.orderings import Orderings
from treadle_core.ranking.remaining import token_s
from treadle_core.tables.engines import EngineRegistry
from treadle_core.tables.trajectories import TrajectoryTable
from treadle_core.tuning import Tuning


class Deadlines:
    """Ids by the time when somebody should look at them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_s: dict[str, float] = {}

    def set(self, name: str, due_s: float) -> None:
        """Look at it then, and not before."""
        self._due_s[name] = due_s
        heapq.heappush(self._heap, (due_s, name))

    def due(self, now: float) -> list[str]:
        """Those whose time has come, the earliest first; they have none any more."""
        names: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due_s, name = heapq.heappop(self._heap)
            if self._due_s.get(name) == due_s:
                del self._due_s[name]
                names.append(name)
        return names


class Waiter(NamedTuple):
    """One of a line; the smallest begins first. place: how many had been held before it."""

    rank: float  # its priority, negated
    place: int
    trajectory_id: str


class Lines:
    """The lines, by engine."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Waiter]] = {}
        self._stands: dict[str, tuple[str, Waiter]] = {}

    def engine_ids(self) -> list[str]:
        """Those with a line, in order."""
        return sorted(self._lines)

    def line(self, engine_id: str) -> Sequence[Waiter]:
        """The line of an engine, as it is at any time; the next to begin is first."""
        return self._lines.get(engine_id, ())

    def put(self, engine_id: str, waiter: Waiter) -> None:
        """Gives a trajectory this place, whatever it had before."""
        stands = (engine_id, waiter)
        if self._stands.get(waiter.trajectory_id) == stands:
            return
        self.drop(waiter.trajectory_id)
        self._stands[waiter.trajectory_id] = stands
        insort(self._lines.setdefault(engine_id, []), waiter)

    def drop(self, trajectory_id: str) -> None:
        """It waits no more, if it did."""
        stands = self._stands.pop(trajectory_id, None)
        if stands is not None:
            engine_id, waiter = stands
            line = self._lines[engine_id]
            del line[bisect_left(line, waiter)]
            if not line:
                del self._lines[engine_id]


class Held(NamedTuple):
    """A request that waits; place: how many had been held before it."""

    event: StepRequested
    place: int


@dataclass
class State:
    """The parts. `unannounced`: closed trajectories whose closing is to be published, and from when on. `sweeps`: when
    each trajectory might be abandoned, or be forgotten. `mean_tool_s`: over all calls; `mean_observed_tokens`: of the
    context, a turn, that tools brought. `held`: requests for tickets that are not answered yet (`holding.py`);
    `held_count`: how many there ever were; `lines`: those of them that wait to begin."""

    tuning: Tuning
    policy: Policy
    engines: EngineRegistry
    table: TrajectoryTable
    siting: Siting
    planner: Planner
    orderings: Orderings
    unannounced: dict[str, float] = field(default_factory=dict)
    sweeps: Deadlines = field(default_factory=Deadlines)
    mean_tool_s: float = 0.0
    mean_observed_tokens: float = 0.0
    held: dict[str, "Held"] = field(default_factory=dict)
    held_count: int = 0
    lines: Lines = field(default_factory=Lines)

    @classmethod
    def new(cls, policy: Policy, tuning: Tuning, epoch_s: float) -> "State":
        """An empty one."""
        engines = EngineRegistry(tuning.lease_ttl_s)
        table = TrajectoryTable(tuning)
        return cls(
            tuning=tuning,
            policy=policy,
            engines=engines,
            table=table,
            siting=Siting(engines, table, tuning),
            planner=Planner(engines, table, tuning),
            orderings=Orderings(tuning, epoch_s),
            mean_observed_tokens=tuning.expected_observed_tokens,
        )

    def priority(self, record: TrajectoryRecord) -> float:
        """The priority of a trajectory's step on the engine where it is."""
        return self.orderings.priority(record, token_s(self.engines.spec(record.engine_id)))
