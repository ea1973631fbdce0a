"""On which host the next container is made: the least loaded of those that work.

RollArt §8 (environment stability): a creation that fails is tried again elsewhere, with longer and longer pauses where
there is no elsewhere. Owns: what each host carries, and which of them rest after a failure.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from treadle_tools.containers.recipe import Recipe
from treadle_tools.containers.vessel import Host, HostFailed, Vessel

log = structlog.get_logger()

TRIES = 5
REST_S = 0.5  # after a host's first failure; twice as long after each further one
LONGEST_REST_S = 30.0


@dataclass
class _Standing:
    """Of one host. load: containers that it carries, those being made included."""

    host: Host
    load: int = 0
    failures: int = 0
    rests_until: float = 0.0


class Hosts:
    """See the module. clock: seconds, as time.monotonic. sleep: as asyncio.sleep."""

    def __init__(
        self,
        hosts: Sequence[Host],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._standings = {host.name: _Standing(host) for host in hosts}
        self._clock = clock
        self._sleep = sleep

    def __iter__(self) -> Iterator[Host]:
        return iter([standing.host for standing in self._standings.values()])

    def load(self, name: str) -> int:
        """Containers that a host carries."""
        return self._standings[name].load

    def carries(self, name: str) -> None:
        """A container was found on a host."""
        self._standings[name].load += 1

    def freed(self, name: str) -> None:
        """A container is gone from a host."""
        self._standings[name].load -= 1

    async def make(self, recipe: Recipe, name: str) -> tuple[Host, Vessel]:
        """A container on the best host, or the next best. Raises HostFailed where none makes it in TRIES tries."""
        for tries_left in reversed(range(TRIES)):
            standing = self._best()
            await self._sleep(max(0.0, standing.rests_until - self._clock()))
            standing.load += 1
            try:
                vessel = await standing.host.make(recipe, name)
            except HostFailed as failure:
                standing.load -= 1
                self._rest(standing)
                if not tries_left:
                    raise
                log.warning("a container is tried elsewhere, or again", host=standing.host.name, error=str(failure))
            except BaseException:
                standing.load -= 1
                raise
            else:
                standing.failures = 0
                return standing.host, vessel
        raise AssertionError("the last try returns or raises")

    def _best(self) -> _Standing:
        """Whoever need not rest, then carries least; where all rest, whoever is back first."""
        now = self._clock()
        return min(self._standings.values(), key=lambda one: (max(0.0, one.rests_until - now), one.load))

    def _rest(self, standing: _Standing) -> None:
        rest_s = min(LONGEST_REST_S, REST_S * 2**standing.failures)
        standing.failures += 1
        standing.rests_until = self._clock() + rest_s
