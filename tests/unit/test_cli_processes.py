"""The process tree of `treadle up` and `treadle demo`, with plain shells for children: whatever ends it, nothing is
left.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from treadle_cli.mesh.guardian import session_members
from treadle_cli.mesh.processes import Child, ProcessError, ProcessTree

# A parent with two children: one with a grandchild in the background, one that ignores SIGTERM.
PARENT = """
import asyncio, os, pathlib, sys
from treadle_cli.exits import run_interruptible
from treadle_cli.mesh.processes import ProcessTree

FAMILY = ["sh", "-c", "sleep 1000 & sleep 1000"]
STUBBORN = ["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]

async def main(hurry):
    async with ProcessTree(pathlib.Path(sys.argv[1]), hurry=hurry) as tree:
        family = tree.start("family", FAMILY)
        stubborn = tree.start("stubborn", STUBBORN, stage=1)
        print(family.pid, stubborn.pid, flush=True)
        await asyncio.Event().wait()
    return 0

sys.exit(run_interruptible(main))
"""


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "the condition never came true"
        time.sleep(0.02)


@pytest.fixture
def parent(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield process
    process.kill()
    process.wait(30)


def children_of(parent: "subprocess.Popen[str]") -> list[int]:
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
    wait_until(lambda: len(session_members(pids[0])) >= 2)  # the background sleep is there
    return pids


def nothing_is_left(pids: list[int]) -> bool:
    return not any(session_members(pid) for pid in pids)


def test_ctrl_c_stops_children_and_grandchildren_and_those_that_ignore_sigterm(parent: "subprocess.Popen[str]") -> None:
    pids = children_of(parent)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(30) == 130
    assert nothing_is_left(pids)


def test_a_second_ctrl_c_hurries_and_leaves_nothing_either(parent: "subprocess.Popen[str]") -> None:
    pids = children_of(parent)
    parent.send_signal(signal.SIGINT)
    # The shell without a trap ends on the first signal's SIGTERM only after the stubborn stage was given up.
    parent.send_signal(signal.SIGINT)
    assert parent.wait(30) == 130
    assert nothing_is_left(pids)


def test_sigkill_of_the_parent_leaves_nothing(parent: "subprocess.Popen[str]") -> None:
    pids = children_of(parent)
    parent.kill()
    parent.wait(30)
    wait_until(lambda: nothing_is_left(pids))


async def test_a_child_that_dies_is_reported_by_name_with_its_last_lines(tmp_path: Path) -> None:
    dead: list[Child] = []
    async with ProcessTree(tmp_path, on_death=dead.append) as tree:
        child = tree.start("predictor", ["sh", "-c", "echo cannot bind >&2; exit 2"])
        with pytest.raises(ProcessError, match=r"predictor ended with exit code 2 .*\n    cannot bind"):
            await child.until(never_ready, "ready file", 20.0)
    assert dead == [child]


async def test_a_child_that_is_never_ready_is_named_too(tmp_path: Path) -> None:
    async with ProcessTree(tmp_path) as tree:
        child = tree.start("tools", ["sleep", "1000"])
        with pytest.raises(ProcessError, match="tools showed no ready file within 0 s"):
            await child.until(never_ready, "ready file", 0.2)
    assert nothing_is_left([child.pid])


async def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    async with ProcessTree(tmp_path) as tree:
        child = tree.start("bus", ["/nowhere/nats-server"])
        await asyncio.wait_for(child.exited.wait(), 20)
        assert "/nowhere/nats-server: No such file or directory" in child.tail()


async def test_a_child_is_pinned_to_the_cores_that_it_was_given(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    async with ProcessTree(tmp_path) as tree:
        child = tree.start("engine-0", ["sh", "-c", "grep Cpus_allowed_list /proc/self/status"], cores=[core])
        await asyncio.wait_for(child.exited.wait(), 20)
        assert child.tail().split() == ["Cpus_allowed_list:", str(core)]


async def test_a_child_that_was_asked_to_stop_is_no_death(tmp_path: Path) -> None:
    dead: list[Child] = []
    async with ProcessTree(tmp_path, on_death=dead.append) as tree:
        child = tree.start("rollout", ["sleep", "1000"])
        await tree.stop([child])
        assert child.returncode == -signal.SIGTERM
    assert dead == []


async def never_ready() -> None:
    return None
