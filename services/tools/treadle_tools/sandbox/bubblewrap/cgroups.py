"""Control groups: memory, cores and processes of a whole cell, its children included.

Owns: one group `treadle-tools-<pid>` below the keeper's own, and a slot in it per door (`sandbox/door.py`); it
joins once, because that waits some 10 ms for the kernel. The keeper makes and removes them; the service writes the
limits of a slot before each action in it (`Slot.limit`). Version 1 and 2 have the same nouns with other file names.
Where the service may not write them, `hierarchy.find_cgroups` returns None and memory is watched from outside instead
(`sandbox/memory.py`).
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()

CONTROLLERS = ("memory", "cpu", "pids")
OPTIONAL = ("cpuset", "cpuacct")  # which cores, and the CPU seconds used; version 2 counts those under `cpu`
PERIOD_US = 100_000  # the kernel's own default: quotas count per this
PREFIX = "treadle-tools-"
SERVICE_GROUP = "treadle-service"
PAGE_BYTES = 4096
REMOVAL_TRIES, REMOVAL_WAIT_S = 50, 0.02  # a killed cell's processes leave their group a little later


@dataclass(frozen=True)
class Names:
    """How a version of cgroups calls its files."""

    memory_most: str
    swap_most: str
    oom_events: str
    processes_most: str


V1 = Names("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control", "pids.max")
V2 = Names("memory.max", "memory.swap.max", "memory.events", "pids.max")


@dataclass(frozen=True)
class Root:
    """Where slots are made. folders: per controller; in version 2 all the same. cores: all there are, as the kernel
    lists them."""

    version: int
    folders: Mapping[str, Path]
    cores: str = ""

    @property
    def names(self) -> Names:
        """Of this version's files."""
        return V1 if self.version == 1 else V2

    def message(self) -> dict[str, Any]:
        """As the keeper tells it to the service."""
        folders = {name: str(folder) for name, folder in self.folders.items()}
        return {"version": self.version, "folders": folders, "cores": self.cores}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Root":
        """From a message."""
        folders = {str(name): Path(folder) for name, folder in message["folders"].items()}
        return cls(int(message["version"]), folders, str(message["cores"]))


class Slot:
    """The group of a door and its cells. Blocking calls, each well under a millisecond but `join`."""

    def __init__(self, root: Root, name: str) -> None:
        self.name = name
        self._root = root
        self._folders = {controller: folder / name for controller, folder in root.folders.items()}
        self._written: dict[str, str] = {}
        for folder in set(self._folders.values()):
            folder.mkdir(parents=True, exist_ok=True)
        if root.version == 1 and "cpuset" in root.folders:
            inherit_cpuset(self._folders["cpuset"])

    def limit(self, *, memory_bytes: int | None, cpu_cores: int, processes: int, cores: tuple[int, ...] = ()) -> None:
        """Set what the slot's cell may use from now on. memory_bytes: None leaves it as it is. cores: which; empty:
        any."""
        names = self._root.names
        if memory_bytes is not None:
            self._limit_memory(memory_bytes)
        self._allot(cpu_cores)
        self._write("pids", names.processes_most, str(processes))
        self._pin(cores)

    def unpin(self) -> None:
        """Any core will do from now on: those of the last action are another's."""
        with contextlib.suppress(FileNotFoundError):  # removed after the cell's end
            self._pin(())

    def cpu_s(self) -> float | None:
        """CPU seconds that the group has used over its life; None where nobody counts, or once it is removed."""
        with contextlib.suppress(FileNotFoundError):
            if self._root.version == 2:
                lines = _read(self._folders["cpu"] / "cpu.stat").splitlines()
                return next((int(line.split()[1]) / 1e6 for line in lines if line.startswith("usage_usec")), None)
            if "cpuacct" in self._folders:
                return int(_read(self._folders["cpuacct"] / "cpuacct.usage")) / 1e9
        return None

    def _allot(self, cpu_cores: int) -> None:
        quota_us = cpu_cores * PERIOD_US
        if self._root.version == 1:
            self._write("cpu", "cpu.cfs_quota_us", str(quota_us))
        else:
            self._write("cpu", "cpu.max", f"{quota_us} {PERIOD_US}")

    def _pin(self, cores: tuple[int, ...]) -> None:
        if "cpuset" in self._folders:
            self._write("cpuset", "cpuset.cpus", ",".join(map(str, cores)) or self._root.cores)

    def _limit_memory(self, memory_bytes: int) -> None:
        if self._root.version == 2:
            self._write("memory", V2.memory_most, str(memory_bytes))
            self._write("memory", V2.swap_most, "0", optional=True)
            return
        if self._written.get(V1.memory_most) == str(memory_bytes):
            return
        # Memory with swap may never be the smaller of the two: lift it out of the way first.
        self._write("memory", V1.swap_most, "-1", optional=True)
        self._write("memory", V1.memory_most, str(memory_bytes))
        self._write("memory", V1.swap_most, str(memory_bytes), optional=True)

    def join(self, pid: int) -> None:
        """Put a process into the group; its later children follow it."""
        for folder in set(self._folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int:
        """How many processes the kernel has killed in this group for its memory, over its life."""
        text = _read(self._folders["memory"] / self._root.names.oom_events)
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)

    def remove(self) -> None:
        """Remove the group, once its processes are gone. Raises OSError where they stay."""
        for folder in set(self._folders.values()):
            _remove(folder)

    def _write(self, controller: str, file: str, value: str, *, optional: bool = False) -> None:
        if self._written.get(file) == value:
            return
        path = self._folders[controller] / file
        if optional and not path.exists():
            return
        _put(path, value)
        self._written[file] = value


class Cgroups:
    """The service's slots."""

    def __init__(self, root: Root) -> None:
        self.version = root.version
        self.root = root
        self._free: list[Slot] = []
        self._made: list[Slot] = []

    def take(self) -> Slot:
        """A slot with no process in it."""
        if self._free:
            return self._free.pop()
        slot = Slot(self.root, f"slot-{len(self._made)}")
        self._made.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """The slot's processes are dead."""
        self._free.append(slot)

    def close(self) -> None:
        """Remove every slot and the service's group."""
        for slot in self._made:
            with contextlib.suppress(OSError):
                slot.remove()
        for folder in set(self.root.folders.values()):
            try:
                _remove(folder)
            except OSError as error:
                log.warning("a control group is left behind", folder=str(folder), error=str(error))


def _put(path: Path, text: str) -> None:
    """Write a file of the kernel's, as every action does several times: pathlib takes twice as long."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _read(path: Path) -> str:
    """Read one; none that is asked for is longer than a page."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, PAGE_BYTES).decode()
    finally:
        os.close(descriptor)


def inherit_cpuset(folder: Path) -> None:
    """A new group of version 1 has no cores and no memory nodes, and takes no process before it has both."""
    for file in ("cpuset.mems", "cpuset.cpus"):
        if not (folder / file).exists() or not (folder / file).read_text().strip():
            (folder / file).write_text((folder.parent / file).read_text())


def _remove(folder: Path) -> None:
    for _ in range(REMOVAL_TRIES):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(REMOVAL_WAIT_S)
    folder.rmdir()
