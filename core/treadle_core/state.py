"""What the controller holds, as one bundle that its handlers share. Each part owns its own invariants; this file adds
none."""

from dataclasses import dataclass, field
from typing import NamedTuple

from treadle_core.deadlines import Deadlines
from treadle_core.engines import EngineRegistry
from treadle_core.events import StepRequested
from treadle_core.model import Policy, TrajectoryRecord
from treadle_core.planning import Planner
from treadle_core.remaining import token_s
from treadle_core.scheduling import Orderings
from treadle_core.siting import Siting
from treadle_core.trajectories import TrajectoryTable
from treadle_core.tuning import Tuning
from treadle_core.waiting import Lines


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
