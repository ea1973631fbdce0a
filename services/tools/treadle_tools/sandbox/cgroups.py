"""Limit and count the memory, cores and processes of a whole sandbox, child processes included, by
control groups.

This module owns one group `treadle-tools-<pid>` below the daemon's own, with a slot for each
spawner. A spawner joins its slot once, because the kernel takes some 10 ms for it. The daemon makes
and removes slots; the service writes a slot's limits before each action in it (`Slot.limit`).
Versions 1 and 2 of control groups have the same nouns with other file names. Where this process may
not write any, `find_cgroups` returns None, and the service watches memory itself.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger()

CONTROLLERS = ("memory", "cpu", "pids")
# Which cores, and the CPU seconds used; version 2 counts those under `cpu`
OPTIONAL = ("cpuset", "cpuacct")
PERIOD_US = 100_000  # the kernel's own default: quotas count per this
PREFIX = "treadle-tools-"
SERVICE_GROUP = "treadle-service"
PAGE_BYTES = 4096
# A killed sandbox's processes leave their group a little later
REMOVAL_TRIES, REMOVAL_WAIT_S = 50, 0.02
# File names by version of control groups.
MEMORY_MOST = {1: "memory.limit_in_bytes", 2: "memory.max"}
# Of version 1: memory and swap together
SWAP_MOST = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}
OOM_EVENTS = {1: "memory.oom_control", 2: "memory.events"}
# How often a group was at its own limit: in version 1 files of their own, else a line of OOM_EVENTS
FULL_COUNTS, FULL_EVENT = ("memory.failcnt", "memory.memsw.failcnt"), "oom"


@dataclass(frozen=True)
class Root:
    """Folders of control groups below which slots are made.

    folders: where slots are made, by controller.

    cores: all cores, as the kernel lists them; "": no slot can be pinned.
    """

    version: int
    folders: Mapping[str, str]
    cores: str = ""


@dataclass(frozen=True)
class MemoryCounts:
    """How often the kernel killed a process of a group for memory, and how often the group was at
    its own limit: a kill at another time is because the machine, or a group above, had no more."""

    kills: int = 0
    full: int = 0


class Slot:
    """The group of a spawner and its sandbox.

    Its calls block, each for well under a millisecond except `join`.
    """

    def __init__(self, root: Root, name: str) -> None:
        self.name = name
        self._root = root
        self._folders = {
            controller: Path(folder, name) for controller, folder in root.folders.items()
        }
        self._written: dict[str, str] = {}
        for folder in set(self._folders.values()):
            folder.mkdir(parents=True, exist_ok=True)
        if root.version == 1 and "cpuset" in root.folders:
            _inherit_cpuset(self._folders["cpuset"])

    def limit(
        self,
        *,
        memory_bytes: int | None,
        cpu_cores: int,
        processes: int,
        cores: tuple[int, ...] = (),
    ) -> None:
        """Limit the slot's sandbox from now on.

        memory_bytes: None leaves the limit as it is. cores: their numbers; empty: any.
        """
        if memory_bytes is not None:
            self._limit_memory(memory_bytes)
        quota_us = cpu_cores * PERIOD_US
        if self._root.version == 1:
            self._write("cpu", "cpu.cfs_quota_us", str(quota_us))
        else:
            self._write("cpu", "cpu.max", f"{quota_us} {PERIOD_US}")
        self._write("pids", "pids.max", str(processes))
        self._pin(cores)

    def unpin(self) -> None:
        """Allow all cores again, since another action gets the cores of the last one."""
        with contextlib.suppress(FileNotFoundError):  # removed after the sandbox's end
            self._pin(())

    def cpu_s(self) -> float | None:
        """Return the CPU seconds of the group over its life; None where the kernel does not count,
        or the group has been removed."""
        with contextlib.suppress(FileNotFoundError):
            if self._root.version == 2:
                lines = _read(self._path("cpu", "cpu.stat")).splitlines()
                return next(
                    (int(line.split()[1]) / 1e6 for line in lines if line.startswith("usage_usec")),
                    None,
                )
            if "cpuacct" in self._folders:
                return int(_read(self._path("cpuacct", "cpuacct.usage"))) / 1e9
        return None

    def _pin(self, cores: tuple[int, ...]) -> None:
        if "cpuset" in self._folders:
            self._write("cpuset", "cpuset.cpus", ",".join(map(str, cores)) or self._root.cores)

    def _limit_memory(self, memory_bytes: int) -> None:
        version, most = self._root.version, str(memory_bytes)
        if self._written.get(MEMORY_MOST[version]) == most:
            return
        if version == 1:  # memory with swap may never be the smaller of the two, so raise it first
            self._write("memory", SWAP_MOST[1], "-1", optional=True)
        self._write("memory", MEMORY_MOST[version], most)
        self._write("memory", SWAP_MOST[version], most if version == 1 else "0", optional=True)

    def join(self, pid: int) -> None:
        """Put a process into the group; its later children follow it."""
        for folder in set(self._folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def memory_counts(self) -> MemoryCounts:
        """Return what the kernel has counted of the group's memory over its life."""
        text = _read(self._path("memory", OOM_EVENTS[self._root.version]))
        events = {name: int(count) for name, count in map(str.split, text.splitlines())}
        full = events.get(FULL_EVENT, 0)
        if self._root.version == 1:
            for file in FULL_COUNTS:
                with contextlib.suppress(FileNotFoundError):  # swap is not counted
                    full += int(_read(self._path("memory", file)))
        return MemoryCounts(events.get("oom_kill", 0), full)

    def remove(self) -> None:
        """Remove the group, once its processes are gone. Raises OSError where they stay."""
        for folder in set(self._folders.values()):
            _remove(folder)

    def _write(self, controller: str, file: str, value: str, *, optional: bool = False) -> None:
        if self._written.get(file) == value:
            return
        path = self._path(controller, file)
        if optional and not Path(path).exists():
            return
        _put(path, value)
        self._written[file] = value

    def _path(self, controller: str, file: str) -> str:
        """Return the path of a controller's file as text, because joining a Path takes longer than
        reading the file."""
        return f"{self._folders[controller]}/{file}"


