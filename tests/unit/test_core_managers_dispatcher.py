"""Queue, decision and managers together: what starts holds, what ends gives back, trajectories stay
where they are."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from treadle_core.tools.action import (
    CPU_CORES,
    GPUS,
    MEMORY_BYTES,
    Action,
    Amdahl,
    Demand,
    Fixed,
    InvalidActionError,
    Range,
)
from treadle_core.tools.cpu import CpuManager, Machine
from treadle_core.tools.decision import ActionQueue, Start, decide, start_alone
from treadle_core.tools.dispatcher import FIRST_TYPICAL_S, Dispatcher, Resources
from treadle_core.tools.gpu import GpuManager
from treadle_core.tools.grants import NEVER_S, SERVED, End, Ended, InvalidHoldingError, Service
from treadle_core.tools.pools import CpuNodes, FlatPool, GpuNodes, Pool, capacities
from treadle_core.tools.providers import BasicManager, Provider, Quota, quota_of

SCALABLE = Action("a0", "t0", 0, {CPU_CORES: Range(1, 4)}, 8.0, CPU_CORES, Amdahl(0.0))
MACHINES = [Machine("a", ((0, 1), (2, 3)), 100), Machine("b", ((0, 1), (2, 3)), 100)]


def dispatcher() -> tuple[Dispatcher, BasicManager]:
    search = BasicManager(Provider("search", concurrency=2, quotas=(Quota(3, 10.0),)))
    gpus = GpuManager(["g"], 80, [Service("judge", 4, 20)])
    return Dispatcher(Resources([CpuManager(MACHINES), gpus, search]), 0.0), search


def action(index: int, trajectory: str = "", *, memory: int = 0, **cost: Demand) -> Action:
    demands: dict[str, Demand] = {**cost} | ({MEMORY_BYTES: Fixed(memory)} if memory else {})
    return Action(f"a{index}", trajectory or f"t{index}", index, demands)


class Life(RuleBasedStateMachine):
    """Any order of what comes, ends, gives up: everything starts once, nothing is lost, all is
    given back."""

    known = Bundle("known")

    @initialize()
    def begin(self) -> None:
        self.dispatcher, self.search = dispatcher()
        self.now_s = 0.0
        self.waiting: dict[str, Action] = {}
        self.running: dict[str, Action] = {}
        self.count = 0

    @rule(
        target=known,
        kind=st.sampled_from(["fixed", "elastic", "api", "gpu"]),
        trajectory=st.sampled_from(["t0", "t1", "t2", "t3"]),
        units=st.integers(1, 4),
        at_once=st.booleans(),
    )
    def comes(self, kind: str, trajectory: str, units: int, at_once: bool) -> str:
        self.count += 1
        memory = {MEMORY_BYTES: Fixed(10 * units)}
        costs: Mapping[str, Mapping[str, Demand]] = {
            "fixed": {CPU_CORES: Fixed(units), **memory},
            "elastic": {CPU_CORES: Range(1, units), **memory},
            "api": {CPU_CORES: Fixed(1), **memory, **self.search.cost()},
            "gpu": {GPUS: Fixed(4)},
        }
        elastic, service = kind == "elastic", "judge" if kind == "gpu" else None
        key, elasticity = (CPU_CORES, Amdahl(0.1)) if elastic else (None, None)
        coming = Action(
            f"x{self.count}",
            trajectory,
            self.count,
            costs[kind],
            4.0,
            key,
            elasticity,
            service=service,
        )
        self.dispatcher.check(coming)
        if at_once and self.dispatcher.start_at_once(coming, self.now_s) is not None:
            assert not self.waiting
            self.running[coming.action_id] = coming
            return coming.action_id
        self.dispatcher.submit(coming)
        with pytest.raises(InvalidActionError):
            self.dispatcher.submit(coming)
        self.waiting[coming.action_id] = coming
        return coming.action_id

    @rule(pause_s=st.floats(0.0, 5.0))
    def decides(self, pause_s: float) -> None:
        self.now_s += pause_s
        for started in self.dispatcher.decide(self.now_s):
            coming = self.waiting.pop(started.action.action_id)
            self.running[started.action.action_id] = coming
            if CPU_CORES in coming.cost:
                assert started.grant.cpu is not None
                assert len(started.grant.cpu.cores) == started.grant.units[CPU_CORES]
            else:
                assert started.grant.gpu is not None
        if self.waiting and not self.running:
            assert self.dispatcher.next_change_s(self.now_s) < NEVER_S or self.memory_is_full()

    def memory_is_full(self) -> bool:
        figures = {each.dimension: each for each in self.dispatcher.resources.usage(self.now_s)}
        return figures[MEMORY_BYTES].held > 0

    @rule(
        action_id=consumes(known),
        end=st.sampled_from([End.SERVED, End.REFUSED, End.FAILED, End.ABANDONED]),
    )
    def leaves(self, action_id: str, end: End) -> None:
        if action_id in self.waiting:
            del self.waiting[action_id]
            self.dispatcher.withdraw(action_id)
            return
        coming = self.running.pop(action_id)
        self.dispatcher.end(action_id, self.now_s, Ended(end))
        with pytest.raises(InvalidHoldingError):
            self.dispatcher.end(action_id, self.now_s)
        if all(
            other.trajectory_id != coming.trajectory_id
            for other in [*self.running.values(), *self.waiting.values()]
        ):
            self.dispatcher.forget(coming.trajectory_id)

    @invariant()
    def what_is_held_is_what_runs(self) -> None:
        assert len(self.dispatcher) == len(self.waiting)
        assert self.dispatcher.running == len(self.running)
        asked = self.dispatcher.waiting_for()
        assert asked[GPUS] == sum(GPUS in each.cost for each in self.waiting.values())
        assert asked[CPU_CORES] == sum(CPU_CORES in each.cost for each in self.waiting.values())
        for figures in self.dispatcher.resources.usage(self.now_s):
            assert 0 <= figures.held <= figures.capacity
            assert 0 <= figures.free <= figures.capacity - figures.held
            if not self.running and figures.dimension not in (MEMORY_BYTES, quota_of("search")):
                assert figures.held == 0


TestLife = Life.TestCase


def names(dispatcher: Dispatcher, now_s: float = 0.0) -> list[str]:
    return [started.action.action_id for started in dispatcher.decide(now_s)]


def test_a_trajectory_stays_on_its_node_and_its_memory_is_held_until_it_is_forgotten() -> None:
    """WHEN    several actions of a trajectory come at once, and another trajectory's Result: they
    start on the same node, the memory is held once, and stays until the end of the trajectory"""
    queue, _ = dispatcher()
    for index in range(3):
        queue.submit(action(index, "t", memory=60, cpu_cores=Fixed(1)))
    queue.submit(action(3, "other", memory=60, cpu_cores=Fixed(1)))
    assert len(queue) == 4
    assert queue.waiting_for() == {
        **dict.fromkeys(queue.waiting_for(), 0),
        CPU_CORES: 4,
        MEMORY_BYTES: 4,
    }
    nodes = {
        s.action.action_id: s.grant.cpu.node_id
        for s in queue.decide(0.0)
        if s.grant.cpu is not None
    }
    assert nodes["a0"] == nodes["a1"] == nodes["a2"] != nodes["a3"]
    for index in range(4):
        queue.end(f"a{index}", 1.0)
    for index in (4, 5, 6):
        queue.submit(action(index, "third", memory=60, cpu_cores=Fixed(1)))
    assert names(queue) == []
    for gone in (
        "a5",
        "a4",
    ):  # the first of a trajectory gives up, and the next one says where it lives
        queue.withdraw(gone)
    queue.forget("other")
    assert names(queue) == ["a6"]


def test_a_refused_call_waits_for_its_provider_alone() -> None:
    """
    WHEN    a provider asks to wait 5 s
    Result: others start, its calls do not, and the next decision is due then"""
    queue, search = dispatcher()
    queue.submit(Action("call", "t", 0, search.cost()))
    assert names(queue) == ["call"]
    queue.end("call", 1.0, Ended(End.REFUSED, 5.0))
    queue.submit(Action("call", "t", 0, search.cost()))
    queue.submit(action(1, cpu_cores=Fixed(1)))
    assert names(queue, 1.0) == ["a1"]
    assert queue.next_change_s(1.0) == 6.0
    assert names(queue, 6.0) == ["call"]
    assert queue.next_change_s(6.0) == NEVER_S


def test_elastic_actions_get_what_is_free_and_typical_durations_are_learned() -> None:
    queue, _ = dispatcher()
    queue.submit(SCALABLE)
    (started,) = queue.decide(0.0)
    assert (started.units, started.expected_s) == (4, 2.0)
    assert started.grant.cpu is not None
    assert len(started.grant.cpu.cores) == 4
    assert queue.typical_s == FIRST_TYPICAL_S
    queue.end("a0", 21.0)
    assert queue.typical_s == pytest.approx(FIRST_TYPICAL_S + 0.05 * (21.0 - FIRST_TYPICAL_S))


def test_one_that_can_be_scaled_does_not_go_before_those_that_come_with_it() -> None:
    queue, _ = dispatcher()
    assert queue.start_at_once(SCALABLE, 0.0) is None
    assert queue.start_at_once(action(1, cpu_cores=Fixed(1)), 0.0) is not None
    queue.submit(action(2, cpu_cores=Fixed(1)))
    assert queue.start_at_once(action(3, cpu_cores=Fixed(1)), 0.0) is None


def test_an_action_holds_of_all_managers_or_of_none() -> None:
    queue, search = dispatcher()
    before = queue.resources.usage(0.0)
    asks = Action(
        "x", "t", 0, {CPU_CORES: Fixed(2), MEMORY_BYTES: Fixed(10), GPUS: Fixed(2), **search.cost()}
    )
    queue.resources.take(Start(action(0, gpus=Fixed(8)), 8, None, None), 0.0, 1.0)
    with pytest.raises(InvalidHoldingError):
        queue.resources.take(Start(asks, 2, "a", None), 0.0, 1.0)
    queue.resources.give_back("a0", SERVED, 0.0)
    assert queue.resources.usage(0.0) == before
    assert queue.resources.take(Start(asks, 2, "b", None), 0.0, 1.0).cpu is not None


@given(
    free=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=3),
    free_gpus=st.sets(st.integers(0, 7)),
    calls=st.integers(0, 2),
    asked=st.dictionaries(
        st.sampled_from([CPU_CORES, MEMORY_BYTES, GPUS, "calls"]), st.integers(1, 2), min_size=1
    ),
    home=st.one_of(st.none(), st.integers(0, 2)),
)
def test_one_alone_starts_where_a_decision_would_have_it_start(
    free: list[tuple[int, int]],
    free_gpus: set[int],
    calls: int,
    asked: dict[str, int],
    home: int | None,
) -> None:
    nodes = CpuNodes([f"n{at}" for at in range(len(free))], [(4, 9)] * len(free), free)
    pools: list[Pool] = [nodes, GpuNodes({"g": free_gpus}), FlatPool("calls", 2, calls)]
    node_id = None if home is None or home >= len(free) else f"n{home}"
    alone = Action(
        "x", "t", 0, {name: Fixed(units) for name, units in asked.items()}, node_id=node_id
    )
    waiting = ActionQueue(capacities(pools))
    waiting.add(alone)
    start = start_alone(alone, pools)
    assert list(decide(waiting, pools, [], 1.0)) == ([] if start is None else [start])
