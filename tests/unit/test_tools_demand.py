"""What tools declare, in the scheduler's terms; what is learned of how long they take; the node."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from treadle_core.tools.action import (
    CPU_CORES,
    MEMORY_BYTES,
    Action,
    Amdahl,
    Fixed,
    Measured,
    Range,
)
from treadle_core.tools.action import UnitSet as Units
from treadle_tools.builtin import FROZEN_LAKE, PYTHON
from treadle_tools.registry import RegistrationError, Registry
from treadle_tools.resources import NODE_ID, Demands, find_node, parse_cpu_list, total_memory_bytes
from treadle_tools.tool import MIB, Limits, Result, Scaling, Status, Tool

GIB = 1024 * MIB


def tool(scaling: Scaling | None = None, cores: int = 8, **fields: object) -> Tool:
    return replace(PYTHON, limits=Limits(cpu_cores=cores), scaling=scaling, **fields)  # type: ignore[arg-type]


def ended(execution_s: float, cores: int = 1, overhead_s: float = 0.0) -> Result:
    return Result(Status.OK, execution_s=execution_s, overhead_s=overhead_s, cores=cores)


def test_a_tool_without_scaling_asks_for_its_cores_and_a_session_for_memory_but_for_no_more_than_there_is() -> (
    None
):
    demands = Demands(4, GIB, {})
    limits = Limits(cpu_cores=8, memory_bytes=4 * GIB)
    once = demands.action("x", "x", tool(cores=8), limits)
    assert (dict(once.cost), once.node_id, once.scalable) == ({CPU_CORES: Fixed(4)}, NODE_ID, False)
    lake = replace(FROZEN_LAKE, reserve_bytes=2 * GIB)
    stays = demands.action("x", "session", lake, limits)
    assert dict(stays.cost) == {CPU_CORES: Fixed(4), MEMORY_BYTES: Fixed(GIB)}
    assert (stays.trajectory_id, stays.node_id) == ("session", None)
    assert demands.action("x", "x", lake, Limits(memory_bytes=MIB)).cost[MEMORY_BYTES] == Fixed(MIB)


@pytest.mark.parametrize(
    ("cores", "most", "demand"),
    [
        ((1, 2, 3, 4), 8, Range(1, 4)),
        ((1, 2, 3, 4), 2, Range(1, 2)),
        ((1, 2, 4, 8), 4, Units((1, 2, 4))),
        ((4, 8), 2, Range(2, 2)),
    ],
)
def test_a_tool_that_scales_asks_for_what_it_can_use(
    cores: tuple[int, ...], most: int, demand: object
) -> None:
    scaling = Scaling(cores, serial_share=0.1, single_core_s=20.0)
    action = Demands(16, GIB, {}).action("x", "x", tool(scaling), Limits(cpu_cores=most))
    assert action.cost[CPU_CORES] == demand
    assert action.scalable
    assert (action.elasticity, action.single_unit_s) == (Amdahl(0.1), 20.0)


def test_durations_are_learned_for_one_core_and_told_for_as_many_as_lately() -> None:
    """WHEN    an action of 8 s took 1 s on the 8 of its cores that scale by half Result: one core
    takes 4 s of that, and 0.1 s goes beside; the next should take as long as this one did"""
    demands = Demands(16, GIB, {})
    scaled = tool(Scaling((1, 8), efficiency=((1, 1.0), (8, 0.5))))

    def next_of(tool: Tool) -> Action:
        return demands.action("x", "x", tool, Limits(cpu_cores=8))

    assert (next_of(scaled).single_unit_s, demands.expected_s(scaled)) == (None, 0.0)
    demands.learn(scaled, ended(1.0, cores=8, overhead_s=0.1))
    assert next_of(scaled).single_unit_s == 4.1
    assert demands.expected_s(scaled) == pytest.approx(1.1)
    demands.learn(scaled, ended(9.0, cores=1, overhead_s=0.1))
    assert next_of(scaled).single_unit_s == pytest.approx(0.1 + 4.0 + 0.2 * 5.0)
    assert next_of(scaled).elasticity == Measured(((1, 1.0), (8, 0.5)))
    assert next_of(tool(Scaling((1, 2), single_core_s=7.0))).single_unit_s == 7.0


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (Scaling(()), "cost[cpu_cores].units: must be 1 to 1024 numbers, are 0"),
        (Scaling((2, 1)), "must ascend"),
        (Scaling((0, 1)), "whole number from 1"),
        (Scaling((1, 16)), "at most limits.cpu_cores, 8"),
        (Scaling((1, 2), serial_share=-0.5), "elasticity: E(2)"),
        (Scaling((1, 2), efficiency=((2, 0.5), (1, 1.0))), "elasticity.points"),
        (Scaling((1, 2), single_core_s=float("nan")), "single_unit_s"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused_at_start(scaling: Scaling, words: str) -> None:
    with pytest.raises(RegistrationError) as refused:
        Registry([tool(scaling)])
    assert "'python'" in str(refused.value)
    assert words in str(refused.value)


def test_a_tool_of_an_unknown_provider_is_refused_at_start() -> None:
    with pytest.raises(RegistrationError, match="no provider 'search'"):
        Registry([tool(provider="search")], ["other"])
    assert [each.name for each in Registry([tool(provider="search")], ["search"])] == ["python"]


def test_a_node_is_the_cores_this_process_may_use_by_numa_node(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    (tmp_path / "node0").mkdir()
    (tmp_path / "node1").mkdir()
    (tmp_path / "node0" / "cpulist").write_text(f"{usable[0]},4090-4095\n")
    (tmp_path / "node1" / "cpulist").write_text(",".join(map(str, usable[1:])) + "\n")
    node = find_node(0, 7, tmp_path)
    assert node.real
    assert node.machine.numa == tuple(filter(None, ((usable[0],), tuple(usable[1:]))))
    assert (node.cores, node.machine.memory_bytes) == (len(usable), 7)
    assert find_node(1, 0, tmp_path).machine.numa == ((usable[0],),)
    more = find_node(len(usable) + 3, 0, tmp_path)
    assert (more.real, more.cores) == (False, len(usable) + 3)
    assert 0 < more.machine.memory_bytes <= total_memory_bytes(())


def test_kernel_lists_and_memory_limits_are_read(tmp_path: Path) -> None:
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpu_list("\n") == set()
    limit, unlimited = tmp_path / "memory.limit_in_bytes", tmp_path / "memory.max"
    limit.write_text("1048576\n")
    unlimited.write_text("max\n")
    assert total_memory_bytes((unlimited, limit, tmp_path / "none")) == MIB
    assert total_memory_bytes((unlimited,)) == total_memory_bytes(())
