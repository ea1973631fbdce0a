"""Define how a tool's container is made, and on which host, for Docker daemons and Kubernetes
clusters alike.

`docker.py` and `kubernetes.py` implement it. RollArt §8 (environment stability): a creation that
fails is tried again elsewhere, with longer and longer pauses where there is no other host.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_chain,
    wait_fixed,
)
from tenacity.retry import RetryBaseT

from treadle_tools.sandbox.sandboxes import PACKAGE, find_top_level, worker_arguments
from treadle_tools.tool import MIB, Tool

log = structlog.get_logger()

CODE = "/opt/treadle-code"  # where the container shows the worker's code, unless the image has it
START_BYTES = 512 * MIB  # for imports, until the worker has reported what it holds
MOST_DESCRIPTORS = 1024
INTERPRETER = ("python3", "-I", "-B", "-X", "utf8")
TRIES = 5
# Of a host, after each of its failures; the last one again
REST_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


@dataclass(frozen=True)
class Recipe:
    """Recipe by which a tool's container is made.

    code: (path here, path inside), shown read-only; empty: in the image.

    memory_bytes: the limit until its worker runs.
    """

    tool: Tool
    image: str
    argv: tuple[str, ...]
    code: tuple[tuple[Path, str], ...]
    memory_bytes: int

    @classmethod
    def for_tool(cls, tool: Tool, *, image: str, code_in_image: bool, silence_s: float) -> "Recipe":
        """Return the recipe of `tool`.

        silence_s: seconds without a request after which its worker ends by itself.

        Raises ModuleNotFoundError where its code is to be shown from this machine and is not here.
        """
        paths = () if code_in_image else (CODE,)
        return cls(
            tool=tool,
            image=tool.image or image,
            argv=(*INTERPRETER, *worker_arguments(tool, "container", paths, silence_s=silence_s)),
            code=() if code_in_image else _find_code(tool),
            memory_bytes=tool.limits.memory_bytes + START_BYTES,
        )


def _find_code(tool: Tool) -> tuple[tuple[Path, str], ...]:
    """Return where this package and the tool's own package or module are; the image has what they
    import."""
    shown = {}
    for name in (PACKAGE, tool.entry):
        spec = find_top_level(tool, name)
        places = list(spec.submodule_search_locations or ())
        if not places and spec.origin is None:
            raise ModuleNotFoundError(
                f"tool {tool.name!r}: {spec.name!r} has no files", name=spec.name
            )
        path = Path(places[0] if places else str(spec.origin))
        shown[path.resolve()] = f"{CODE}/{path.name}"
    return tuple(shown.items())


class HostFailed(Exception):  # noqa: N818 - named for what happened
    """A host does not answer, or refuses; another one, or a later try, may do better.

    The message gives the reason.
    """


class ContainerLost(Exception):  # noqa: N818 - an answer to the caller, not a fault
    """A container is gone."""


@dataclass(frozen=True)
class Allotment:
    """Cores and memory that a container may use.

    cores: by this machine's numbers; empty: any. memory_bytes: None leaves the limit as it is.
    """

    cpu_cores: int
    cores: tuple[int, ...] = ()
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Ending:
    """State of a container: whether and how it ended. exit_code: None where unknown."""

    runs: bool = False
    exit_code: int | None = None
    out_of_memory: bool = False

    def __str__(self) -> str:
        if self.runs:
            return "its connection broke"
        return "it is gone" if self.exit_code is None else f"exit code {self.exit_code}"


class Pipe(Protocol):
    """Connection to the standard streams of a container's init."""

    async def write(self, data: bytes) -> None:
        """Write to the init's standard input. Raises ConnectionError where the container is
        gone."""

    async def read(self) -> tuple[bool, bytes] | None:
        """Read the init's outputs: return whether this is standard error, and the next bytes; None
        at their end."""

    async def close(self) -> None:
        """Disconnect; the container goes on."""


class Host(Protocol):
    """Makes containers, which run by then, and finds those of this owner again.

    name: unique among the hosts.

    Every method raises HostFailed. `attach` and `allot` raise ContainerLost too.
    """

    name: str

    async def check(self) -> str:
        """Return the name and version of the host's software."""

    async def make(self, recipe: Recipe, name: str) -> None:
        """Make and start a container; leave nothing of it where this fails."""

    async def attach(self, name: str) -> Pipe:
        """Return a pipe to a container."""

    async def allot(self, name: str, allotment: Allotment) -> None:
        """Change what a container may use."""

    async def ending(self, name: str) -> Ending:
        """Return whether a container has ended, and how."""

    async def remove(self, name: str) -> None:
        """Kill everything in a container and remove it, if it is there."""

    async def list_names(self, *, running: bool = False) -> Sequence[str]:
        """Return the names of this owner's containers: all, or those that run."""

    async def close(self) -> None:
        """Disconnect from the host."""


async def sweep(host: Host, kept: Collection[str] = ()) -> int:
    """Remove the owner's containers but `kept` from a host; return how many there were.

    Raises HostFailed.
    """
    swept = [name for name in await host.list_names() if name not in kept]
    for name in swept:
        await host.remove(name)
    return len(swept)


@dataclass
class _HostState:
    """A host, its load and its failures.

    load: containers on the host, those being made included.
    """

    host: Host
    load: int = 0
    failures: int = 0
    rests_until: float = 0.0


@dataclass(eq=False)
class Hosts:
    """Chooses the host that works and has the least load.

    clock: seconds, as time.monotonic. sleep: as asyncio.sleep.
    """

    hosts: Sequence[Host]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._states = {host.name: _HostState(host) for host in self.hosts}

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def add_load(self, name: str, containers: int) -> None:
        """Count containers that were found on a host, or removed from it (negative)."""
        self._states[name].load += containers

    async def make(self, recipe: Recipe, name: str) -> Host:
        """Make a container on the best host, or the next best, in TRIES tries.

        Raises HostFailed.
        """
        what = "a container is tried elsewhere, or again"
        retrying = retry_after(
            (0.0,) * (TRIES - 1), retry_if_exception_type(HostFailed), what, container=name
        )
        return await retrying(self._make_on_best, recipe, name)

    async def _make_on_best(self, recipe: Recipe, name: str) -> Host:
        """Make a container on the best host, once that host need not rest. Raises HostFailed."""
        state = self._best()
        await self.sleep(max(0.0, state.rests_until - self.clock()))
        state.load += 1
        try:
            await state.host.make(recipe, name)
        except BaseException as error:
            state.load -= 1
            if isinstance(error, HostFailed):
                pause_s = REST_PAUSES_S[min(state.failures, len(REST_PAUSES_S) - 1)]
                state.rests_until = self.clock() + pause_s
                state.failures += 1
            raise
        state.failures = 0
        return state.host

    def _best(self) -> _HostState:
        """Return the host that need not rest and has the least load; where all rest, the one whose
        rest ends first."""
        now = self.clock()
        return min(
            self._states.values(), key=lambda state: (max(0.0, state.rests_until - now), state.load)
        )


def retry_after(
    pauses_s: Sequence[float], retry: RetryBaseT, what: str, **fields: Any
) -> AsyncRetrying:
    """Return a retrier that calls a coroutine function again after each of `pauses_s`, and logs
    `what` each time.

    It raises the last error.
    """

    def report(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        log.warning(what, error=str(error), **fields)

    return AsyncRetrying(
        retry=retry,
        wait=wait_chain(*map(wait_fixed, pauses_s)),
        stop=stop_after_attempt(len(pauses_s) + 1),
        before_sleep=report,
        reraise=True,
    )
