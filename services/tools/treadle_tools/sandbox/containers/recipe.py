"""How the container of a tool is made: image, command, folders to read, limits. The same for Docker and Kubernetes.

Invariant: nothing in it says where it runs.

What the two kinds of containers have in common, as the rest sees them: a host that makes vessels, a pipe into each.

Implemented by `docker.py` (a daemon) and `kubernetes.py` (a cluster)."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from treadle_tools.limits import MIB
from treadle_tools.sandbox.bubblewrap.cell import WORKER_PROCESSES
from treadle_tools.sandbox.bubblewrap.command import ENVIRONMENT, NOBODY
from treadle_tools.tool import Tool

USER = NOBODY
CODE = "/opt/treadle-code"  # where the worker's code is shown, unless the image has it
START_BYTES = 512 * MIB  # for imports, until the worker has said what it holds
MOST_FILES = 16384  # inodes of /tmp, as in bubblewrap's cells
MOST_DESCRIPTORS = 1024
PACKAGE = "treadle_tools"
VARIABLES = MappingProxyType({name: value for name, value in ENVIRONMENT.items() if name != "PATH"})  # the image's own
BOOT = (
    "import sys, json; config = json.loads(sys.argv[1]); sys.path += config['paths']; "
    "from treadle_tools.sandbox.inside.container import main; main(config)"
)
INTERPRETER = ("python3", "-I", "-B", "-X", "utf8")


@dataclass(frozen=True)
class Recipe:
    """See the module. code: path on this machine -> path inside, read-only; empty: the image has it. network: the name
    of one; empty: none.
    """

    tool: str
    image: str
    argv: tuple[str, ...]
    code: tuple[tuple[Path, str], ...]
    cpu_cores: int
    memory_bytes: int
    work_bytes: int
    processes: int
    network: str = ""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment, beside the image's own."""
        return VARIABLES


def recipe_of(tool: Tool, *, image: str, code_in_image: bool, silence_s: float) -> Recipe:
    """How a worker of `tool` is started. silence_s: after which it ends by itself.

    Raises ModuleNotFoundError where its code is to be shown from here and is not here.
    """
    config = {
        "paths": [] if code_in_image else [CODE],
        "tool": tool.name,
        "entry": tool.entry,
        "environment": tool.kind == "environment",
        "preload": list(tool.preload),
        "work_bytes": tool.work_bytes,
        "processes": tool.processes,
        "drop_root": False,
        "silence_s": silence_s,
    }
    return Recipe(
        tool=tool.name,
        image=tool.image or image,
        argv=(*INTERPRETER, "-c", BOOT, json.dumps(config)),
        code=() if code_in_image else _code_of(tool),
        cpu_cores=tool.limits.cpu_cores,
        memory_bytes=tool.limits.memory_bytes + START_BYTES,
        work_bytes=tool.work_bytes,
        processes=tool.processes + WORKER_PROCESSES,
        network=tool.network,
    )


def _code_of(tool: Tool) -> tuple[tuple[Path, str], ...]:
    """This package, and the package or module of the tool itself; what those import is the image's matter."""
    shown = {}
    for top in (PACKAGE, tool.entry.partition(":")[0].partition(".")[0]):
        spec = find_spec(top)
        if spec is None or (spec.origin is None and not spec.submodule_search_locations):
            raise ModuleNotFoundError(f"tool {tool.name!r}: no module named {top!r}", name=top)
        places = list(spec.submodule_search_locations or ())
        path = Path(places[0]) if places else Path(str(spec.origin))
        shown[path.resolve()] = f"{CODE}/{path.name}"
    return tuple(shown.items())


class HostFailed(Exception):  # noqa: N818 - named for what happened
    """A host does not answer, or refuses; another one, or a later try, may do better. The message says why."""


class VesselLost(Exception):  # noqa: N818 - the container's news, not a fault
    """A container is gone."""


@dataclass(frozen=True)
class Allotment:
    """What a container may use from now on. cores: which, by this machine's numbers; empty: any. memory_bytes: None
    leaves it as it is.
    """

    cpu_cores: int
    cores: tuple[int, ...] = ()
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Ending:
    """How a container ended. runs: it has not. exit_code: None where nobody knows."""

    runs: bool = False
    exit_code: int | None = None
    out_of_memory: bool = False


class Pipe(Protocol):
    """Bytes to and from the container's first process."""

    async def write(self, piece: bytes) -> None:
        """Raises ConnectionError where the other end is gone."""
        ...

    async def read(self) -> bytes:
        """What its standard output says next; empty at its end."""
        ...

    @property
    def complaints(self) -> str:
        """The last of what its standard error has said."""
        ...

    async def close(self) -> None:
        """Hang up; the container goes on."""
        ...


class Vessel(Protocol):
    """One container that was made and started, or found again."""

    name: str

    async def attach(self) -> Pipe:
        """A pipe. Raises VesselLost, HostFailed."""
        ...

    async def allot(self, allotment: Allotment) -> None:
        """Raises VesselLost, HostFailed."""
        ...

    async def ending(self) -> Ending:
        """Raises HostFailed."""
        ...

    async def remove(self) -> None:
        """Kill everything in it, and remove it. One that is gone is no matter. Raises HostFailed."""
        ...


class Host(Protocol):
    """Where vessels are made. name: tells it from the other hosts."""

    name: str

    async def check(self) -> str:
        """What it runs, with its version. Raises HostFailed."""
        ...

    async def make(self, recipe: Recipe, name: str) -> Vessel:
        """A new container that runs. Raises HostFailed; nothing is left of it then."""
        ...

    async def running(self) -> Sequence[Vessel]:
        """Every container of this owner's that runs. Raises HostFailed."""
        ...

    async def sweep(self, kept: Collection[str]) -> int:
        """Remove what else the owner has there, running or not; how many that were. Raises HostFailed."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...
