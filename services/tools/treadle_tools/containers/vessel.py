"""What the two kinds of containers have in common, as the rest sees them: a host that makes vessels, a pipe into each.

Implemented by `docker.py` (a daemon) and `kubernetes.py` (a cluster).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from treadle_tools.containers.recipe import Recipe


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
