"""The process tree of `treadle up` and `treadle demo`, with plain shells for children: whatever
ends it, nothing is left. And the ports that it chooses before a service binds them."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.conditions import until
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh import checks, processes
from treadle_cli.mesh.engines import KV_SHARE, EnginePlan, place_kv
from treadle_cli.mesh.guardian import session_members
from treadle_cli.mesh.processes import Child, Ports, ProcessError, ProcessTree, is_free

# A parent with a folder for its children and two children: one with a grandchild in the background;
# one that makes a temporary file, ignores SIGTERM and is stopped first.
PARENT = """
import asyncio, pathlib, sys
from treadle_cli.exits import run_interruptible
from treadle_cli.mesh.processes import ProcessTree

FAMILY = ["sh", "-c", "sleep 1000 & sleep 1000"]
STUBBORN = ["sh", "-c", "trap 'echo asked to stop' TERM; mktemp; echo ready; while :; do sleep 0.1; done"]

async def main(hurry):
    async with ProcessTree(pathlib.Path(sys.argv[1]), hurry=hurry, grace_s=float(sys.argv[2])) as tree:
        tree.make_folder(pathlib.Path(sys.argv[1]))
        family = tree.start("family", FAMILY)
        stubborn = tree.start("stubborn", STUBBORN, stage=1)
        print(family.pid, stubborn.pid, flush=True)
        await asyncio.Event().wait()
    return 0

