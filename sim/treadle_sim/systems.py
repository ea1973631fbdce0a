"""Systems that are compared, and the simulation of one of them on a workload and a budget of GPUs.

A system is a policy of the controller, a predictor and a way to choose engines. Baselines are as
strong as their authors make them and run under the same controller, engines and workload; where a
system chooses one degree for all engines, callers try every degree and take the best. Sources:
Heddle §7 (verl, verl*, slime), Autellix (least attained service), and tool-boundary pausing as in
ThunderAgent: trajectories first come, first served, with KV reserved for those that have started.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from treadle_core.actions import AskPlan
from treadle_core.compiled import Indexes
from treadle_core.model import (
    ASYNCHRONOUS_POLICY,
    TREADLE_POLICY,
    CostModel,
    Ordering,
    PlacementRule,
    Policy,
    TrajectoryRecord,
)
from treadle_core.placing import paths
from treadle_core.placing.question import PlanWork
from treadle_core.planning import Planner, PlanTiming, Snapshot
from treadle_core.ranking.priorities import log_deviation, remaining_tokens
from treadle_core.tables.engines import EngineTable, carries_tags
from treadle_core.tables.trajectories import TrajectoryTable
from treadle_core.tuning import Tuning

from treadle_sim.allocation.plan import EngineKind, allocate, choose_degrees
from treadle_sim.cluster import Cluster, Latencies, Link, homogeneous
from treadle_sim.driver import Driver
from treadle_sim.engine_model import EngineModel
from treadle_sim.outcome import Outcome
from treadle_sim.predictors import make_predictor
from treadle_sim.workloads.workload import TrajectoryWork, Workload

# Treadle's client generates a turn longer than this in several calls (ADR 0011), so that the
# trajectory can move, and be ranked again, in the middle of it: 10 to 20 seconds of decoding, for a
# ticket and the prefill of one token.
CALL_TOKENS = 1_024


class Ranks:
    """Trajectories by length, longest first; equal ones in the order of arrival.

    One sorted list: an update is two binary searches and two moves of memory within it, 3
    microseconds with 6,400 trajectories; the moves would matter above some 100,000.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._key_of: dict[str, tuple[float, int]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, trajectory_id: str, length: float) -> None:
        """Add a trajectory, or change its length."""
        old = self._key_of.get(trajectory_id)
        if old is None:
            self._arrivals += 1
            key = (-length, self._arrivals)
        else:
            key = (-length, old[1])
            del self._keys[bisect_left(self._keys, old)]
        self._key_of[trajectory_id] = key
        insort(self._keys, key)

    def drop(self, trajectory_id: str) -> None:
        """Remove a trajectory, if it is here."""
        key = self._key_of.pop(trajectory_id, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]

    def rank(self, trajectory_id: str) -> int:
        """Return the rank of a trajectory, 0 for the longest; -1 where it is not here."""
        key = self._key_of.get(trajectory_id)
        return -1 if key is None else bisect_left(self._keys, key)


