"""Where this process may make control groups: the hierarchies of the kernel, its own place in them, what is left there.

Version 2 is tried first, where this process's group is its own; then version 1.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import structlog

from treadle_tools.sandbox.bubblewrap.cgroups import (
    CONTROLLERS,
    OPTIONAL,
    PREFIX,
    SERVICE_GROUP,
    Cgroups,
    Root,
    inherit_cpuset,
)

log = structlog.get_logger()


def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups | None:
    """Slots below this process's own groups, where it may make them; also removes what dead services have left."""
    for version, parents in ((2, _own_v2(proc)), (1, _own_v1(proc))):
        if not set(CONTROLLERS) <= set(parents):
            continue
        folders = {controller: parent / f"{PREFIX}{os.getpid()}" for controller, parent in parents.items()}
        try:
            if version == 2:
                _delegate(parents["memory"])
            for parent in set(parents.values()):
                _sweep(parent)
            _make(folders)
            if version == 2:
                _enable(folders["memory"])
            cores = _cpuset_cores(version, folders)
            if not cores:
                folders.pop("cpuset", None)
            cgroups = Cgroups(Root(version, folders, cores))
            slot = cgroups.take()
            slot.limit(memory_bytes=1 << 30, cpu_cores=1, processes=64)
            slot.oom_kills()
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
    """(root, mount point, options) of every mount of a file system `kind`."""
    found = []
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == kind:
            fields = before.split()
            found.append((fields[3], Path(fields[4]), set(after.split()[2].split(","))))
    return found


def _memberships(proc: Path) -> list[tuple[set[str], str]]:
    """(controllers, path) of every hierarchy this process is in; version 2 has no controllers here."""
    lines = (proc / "cgroup").read_text().splitlines()
    fields = [line.split(":", 2) for line in lines]
    return [(set(controllers.split(",")) - {""}, path) for _, controllers, path in fields]


def _own_v1(proc: Path) -> dict[str, Path]:
    own = {}
    for controllers, path in _memberships(proc):
        for root, point, options in _mounts(proc, "cgroup"):
            for controller in controllers & options & {*CONTROLLERS, *OPTIONAL}:
                own[controller] = _below(point, root, path)
    return own


def _own_v2(proc: Path) -> dict[str, Path]:
    path = next((path for controllers, path in _memberships(proc) if not controllers), None)
    for root, point, _ in _mounts(proc, "cgroup2"):
        if path is not None:
            folder = _below(point, root, path)
            if folder.name == SERVICE_GROUP:
                folder = folder.parent
            try:
                present = (folder / "cgroup.controllers").read_text().split()
            except OSError:
                continue
            if set(CONTROLLERS) <= set(present):
                return dict.fromkeys((*CONTROLLERS, *({"cpuset"} & set(present))), folder)
    return {}


def _below(point: Path, root: str, path: str) -> Path:
    """The folder of a group `path`, seen through a mount of `root` at `point`."""
    inner = path.removeprefix(root) if root != "/" else path
    return point / inner.lstrip("/")


def _delegate(own: Path) -> None:
    """Version 2 gives controllers to children only of a group without processes: move the keeper and its service
    down.
    """
    try:
        _enable(own)
    except OSError:
        processes = (own / "cgroup.procs").read_text().split()
        if not set(processes) <= {str(os.getpid()), str(os.getppid())}:
            raise  # the group is not ours alone: it is not for us to move others
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
    """The service's groups; an optional controller that may not be written is left out."""
    for controller, folder in list(folders.items()):
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            if controller not in OPTIONAL:
                raise
            del folders[controller]


def _cpuset_cores(version: int, folders: Mapping[str, Path]) -> str:
    """All cores that slots may use, once the service's group has them; empty where they cannot be told apart."""
    if "cpuset" not in folders:
        return ""
    try:
        if version == 2:
            given = (folders["cpuset"] / "cgroup.subtree_control").read_text()
            return (folders["cpuset"] / "cpuset.cpus.effective").read_text().strip() if "cpuset" in given else ""
        inherit_cpuset(folders["cpuset"])
        return (folders["cpuset"] / "cpuset.cpus").read_text().strip()
    except OSError as error:
        log.info("cores cannot be told apart", version=version, error=str(error))
        return ""


def _sweep(parent: Path) -> None:
    """Remove the groups of services that were killed."""
    for group in parent.glob(f"{PREFIX}*"):
        pid = group.name.removeprefix(PREFIX)
        if pid.isdigit() and not Path("/proc", pid).exists():
            _clear(group)


def _clear(group: Path) -> None:
    for folder in (*group.glob("slot-*"), group):
        with contextlib.suppress(OSError):
            folder.rmdir()