sys.exit(run_interruptible(main))
"""
Start = Callable[[float], "subprocess.Popen[str]"]


@pytest.fixture
def start_parent(tmp_path: Path) -> Iterator[Start]:
    """Start a parent with a grace period of so many seconds."""
    started: list[subprocess.Popen[str]] = []

    def start(grace_s: float) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", PARENT, str(tmp_path), str(grace_s)]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
        return started[-1]

    yield start
    for parent in started:
        parent.kill()
        parent.communicate()


async def children_of(parent: "subprocess.Popen[str]", folder: Path) -> list[int]:
    """The sessions of both children, once there is a grandchild and SIGTERM is ignored."""
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    await until(
        lambda: (
            len(session_members(pids[0])) >= 2 and "ready" in (folder / "stubborn.log").read_text()
        )
    )
    return pids


def nothing_is_left(pids: list[int]) -> bool:
    return not any(session_members(pid) for pid in pids)


def temp_file(log_path: Path) -> Path:
    """The temporary file whose name the child has written to its log first."""
    return Path(log_path.read_text().splitlines()[0])


def made_folders(folder: Path) -> list[Path]:
    """Those that the parent has made for its children."""
    return list(folder.glob("treadle-*"))


@pytest.mark.parametrize(("grace_s", "signals"), [(2.0, 1), (1000.0, 2)])
async def test_ctrl_c_stops_children_and_grandchildren_and_a_second_one_does_not_wait_for_those_that_ignore_it(
    start_parent: Start, tmp_path: Path, grace_s: float, signals: int
) -> None:
    parent = start_parent(grace_s)
    pids = await children_of(parent, tmp_path)
    file = temp_file(tmp_path / "stubborn.log")
    assert file.exists()
    for _ in range(signals):
        parent.send_signal(signal.SIGINT)
        await until(lambda: "asked to stop" in (tmp_path / "stubborn.log").read_text())
    assert parent.wait(30) == 130
    assert nothing_is_left(pids) and not file.parents[1].exists()
    assert not made_folders(tmp_path)


async def test_sigkill_of_the_parent_leaves_nothing(start_parent: Start, tmp_path: Path) -> None:
    parent = start_parent(1000.0)
    pids = await children_of(parent, tmp_path)
    file = temp_file(tmp_path / "stubborn.log")
    (folder,) = made_folders(tmp_path)
    assert file.exists()
    parent.kill()
    parent.wait(30)
    await until(
        lambda: nothing_is_left(pids) and not file.parents[1].exists() and not folder.exists()
    )


async def test_the_temporary_files_of_a_killed_child_are_removed_at_once_and_those_of_another_one_stay(
    tmp_path: Path,
) -> None:
    make_file = ["sh", "-c", "mktemp; exec sleep 1000"]
    async with ProcessTree(tmp_path) as tree:
        killed, other = tree.start("killed", make_file), tree.start("other", make_file)
        await until(lambda: killed.tail() and other.tail())
        files = [temp_file(child.log_path) for child in (killed, other)]
        assert all(file.exists() for file in files)
        os.kill(killed.pid, signal.SIGKILL)
        await asyncio.wait_for(killed.exited.wait(), 20)
        assert [file.parent.exists() for file in files] == [False, True]
    assert not files[1].parents[1].exists()


async def test_a_child_that_dies_is_reported_by_name_with_its_last_lines(tmp_path: Path) -> None:
    dead: list[Child] = []
    async with ProcessTree(tmp_path) as tree:
        tree.on_death = dead.append
        child = tree.start("predictor", ["sh", "-c", "echo cannot bind >&2; exit 2"])
        with pytest.raises(
            ProcessError, match=r"predictor ended with exit code 2 .*\n    cannot bind"
        ):
            await child.until(never_ready, "ready file", 20.0)
    assert dead == [child]


async def test_a_child_that_is_never_ready_is_named_and_is_no_death_when_it_is_stopped(
    tmp_path: Path,
) -> None:
    dead: list[Child] = []
    async with ProcessTree(tmp_path) as tree:
        tree.on_death = dead.append
        child = tree.start("tools", ["sleep", "1000"])
        with pytest.raises(ProcessError, match="tools showed no ready file within 0 s"):
            await child.until(never_ready, "ready file", 0.0)
    assert child.returncode == -signal.SIGTERM
    assert nothing_is_left([child.pid]) and dead == []


async def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    async with ProcessTree(tmp_path) as tree:
        child = tree.start("bus", ["/nowhere/nats-server"])
        await asyncio.wait_for(child.exited.wait(), 20)
        assert "/nowhere/nats-server: No such file or directory" in child.tail()


async def test_a_child_is_pinned_to_the_cores_that_it_was_given(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    async with ProcessTree(tmp_path) as tree:
        child = tree.start(
            "engine-0", ["grep", "Cpus_allowed_list", "/proc/self/status"], cores=[core]
        )
        await asyncio.wait_for(child.exited.wait(), 20)
        assert child.tail().split() == ["Cpus_allowed_list:", str(core)]


async def never_ready() -> None:
    return None


async def test_kv_pages_are_in_memory_where_it_has_room_and_have_a_limit(tmp_path: Path) -> None:
    memory, run, asked = (tmp_path / name for name in ("memory", "run", "asked"))
    memory.mkdir()
    run.mkdir()
    plan = EnginePlan(1, 1, "m", Path("python"), (0,), seed=0, flags=(), kv_limit_gb=0.1)
    async with ProcessTree(tmp_path) as tree:
        chosen = place_kv(tree, plan, run, memory)
        assert (chosen.folder.parent, chosen.limit_gb) == (memory, 0.1)
        assert place_kv(tree, plan, run, tmp_path / "no-memory").folder.parent == run
        by_default = place_kv(tree, replace(plan, kv_limit_gb=None), run, tmp_path / "no-memory")
        assert by_default.limit_gb == pytest.approx(checks.free_gb(run) * KV_SHARE, rel=0.1)
        with pytest.raises(UsageProblem, match=r"--kv-folder .*asked: there is no such folder"):
            place_kv(tree, replace(plan, kv_folder=asked), run, memory)
        asked.mkdir()
        assert place_kv(tree, replace(plan, kv_folder=asked), run, memory).folder.parent == asked
        with pytest.raises(UsageProblem, match=r"--kv-limit-gb 1000000.0: .*asked has .* GB free"):
            place_kv(tree, replace(plan, kv_folder=asked, kv_limit_gb=1e6), run, memory)


def test_ports_differ_and_can_be_bound_and_the_kernel_gives_none_of_them_to_a_connection() -> None:
    chosen = Ports().choose(50)
    assert len(set(chosen)) == 50 and all(is_free(port) for port in chosen)
    first = int(processes.EPHEMERAL_RANGE.read_text().split()[0])
    assert all(processes.LOWEST <= port < first for port in chosen)


def test_a_port_that_is_in_use_or_was_chosen_before_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports_of_tree = Ports()
    with socket.create_server((processes.HOST, ports_of_tree.choose(1)[0])) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda among, count: [port])
        assert not is_free(port)
        with pytest.raises(OSError, match="only 0 of 1 ports from 10000 to"):
            Ports().choose(1)
    for ports in (ports_of_tree, Ports()):  # the other one sees what another process would
        with pytest.raises(OSError, match="only 0 of 1 ports"):
            ports.choose(1)
    monkeypatch.undo()
    Ports().choose(processes.MOST_RESERVATIONS)
    monkeypatch.setattr(random, "sample", lambda among, count: [port])
    assert Ports().choose(1) == [port]
