"""Images of containers, from the nearest place that has them: the host itself, the mirror, the image's own registry.

RollArt §8: a reset of an environment fails most often where an image is fetched, and takes longest there. Invariant: an
image is fetched once at a time, however many containers wait for it.
"""

import asyncio
from collections import defaultdict

import aiodocker
import structlog

log = structlog.get_logger()

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
                    log.warning("an image is fetched again", image=image, error=error.message, pause_s=pause_s)
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
                log.warning("the mirror does not have an image", image=mirrored, error=error.message)
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
