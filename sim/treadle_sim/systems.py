"""The systems that are compared: each a policy of the controller, a predictor and a way to choose engines.

Baselines are as strong as their authors make them and run under the same controller, engines and workload; where a
system chooses one degree for all engines, callers try every degree and take the best. Sources: Heddle §7 (verl, verl*,
slime), Autellix (least attained service), and tool-boundary pausing as in ThunderAgent: trajectories first come, first
served, with KV reserved for those that have started.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from treadle_core.model import TREADLE_POLICY, CostModel, Ordering, PlacementRule, Policy
from treadle_core.planning.plans import Planner
from treadle_core.tuning import Tuning

from treadle_sim.rank_scaling import RankScaling

# Treadle's client generates a turn longer than this in several calls (ADR 0011), so that the trajectory can move, and
# be ranked again, in the middle of it: 10 to 20 seconds of decoding, for a ticket and the prefill of one token.
CALL_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class System:
    """predictor: a name of `make_predictor`, "none", or "" for the setting's choice. allocated: engines of several
    degrees, planned with `cost_model`; else all of one degree. call_tokens: most of one call, 0 for whole turns.
    paced: its queue paces, shares and gathers prefills; no queue of another system does. planner: how trajectories are
    planned again."""

    name: str
    title: str
    policy: Policy
    predictor: str = "none"
    allocated: bool = False
    cost_model: CostModel = CostModel.CRITICAL_PATH
    call_tokens: int = 0
    paced: bool = False
    tuning: Tuning = field(default_factory=Tuning)
    planner: type[Planner] = Planner


def _stepwise(placement: PlacementRule, ordering: Ordering = Ordering.ROUND_ROBIN, *, preempt: bool = False) -> Policy:
    """The policy of a framework that schedules steps, not trajectories: no plan, no moves."""
    return Policy(ordering=ordering, placement=placement, migrate=False, preempt=preempt)


VERL = System("verl", "verl: pinned to an engine, steps in the order they arrive", _stepwise(PlacementRule.PINNED))
STICKY = System("sticky", "prime-rl, SkyRL: the least loaded engine at the first step", _stepwise(PlacementRule.STICKY))
VERL_STAR = System("verl*", "verl*: cache-aware, least load beyond a skew of 32", _stepwise(PlacementRule.CACHE_AWARE))
SLIME = System("slime", "slime: least loaded engine at each step", _stepwise(PlacementRule.LEAST_LOAD))
LEAST_ATTAINED = System(
    "affinity-las",
    "session affinity with least attained service",
    _stepwise(PlacementRule.PINNED, Ordering.LEAST_ATTAINED, preempt=True),
)
PAUSING = System(
    "pausing",
    "tool-boundary pausing: trajectories in order of arrival, room held for whoever has begun",
    Policy(ordering=Ordering.FCFS, placement=PlacementRule.PINNED, migrate=False, preempt=True, reserve=True),
)
HEDDLE = System(
    "heddle",
    "Heddle as printed: longest first, presorted partition by group size, ranks scaled, mixed parallelism",
    Policy(),
    predictor="",
    allocated=True,
    cost_model=CostModel.GROUP_SIZE,
    planner=RankScaling,
)
TREADLE = System("treadle", "Treadle", TREADLE_POLICY, "", allocated=True, call_tokens=CALL_TOKENS, paced=True)
TREADLE_HOMOGENEOUS = replace(
    TREADLE, name="treadle-homogeneous", title="Treadle on engines of one degree", allocated=False
)
TREADLE_WHOLE_TURNS = replace(
    TREADLE, name="treadle-whole-turns", title="Treadle, each turn in one call however long", call_tokens=0
)
ORACLE = replace(TREADLE, name="oracle", title="Treadle told every length", predictor="oracle")

BASELINES = (VERL, STICKY, VERL_STAR, SLIME, LEAST_ATTAINED, PAUSING)
SYSTEMS: Mapping[str, System] = {
    system.name: system for system in (*BASELINES, HEDDLE, TREADLE_HOMOGENEOUS, TREADLE, TREADLE_WHOLE_TURNS, ORACLE)
}