class ScaledGroups:
    """Group sizes of a plan, scaled to the open trajectories.

    The plan gives s_i of n trajectories to engine i, longest first. Of the ranks of n* open ones,
    engine i takes s_i * n* / n, in the plan's order.
    """

    def __init__(self, engine_ids: Sequence[str], sizes: Sequence[int]) -> None:
        self.engine_ids = tuple(engine_ids)
        self._ends = list(accumulate(sizes))

    def engine(self, rank: int, active: int) -> str:
        """Return the engine of a rank among `active` trajectories: the first whose group ends
        behind it. Groups end at S_i * n* / n, S_i the sum of the first i sizes. Empty where the
        plan placed no trajectory."""
        planned = self._ends[-1] if self._ends else 0
        if planned == 0 or not 0 <= rank < active:
            return ""
        # rank < S_i * n* / n, in whole numbers.
        return self.engine_ids[bisect_right(self._ends, rank * planned // active)]


def scale_groups(work: PlanWork, engine_ids: Sequence[str], engine_of: Indexes) -> ScaledGroups:
    """Return the groups of a plan, in the order of ranks. engine_of: index of each trajectory's
    engine, -1 for none.

    Groups are contiguous in length, so the longest and then the shortest trajectory of each put
    them in order.
    """
    placed = engine_of >= 0
    lengths, at = work.remaining_tokens[placed], engine_of[placed]
    count = len(engine_ids)
    sizes = np.bincount(at, minlength=count)
    longest, shortest = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(longest, at, lengths)
    np.minimum.at(shortest, at, lengths)
    order = [
        int(index) for index in np.lexsort((np.arange(count), -shortest, -longest)) if sizes[index]
    ]
    return ScaledGroups(
        [engine_ids[index] for index in order], [int(sizes[index]) for index in order]
    )


class NewsTiming(PlanTiming):
    """Timing that requests a plan when many trajectories are new, and never because of finished
    work."""

    def note_work(self) -> None:
        """Count nothing."""

    def is_due(self, now: float, open_count: int, ticked: bool) -> bool:
        """Return whether to request a plan now, with `open_count` open trajectories. ticked: at a
        tick."""
        return self.is_renewed(open_count) and (ticked or not self.awaits_answer(now))


class RankScaling(Planner):
    """Planner that follows Heddle's printed rule."""

    cost_model = CostModel.GROUP_SIZE
    must_gain = False

    def __init__(self, engines: EngineTable, table: TrajectoryTable, tuning: Tuning) -> None:
        super().__init__(engines, table, tuning)
        self._timing = NewsTiming(tuning)
        self._ranks = Ranks()
        self._groups = ScaledGroups((), ())

    def note_opening(self, record: TrajectoryRecord) -> None:
        super().note_opening(record)
        if _is_ranked(record):
            self._ranks.put(record.trajectory_id, remaining_tokens(record, self._tuning))

    def follow_prediction(self, record: TrajectoryRecord) -> None:
        if not _is_ranked(record):
            return
        self._ranks.put(record.trajectory_id, remaining_tokens(record, self._tuning))
        rank = self._ranks.rank(record.trajectory_id)
        target = self._engines.get(self._groups.engine(rank, len(self._ranks)))
        if (
            target is None
            or target.spec.engine_id == record.engine_id
            or not carries_tags(target, record)
        ):
            self._targets.pop(record.trajectory_id, None)
        else:
            self._targets[record.trajectory_id] = target.spec.engine_id

    def note_closing(self, record: TrajectoryRecord) -> None:
        super().note_closing(record)
        self._ranks.drop(record.trajectory_id)

    def note_engines(self) -> None:
        super().note_engines()
        self._groups = ScaledGroups((), ())

    def _follow(self, snapshot: Snapshot, question: AskPlan, engine_of: Indexes) -> list[str]:
        planned = self._place_answer(snapshot, question, engine_of, snapshot.movable())
        engine_ids = [engine.engine_id for engine in question.engines]
        self._groups = scale_groups(question.work, engine_ids, engine_of)
        moved = np.flatnonzero(planned != snapshot.placement)
        return self._set_targets(snapshot, planned, moved)


def _is_ranked(record: TrajectoryRecord) -> bool:
    return record.policy.placement is PlacementRule.PLANNED and not record.pinned_engine_id


@dataclass(frozen=True, slots=True)
class System:
    """A system that is compared. predictor: a name of `make_predictor`, "none", or "" for the
    setting's choice. allocated: engines of several degrees, planned with `cost_model`; else all of
    one degree. call_tokens: most of one call, 0 for whole turns. paced: its queue paces, shares and
    gathers prefills; no queue of another system does. planner: how trajectories are planned
    again."""

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


def _stepwise(
    placement: PlacementRule, ordering: Ordering = Ordering.ROUND_ROBIN, *, preempt: bool = False
) -> Policy:
    """Return the policy of a framework that schedules steps, not trajectories: no plan, no
    moves."""
    return Policy(ordering=ordering, placement=placement, migrate=False, preempt=preempt)


VERL = System(
    "verl",
    "verl: pinned to an engine, steps in the order they arrive",
    _stepwise(PlacementRule.PINNED),
)
STICKY = System(
    "sticky",
    "prime-rl, SkyRL: the least loaded engine at the first step",
    _stepwise(PlacementRule.STICKY),
)
VERL_STAR = System(
    "verl*",
    "verl*: cache-aware, least load beyond a skew of 32",
    _stepwise(PlacementRule.CACHE_AWARE),
)
SLIME = System(
    "slime", "slime: least loaded engine at each step", _stepwise(PlacementRule.LEAST_LOAD)
)
LEAST_ATTAINED = System(
    "affinity-las",
    "session affinity with least attained service",
    _stepwise(PlacementRule.PINNED, Ordering.LEAST_ATTAINED, preempt=True),
)
PAUSING = System(
    "pausing",
    "tool-boundary pausing: trajectories in order of arrival, room held for whoever has begun",
    Policy(
        ordering=Ordering.FCFS,
        placement=PlacementRule.PINNED,
        migrate=False,
        preempt=True,
        reserve=True,
    ),
)
HEDDLE = System(
    "heddle",
    "Heddle as printed: longest first, presorted partition by group size, ranks scaled, mixed "
    "parallelism",
    Policy(),
    predictor="",
    allocated=True,
    cost_model=CostModel.GROUP_SIZE,
    planner=RankScaling,
)
TREADLE = System(
    "treadle", "Treadle", TREADLE_POLICY, "", allocated=True, call_tokens=CALL_TOKENS, paced=True
)
TREADLE_HOMOGENEOUS = replace(
    TREADLE, name="treadle-homogeneous", title="Treadle on engines of one degree", allocated=False
)
TREADLE_ASYNCHRONOUS = replace(
    TREADLE_HOMOGENEOUS,
    name="treadle-asynchronous",
    title="Treadle for a trainer that does not wait: first come, first served, no moves",
    policy=ASYNCHRONOUS_POLICY,
    predictor="none",
)
TREADLE_WHOLE_TURNS = replace(
    TREADLE,
    name="treadle-whole-turns",
    title="Treadle, each turn in one call however long",
    call_tokens=0,
)
ORACLE = replace(TREADLE, name="oracle", title="Treadle told every length", predictor="oracle")

BASELINES = (VERL, STICKY, VERL_STAR, SLIME, LEAST_ATTAINED, PAUSING)
SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (*BASELINES, HEDDLE, TREADLE_HOMOGENEOUS, TREADLE, TREADLE_WHOLE_TURNS, ORACLE)
}


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting that all systems have in common. models: the engines to choose from, one a degree,
    all of one accelerator.

    earlier: trajectories of the same prompts in an earlier epoch, from which engines are allocated
    and histories learned; if empty, engines are allocated from predictions before the first step.
    predictor: of the systems that leave the choice open.
    """

    workload: Workload
    gpus: int
    models: tuple[EngineModel, ...]
    earlier: tuple[TrajectoryWork, ...] = ()
    predictor: str = "noisy"
    link: Link = field(default_factory=Link)
    latencies: Latencies = field(default_factory=Latencies)
    seed: int = 0

    def model(self, degree: int) -> EngineModel:
        """Return the engine on `degree` GPUs. Raises KeyError for a degree without one."""
        return {model.gpus: model for model in self.models}[degree]

    def degrees(self) -> list[int]:
        """Return the degrees that divide the budget and whose KV holds the longest trajectory."""
        longest = max(work.final_context_tokens for work in self.workload.trajectories)
        return [
            model.gpus
            for model in self.models
            if model.kv_tokens >= longest and self.gpus % model.gpus == 0
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """Rollout of a system, and the cluster that it ran on."""

    system: System
    cluster: Cluster
    outcome: Outcome


def simulate(system: System, setting: Setting, degree: int = 0, *, record: bool = False) -> Run:
    """Simulate the rollout of a system. degree: of all engines, 0 for those that the system
    allocates. Raises KeyError for a degree that has no engine, CoreError if no engine fits."""
    cluster = (
        choose_cluster(system, setting)
        if not degree
        else homogeneous(setting.model(degree), setting.gpus)
    )
    cluster = replace(cluster, link=setting.link, latencies=setting.latencies)
    name = system.predictor or setting.predictor
    predictor = (
        None
        if name == "none"
        else make_predictor(name, setting.workload, setting.seed, setting.earlier)
    )
    tuning = replace(
        system.tuning,
        expected_observed_tokens=_mean_observed_tokens(setting.earlier),
        storage_bytes_per_s=setting.link.bytes_per_s,
        move_fixed_s=setting.link.fixed_s,
    )
    calls, paced, work = system.call_tokens, system.paced, setting.workload
    driver = Driver(
        work,
        cluster,
        system.policy,
        tuning,
        predictor,
        call_tokens=calls,
        paced=paced,
        planner=system.planner,
        record=record,
    )
    return Run(system, cluster, driver.run())


def _mean_observed_tokens(earlier: Sequence[TrajectoryWork]) -> float:
    """Return the mean tokens of a tool's answer in an earlier epoch, which the scheduler that ran
    it has seen."""
    seen = [step.obs_tokens for work in earlier for step in work.steps[:-1]]
    return sum(seen) / len(seen) if seen else Tuning().expected_observed_tokens


def choose_cluster(system: System, setting: Setting) -> Cluster:
    """Return the engines of the resource plan, made from the predictions before the first step.

    A system that plans with medians (Heddle as printed) gets the lengths of the earlier epoch if
    there is one: they are spread as this epoch's are, and medians are not.
    """
    name = system.predictor or setting.predictor
    kinds = engine_kinds(setting.models)
    if system.cost_model is CostModel.CRITICAL_PATH:
        degrees = choose_degrees(*_predicted_work(setting, name), setting.gpus, kinds)
    else:
        degrees = allocate(
            *known_lengths(setting, name), setting.gpus, kinds, system.cost_model
        ).degrees
    return Cluster(tuple(setting.model(degree) for degree in degrees))


def _predicted_work(setting: Setting, predictor: str) -> tuple[paths.Work, paths.Work]:
    """Return the predictions before the first step: samples and medians. Figures without a
    prediction are those of the earlier epoch's works, each in the place of this one's."""
    works = setting.workload.trajectories
    known = setting.earlier if len(setting.earlier) == len(works) else works
    tokens = np.array([float(work.gen_tokens) for work in known])
    tool_s = np.array([sum(step.tool_s for step in work.steps) for work in known])
    observed = np.array([float(sum(step.obs_tokens for step in work.steps[:-1])) for work in known])
    log_sigma = np.zeros(len(works))
    if predictor != "none":
        asked = make_predictor(predictor, setting.workload, setting.seed, setting.earlier)
        for index in range(len(works)):
            left = asked.predict(index, 0, 0)
            tokens[index], log_sigma[index] = left.tokens.p50, log_deviation(left.tokens)
            if left.tool_s is not None and left.observed_tokens is not None:
                tool_s[index], observed[index] = left.tool_s.p50, left.observed_tokens.p50
    numbers: dict[str, int] = {}
    prompts = np.array([numbers.setdefault(work.prompt_id, len(numbers)) for work in works])
    contexts = np.array([float(work.prompt_tokens) for work in works])
    nowhere = np.zeros(len(works), np.bool_)
    of = (tokens, contexts, observed, tool_s, nowhere, nowhere, prompts)
    room = np.full(len(works), float(setting.workload.max_total_tokens or np.inf))
    factors = paths.sample_factors(np.arange(len(works)), log_sigma, tokens, room)
    return paths.work_of(*of, factors), paths.work_of(*of)


def engine_kinds(models: Sequence[EngineModel]) -> list[EngineKind]:
    """Return the engines as a planner knows them."""
    return [
        EngineKind(each.gpus, each.slots, each.kv_tokens, each.curve.linear(each.slots))
        for each in models
    ]


def known_lengths(setting: Setting, predictor: str) -> tuple[Floats, Floats]:
    """Return the lengths and mean contexts, in tokens: of this epoch for the oracle, of the earlier
    one for all others."""
    works = setting.workload.trajectories
    if predictor != "oracle":
        works = setting.earlier or works
    lengths = np.array([float(work.gen_tokens) for work in works])
    return lengths, np.array(
        [work.prompt_tokens + 0.5 * sum(step.obs_tokens for step in work.steps) for work in works]
    )
