"""On which host the next container is made: the least loaded of those that work.

RollArt §8 (environment stability): a creation that fails is tried again elsewhere, with longer and longer pauses where
there is no elsewhere. Owns: what each host carries, and which of them rest after a failure.

Images of containers, from the nearest place that has them: the host itself, the mirror, the image's own registry.

RollArt §8: a reset of an environment fails most often where an image is fetched, and takes longest there. Invariant: an
image is fetched once at a time, however many containers wait for it."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import aiodocker
import structlog

from treadle_tools.sandbox.containers.recipe import Host, HostFailed, Recipe, Vessel

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


log_images = structlog.get_logger()

PULL_PAUSES_S = (1.0, 4.0, 16.0)  # a registry that refuses is busy: back off


class Images:
    """Of one daemon. mirror: a registry that is asked first, such as `registry.local:5000`; empty: none."""

    def __init__(self, docker: aiodocker.Docker, mirror: str) -> None:
        self._docker = docker
        self._mirror = mirror
        self._fetching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def require(self, image: str) -> None:
        """Returns once the host has it. Raises aiodocker.DockerError where nobody gives it."""
        async with self._fetching[image]:
            if await self._present(image):
                return
            for pause_s in PULL_PAUSES_S:
                try:
                    await self._fetch(image)
                    return
                except aiodocker.DockerError as error:
                    if error.status in (400, 401, 403, 404):  # it will be the same in a moment
                        raise
                    log_images.warning("an image is fetched again", image=image, error=error.message, pause_s=pause_s)
                await asyncio.sleep(pause_s)
            await self._fetch(image)

    async def _present(self, image: str) -> bool:
        try:
            await self._docker.images.inspect(image)
        except aiodocker.DockerError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _fetch(self, image: str) -> None:
        if self._mirror:
            mirrored = f"{self._mirror}/{image}"
            try:
                await self._docker.images.pull(mirrored)
            except aiodocker.DockerError as error:
                log_images.warning("the mirror does not have an image", image=mirrored, error=error.message)
            else:
                repository, tag = split(image)
                await self._docker.images.tag(mirrored, repository, tag=tag)
                return
        await self._docker.images.pull(image)


def split(image: str) -> tuple[str, str]:
    """Repository and tag."""
    repository, _, tag = image.rpartition(":")
    if not repository or "/" in tag:  # the colon was a registry's port, or there was none
        return image, "latest"
    return repository, tag