class Cgroups:
    """All slots of the daemon."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._free: list[Slot] = []
        self._made: list[Slot] = []

    def take(self) -> Slot:
        """Take a slot that has no process in it."""
        if self._free:
            return self._free.pop()
        self._made.append(Slot(self.root, f"slot-{len(self._made)}"))
        return self._made[-1]

    def give_back(self, slot: Slot) -> None:
        """Return a slot whose processes are dead."""
        self._free.append(slot)

    def close(self) -> None:
        """Remove every slot and the daemon's group."""
        for slot in self._made:
            with contextlib.suppress(OSError):
                slot.remove()
        for folder in set(self.root.folders.values()):
            try:
                _remove(Path(folder))
            except OSError as error:
                log.warning("a control group is left behind", folder=folder, error=str(error))


def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups | None:
    """Return slots below this process's own groups; None where it may not make them.

    Removes what dead daemons have left.

    Version 2 is tried first, where this process's group belongs to it alone; then version 1.
    """
    for version, parents in ((2, _own_v2(proc)), (1, _own_v1(proc))):
        if not set(CONTROLLERS) <= set(parents):
            continue
        folders = {
            controller: parent / f"{PREFIX}{os.getpid()}" for controller, parent in parents.items()
        }
        try:
            if version == 2:
                _delegate(parents["memory"])
            for parent in set(parents.values()):
                _sweep(parent)
            _make(folders)
            if version == 2:
                _enable(folders["memory"])
            if not (cores := _cpuset_cores(version, folders)):
                folders.pop("cpuset", None)
            cgroups = Cgroups(
                Root(version, {name: str(folder) for name, folder in folders.items()}, cores)
            )
            slot = cgroups.take()
            slot.limit(memory_bytes=1 << 30, cpu_cores=1, processes=64)
            slot.memory_counts()
            slot.cpu_s()
            cgroups.give_back(slot)
        except OSError as error:
            log.info("control groups cannot be written", version=version, error=str(error))
            for folder in set(folders.values()):
                _clear(folder)
            continue
        return cgroups
    return None


def _mounts(proc: Path, kind: str) -> list[tuple[str, Path, set[str]]]:
    """Return root, mount point and options of every mount of a file system `kind`."""
    found = []
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == kind:
            fields = before.split()
            found.append((fields[3], Path(fields[4]), set(after.split()[2].split(","))))
    return found


