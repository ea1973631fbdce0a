"""Control groups of both versions, on a folder that looks like the kernel's (version 1 is tried for
real elsewhere)."""

import os
from pathlib import Path

import pytest
from treadle_tools.sandbox.cgroups import (
    OOM_EVENTS,
    SWAP_MOST,
    Cgroups,
    MemoryCounts,
    Root,
    Slot,
    find_cgroups,
)
from treadle_tools.sandbox.processes import read_private_bytes


def slot_of(version: int, folder: Path) -> tuple[Slot, dict[str, Path]]:
    folders = {
        name: folder if version == 2 else folder / name for name in ("memory", "cpu", "pids")
    }
    slot = Slot(Root(version, {name: str(path) for name, path in folders.items()}), "slot-0")
    return slot, {name: path / "slot-0" for name, path in folders.items()}


WRITTEN = {
    1: {
        "memory/memory.limit_in_bytes": "1048576",
        "memory/memory.memsw.limit_in_bytes": "1048576",
        "cpu/cpu.cfs_quota_us": "200000",
        "pids/pids.max": "7",
        **{f"{name}/cgroup.procs": "4711" for name in ("memory", "cpu", "pids")},
    },
    2: {
        "memory/memory.max": "1048576",
        "memory/memory.swap.max": "0",
        "cpu/cpu.max": "200000 100000",
        "pids/pids.max": "7",
        "memory/cgroup.procs": "4711",
    },
}


@pytest.mark.parametrize("version", [1, 2])
def test_limits_are_written_where_each_version_has_them(tmp_path: Path, version: int) -> None:
    slot, folders = slot_of(version, tmp_path)
    (folders["memory"] / SWAP_MOST[version]).write_text("")
    slot.limit(memory_bytes=1 << 20, cpu_cores=1, processes=7)
    # a step leaves the memory limit as it is
    slot.limit(memory_bytes=None, cpu_cores=2, processes=7)
    slot.join(4711)
    assert {
        place: (folders[place.split("/")[0]] / place.split("/")[1]).read_text()
        for place in WRITTEN[version]
    } == (WRITTEN[version])
    assert len({path for folder in folders.values() for path in folder.iterdir()}) == len(
        WRITTEN[version]
    )


@pytest.mark.parametrize("version", [1, 2])
def test_an_action_is_pinned_to_its_cores_and_let_go(tmp_path: Path, version: int) -> None:
    """Its group has the cores of the action, then all again; on version 1 it had memory nodes
    before any process."""
    folders = dict.fromkeys(("memory", "cpu", "pids", "cpuset"), str(tmp_path))
    for file, text in (("cpuset.cpus", "0-3\n"), ("cpuset.mems", "0\n")):
        (tmp_path / file).write_text(text)
    slot = Slot(Root(version, folders, cores="0-3"), "slot-0")
    cpus = tmp_path / "slot-0" / "cpuset.cpus"
    if version == 1:
        assert (cpus.with_name("cpuset.mems").read_text(), cpus.read_text()) == ("0\n", "0-3\n")
    slot.limit(memory_bytes=None, cpu_cores=2, processes=7, cores=(1, 3))
    assert cpus.read_text() == "1,3"
    slot.unpin()
    assert cpus.read_text() == "0-3"
    slot.limit(memory_bytes=None, cpu_cores=2, processes=7)
    assert cpus.read_text() == "0-3"


def test_cpu_seconds_are_read_where_they_are_counted(tmp_path: Path) -> None:
    slot, folders = slot_of(2, tmp_path)
    (folders["cpu"] / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert slot.cpu_s() == 2.5
    (tmp_path / "v1").mkdir()
    slot, _ = slot_of(1, tmp_path / "v1")
    assert slot.cpu_s() is None
    counted = Slot(Root(1, {"cpuacct": str(tmp_path)}), "slot-1")
    (tmp_path / "slot-1" / "cpuacct.usage").write_text("1500000000\n")
    assert counted.cpu_s() == 1.5


@pytest.mark.parametrize("version", [1, 2])
def test_kills_for_memory_are_counted_and_how_often_the_slot_was_full(
    tmp_path: Path, version: int
) -> None:
    slot, folders = slot_of(version, tmp_path)
    if version == 1:
        for file in ("memory.failcnt", "memory.memsw.failcnt"):
            (folders["memory"] / file).write_text("1\n")
    (folders["memory"] / OOM_EVENTS[version]).write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n" + ("oom 2\n" if version == 2 else "")
    )
    assert slot.memory_counts() == MemoryCounts(kills=3, full=2)


def test_slots_are_used_again(tmp_path: Path) -> None:
    cgroups = Cgroups(Root(2, dict.fromkeys(("memory", "cpu", "pids"), str(tmp_path))))
    first, second = cgroups.take(), cgroups.take()
    cgroups.give_back(first)
    assert cgroups.take() is first
    assert second is not first


def fake_kernel(tmp_path: Path, controllers: str) -> tuple[Path, Path]:
    """A version 2 hierarchy, as a container sees it: its own group is the mount's root."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    own = root / "service"
    own.mkdir(parents=True)
    proc.mkdir()
    (proc / "cgroup").write_text("0::/pod/service\n")
    (proc / "mountinfo").write_text(f"30 24 0:26 /pod {root} rw,nosuid - cgroup2 cgroup2 rw\n")
    (own / "cgroup.controllers").write_text(controllers)
    return own, proc


def test_version_2_is_found_where_its_controllers_are_ours(tmp_path: Path) -> None:
    """The service gives them to its children and makes its slots there; what dead services have
    left is removed."""
    own, proc = fake_kernel(tmp_path, "cpuset cpu io memory pids\n")
    (own / "treadle-tools-4194304" / "slot-0").mkdir(parents=True)
    assert find_cgroups(proc) is None  # at the very end: no kernel fills in memory.events here
    ours = own / f"treadle-tools-{os.getpid()}"
    for group in (own, ours):
        assert (group / "cgroup.subtree_control").read_text() == "+memory +cpu +pids +cpuset"
    assert (ours / "slot-0" / "memory.max").exists()
    assert not (own / "treadle-tools-4194304").exists()


def test_without_controllers_there_are_no_slots(tmp_path: Path) -> None:
    own, proc = fake_kernel(tmp_path, "hugetlb\n")
    assert find_cgroups(proc) is None
    assert [path.name for path in own.iterdir()] == ["cgroup.controllers"]


def fake_process(proc: Path, pid: int, own_kb: int, shared_kb: int, children: str) -> None:
    thread = proc / str(pid) / "task" / str(pid)
    thread.mkdir(parents=True)
    lines = [
        "VmRSS:\t 99999 kB",
        f"RssAnon:\t {own_kb} kB",
        "RssFile:\t 999 kB",
        f"RssShmem:\t {shared_kb} kB",
        "",
    ]
    (proc / str(pid) / "status").write_text("\n".join(lines))
    (thread / "children").write_text(children)


def test_memory_is_summed_over_descendants(tmp_path: Path) -> None:
    """Their own, and shared memory; not what files on a disk back."""
    fake_process(tmp_path, 1, 60, 0, "2 3 ")
    fake_process(tmp_path, 2, 100, 60, "4 ")
    fake_process(tmp_path, 3, 0, 0, "5 ")  # 5 has just ended
    fake_process(tmp_path, 4, 70, 0, "")
    assert read_private_bytes(1, proc=tmp_path) == (60 + 160 + 0 + 70) * 1024
    assert read_private_bytes(1, 60 * 1024, proc=tmp_path) == (0 + 100 + 0 + 10) * 1024
    assert read_private_bytes(99, proc=tmp_path) == 0
