"""State of the controller, which the handlers of all events share. Each part keeps its own
invariants."""

import heapq
import math
from dataclasses import dataclass, field

from treadle_core.bookkeeping import Books
from treadle_core.model import Policy, TrajectoryRecord
from treadle_core.planning.plans import Planner
from treadle_core.ranking.priorities import Priorities, token_s
from treadle_core.steps.transfers import MeasuredMoves
from treadle_core.tables.engines import EngineTable, Siting
from treadle_core.tables.jobs import JobTable, Shares
from treadle_core.tables.trajectories import TrajectoryTable
from treadle_core.tables.waiting import WaitingSteps
from treadle_core.tuning import Tuning


class Deadlines:
    """Deadlines by id, in a heap, so that a tick looks only at ids whose time has come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_s: dict[str, float] = {}

    def set(self, name: str, due_s: float) -> None:
        """Set the time of an id, in place of an earlier one."""
        self._due_s[name] = due_s
        heapq.heappush(self._heap, (due_s, name))

    def take_due(self, now: float) -> list[str]:
        """Remove and return the ids whose time has come, earliest first."""
        names: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due_s, name = heapq.heappop(self._heap)
            if self._due_s.get(name) == due_s:  # otherwise it was set again later
                del self._due_s[name]
                names.append(name)
        return names


@dataclass
class State:
    """Parts of the controller's state. announcements: closed trajectories whose closing is to be
    published, and when. sweeps: when each trajectory is looked at: its ticket may have expired, it
    may be abandoned, or be forgotten. loads: when an engine that is behind gets another request to
    load. mean_tool_s: over all tool calls. mean_observed_tokens: tokens that tools add to a context
    in a turn. measured_moves: how long moves took. restored_s: when this controller took over from
    an earlier one; until then, clients could not reach it. books: accounts that handlers may read
    and only the controller writes."""

    tuning: Tuning
    policy: Policy
    jobs: JobTable
    engines: EngineTable
    table: TrajectoryTable
    siting: Siting
    planner: Planner
    shares: Shares
    priorities: Priorities
    waiting: WaitingSteps
    books: Books
    mean_observed_tokens: float
    measured_moves: MeasuredMoves
    mean_tool_s: float = 0.0
    restored_s: float = -math.inf
    announcements: dict[str, float] = field(default_factory=dict)
    sweeps: Deadlines = field(default_factory=Deadlines)
    loads: Deadlines = field(default_factory=Deadlines)

    @classmethod
    def new(
        cls, policy: Policy, tuning: Tuning, epoch_s: float, planner_type: type[Planner]
    ) -> "State":
        engines = EngineTable(tuning.lease_ttl_s)
        table = TrajectoryTable(tuning)
        jobs = JobTable(tuning.job_lease_s, tuning.job_resume_s)
        planner = planner_type(engines, table, tuning)
        waiting = WaitingSteps()
        return cls(
            tuning=tuning,
            policy=policy,
            jobs=jobs,
            engines=engines,
            table=table,
            siting=Siting(engines, table, tuning),
            planner=planner,
            shares=Shares(engines, table, jobs),
            priorities=Priorities(tuning, epoch_s),
            waiting=waiting,
            books=Books(planner, waiting),
            mean_observed_tokens=tuning.expected_observed_tokens,
            measured_moves=MeasuredMoves(tuning.move_newest_weight),
        )

    def priority(self, record: TrajectoryRecord) -> float:
        """Return the priority of a trajectory's step on its present engine."""
        return self.priorities.priority(record, token_s(self.engines.spec(record.engine_id)))