def _memberships(proc: Path) -> list[tuple[set[str], str]]:
    """Return controllers and path of every hierarchy this process is in; version 2 has no
    controllers here."""
    lines = (proc / "cgroup").read_text().splitlines()
    fields = [line.split(":", 2) for line in lines]
    return [(set(controllers.split(",")) - {""}, path) for _, controllers, path in fields]


def _own_v1(proc: Path) -> dict[str, Path]:
    return {
        controller: _below(point, root, path)
        for controllers, path in _memberships(proc)
        for root, point, options in _mounts(proc, "cgroup")
        for controller in controllers & options & {*CONTROLLERS, *OPTIONAL}
    }


def _own_v2(proc: Path) -> dict[str, Path]:
    paths = [path for controllers, path in _memberships(proc) if not controllers][:1]
    for folder in [
        _below(point, root, path) for path in paths for root, point, _ in _mounts(proc, "cgroup2")
    ]:
        own = folder.parent if folder.name == SERVICE_GROUP else folder
        with contextlib.suppress(OSError):
            present = set((own / "cgroup.controllers").read_text().split())
            if set(CONTROLLERS) <= present:
                return dict.fromkeys((*CONTROLLERS, *({"cpuset"} & present)), own)
    return {}


def _below(point: Path, root: str, path: str) -> Path:
    """Return the folder of a group `path`, seen through a mount of `root` at `point`."""
    inner = path.removeprefix(root) if root != "/" else path
    return point / inner.lstrip("/")


def _delegate(own: Path) -> None:
    """Give controllers to child groups.

    Version 2 requires a group without processes: move ours to a child if needed.
    """
    try:
        _enable(own)
    except OSError:
        processes = (own / "cgroup.procs").read_text().split()
        if not set(processes) <= {str(os.getpid()), str(os.getppid())}:
            raise  # other processes share the group, and must not be moved
        leaf = own / SERVICE_GROUP
        leaf.mkdir(exist_ok=True)
        for pid in processes:
            (leaf / "cgroup.procs").write_text(pid)
        _enable(own)


def _enable(folder: Path) -> None:
    wanted = " ".join(f"+{controller}" for controller in CONTROLLERS)
    try:
        (folder / "cgroup.subtree_control").write_text(f"{wanted} +cpuset")
    except OSError:
        (folder / "cgroup.subtree_control").write_text(wanted)


def _make(folders: dict[str, Path]) -> None:
    """Make the daemon's groups; drop an optional controller that may not be written."""
    for controller, folder in list(folders.items()):
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            if controller not in OPTIONAL:
                raise
            del folders[controller]


def _cpuset_cores(version: int, folders: Mapping[str, Path]) -> str:
    """Return all cores that slots may use, once the daemon's group has them; empty where slots
    cannot be pinned."""
    if "cpuset" not in folders:
        return ""
    folder = folders["cpuset"]
    try:
        if version == 1:
            _inherit_cpuset(folder)
        elif "cpuset" not in (folder / "cgroup.subtree_control").read_text():
            return ""
        return (
            (folder / ("cpuset.cpus" if version == 1 else "cpuset.cpus.effective"))
            .read_text()
            .strip()
        )
    except OSError as error:
        log.info("actions cannot be pinned to cores", version=version, error=str(error))
        return ""


def _sweep(parent: Path) -> None:
    """Remove the groups of daemons that were killed."""
    for group in parent.glob(f"{PREFIX}*"):
        pid = group.name.removeprefix(PREFIX)
        if pid.isdigit() and not Path("/proc", pid).exists():
            _clear(group)


def _clear(group: Path) -> None:
    """Remove a group and its slots, as far as nothing runs in them. Two services of one machine may
    remove the same group at once, so each step may find it gone."""
    slots: list[Path] = []
    with contextlib.suppress(OSError):
        slots = list(group.glob("slot-*"))
    for folder in (*slots, group):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _put(path: str, text: str) -> None:
    """Write a file of the kernel, as every action does several times: pathlib takes twice as
    long."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _read(path: str) -> str:
    """Read a file of the kernel; none of those read here is longer than a page."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, PAGE_BYTES).decode()
    finally:
        os.close(descriptor)


def _inherit_cpuset(folder: Path) -> None:
    """Copy cores and memory nodes of the parent: a new group of version 1 has none, and takes no
    process before."""
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
