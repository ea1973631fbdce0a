"""Cores and memory of nodes: exclusive, near each other, memory for as long as the trajectory
lives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from treadle_core.tools.action import CPU_CORES, MEMORY_BYTES, Action, Fixed
from treadle_core.tools.cpu import CpuManager, Machine, pick_cores
from treadle_core.tools.decision import Start
from treadle_core.tools.grants import SERVED, CpuGrant, InvalidHoldingError, units_of
from treadle_core.tools.pools import CpuNodes, InvalidPoolError

MACHINES = (Machine("a", ((0, 1, 2, 3), (4, 5, 6, 7)), 100), Machine("b", ((0, 1), (2, 3)), 50))


def start(
    action_id: str, trajectory_id: str, cores: int, memory: int, node_id: str | None
) -> Start:
    cost = {CPU_CORES: Fixed(cores)} | ({MEMORY_BYTES: Fixed(memory)} if memory else {})
    return Start(Action(action_id, trajectory_id, 0, cost), cores, node_id, None)


def take(manager: CpuManager, begun: Start) -> CpuGrant:
    return manager.take(begun, units_of(begun), 0.0, 1.0)


class CpuLife(RuleBasedStateMachine):
    """Any order of takes, ends and forgets: what the manager says is what a plain list of grants
    says."""

    running = Bundle("running")

    @initialize()
    def begin(self) -> None:
        self.manager = CpuManager(MACHINES)
        self.grants: dict[str, CpuGrant] = {}
        self.memory: dict[str, tuple[str, int]] = {}
        self.count = 0

    @rule(
        target=running,
        trajectory=st.sampled_from(["t0", "t1", "t2"]),
        cores=st.integers(1, 8),
        memory=st.integers(1, 60),
        node=st.sampled_from(["a", "b"]),
    )
    def takes(self, trajectory: str, cores: int, memory: int, node: str) -> str:
        self.count += 1
        action_id = f"x{self.count}"
        home = self.manager.home(trajectory)
        begun = start(action_id, trajectory, cores, 0 if home else memory, home or node)
        assert begun.node_id is not None
        free_cores = self.cores(begun.node_id) - len(self.held(begun.node_id))
        free_bytes = self.bytes(begun.node_id)
        try:
            grant = take(self.manager, begun)
        except InvalidHoldingError:
            assert cores > free_cores or (home is None and memory > free_bytes)
            return ""
        assert cores <= free_cores
        assert len(grant.cores) == cores
        self.grants[action_id] = grant
        if home is None:
            self.memory[trajectory] = (node, memory)
        assert self.manager.home(trajectory) == grant.node_id
        return action_id

    @rule(action_id=consumes(running))
    def ends(self, action_id: str) -> None:
        if action_id:
            del self.grants[action_id]
            self.manager.give_back(action_id, SERVED, 1.0)
        with pytest.raises(KeyError):
            self.manager.give_back(action_id, SERVED, 1.0)

    @rule(trajectory=st.sampled_from(["t0", "t1", "t2"]))
    def forgets(self, trajectory: str) -> None:
        self.memory.pop(trajectory, None)
        self.manager.forget(trajectory)
        assert self.manager.home(trajectory) is None

    @invariant()
    def nothing_is_held_twice_or_lost(self) -> None:
        (pool,) = self.manager.pools(0.0)
        for node_id, (all_cores, _), (free, free_bytes) in zip(
            pool.nodes, pool.capacity, pool.free, strict=True
        ):
            held = self.held(node_id)
            assert len(set(held)) == len(held) <= all_cores
            assert set(held) <= {
                core for machine in MACHINES for numa in machine.numa for core in numa
            }
            assert free == all_cores - len(held)
            assert free_bytes == self.bytes(node_id) >= 0
        cores, memory = self.manager.usage(0.0)
        executing = sum(item.units for item in self.manager.executing(0.0))
        assert cores.held == executing == sum(len(grant.cores) for grant in self.grants.values())
        assert memory.held == sum(amount for _, amount in self.memory.values())

    def held(self, node_id: str | None) -> list[int]:
        return [
            core
            for grant in self.grants.values()
            if grant.node_id == node_id
            for core in grant.cores
        ]

    @staticmethod
    def cores(node_id: str) -> int:
        return next(
            sum(map(len, machine.numa)) for machine in MACHINES if machine.node_id == node_id
        )

    def bytes(self, node_id: str | None) -> int:
        total = next(machine.memory_bytes for machine in MACHINES if machine.node_id == node_id)
        return total - sum(amount for node, amount in self.memory.values() if node == node_id)


TestCpuLife = CpuLife.TestCase


def frees(*counts: int) -> list[frozenset[int]]:
    return [frozenset(range(100 * at, 100 * at + count)) for at, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("free", "count", "taken"),
    [
        ((4, 4), 3, (3, 0)),
        ((8, 3, 5), 3, (0, 3, 0)),  # the fullest that has enough
        ((8, 3, 5), 4, (0, 0, 4)),
        ((4, 6, 2), 7, (0, 6, 1)),  # the emptiest, and the rest where least is left over
        ((4, 6, 2), 9, (3, 6, 0)),
        ((2, 2), 4, (2, 2)),
        ((2, 2), 0, (0, 0)),
    ],
)
def test_cores_are_of_one_numa_node_first(
    free: tuple[int, ...], count: int, taken: tuple[int, ...]
) -> None:
    assert tuple(map(len, pick_cores(tuple(frees(*free)), count))) == taken


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.data())
def test_as_few_numa_nodes_as_can_be(counts: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, sum(counts)))
    picked = pick_cores(tuple(frees(*counts)), count)
    assert all(taken <= free for taken, free in zip(picked, frees(*counts), strict=True))
    assert sum(map(len, picked)) == count
    by_size = sorted(counts, reverse=True)
    fewest = next(n for n in range(len(counts) + 1) if sum(by_size[:n]) >= count)
    assert sum(bool(taken) for taken in picked) == fewest


def test_a_grant_says_which_cores() -> None:
    manager = CpuManager([Machine("a", ((8, 10), (1, 3)), 100)])
    assert take(manager, start("x", "t", 3, 40, "a")) == CpuGrant("a", (1, 8, 10), 40)
    later = manager.send_home(Action("y", "t", 1, {CPU_CORES: Fixed(1), MEMORY_BYTES: Fixed(40)}))
    assert (later.node_id, dict(later.cost)) == ("a", {CPU_CORES: Fixed(1)})
    assert take(manager, start("y", "t", 1, 0, "a")).memory_bytes == 40
    with pytest.raises(InvalidHoldingError, match="more than is free"):
        take(manager, start("z", "t", 1, 0, "a"))


@pytest.mark.parametrize(
    ("machines", "field"),
    [
        ([MACHINES[0], MACHINES[0]], "machines[1].node_id"),
        ([Machine("a", ((0, 1), (1,)), 1)], "machines[0].numa"),
        ([Machine("a", ((0,),), -1)], "machines[0].memory_bytes"),
    ],
)
def test_a_machine_that_contradicts_itself_is_refused(machines: list[Machine], field: str) -> None:
    with pytest.raises(InvalidPoolError) as refused:
        CpuManager(machines)
    assert refused.value.field == field


def test_demands_that_were_gathered_by_column_are_assigned_like_those_by_row() -> None:
    nodes = CpuNodes(["a"], [(4, 100)], [(4, 100)])
    needs = np.array([(2, 10), (1, 20)], np.int64)
    homes = np.array([-1, -1], np.int64)
    by_row = nodes.assign(needs, homes)
    assert nodes.assign(np.asfortranarray(needs), homes).tolist() == by_row.tolist()
