"""Run containers on a Docker daemon.

This module owns the connection to the daemon. Invariants: a container has no network unless its
recipe names one, no capability, no way to more privileges, a read-only root, a /tmp of a limited
size, and limits on memory, processes and cores; its label names its owner, who finds it again by
that.
"""

import asyncio
import contextlib
import ssl
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import aiodocker
import aiohttp
import structlog
from aiodocker.containers import DockerContainer
from aiodocker.stream import Stream
from tenacity import retry_if_exception

from treadle_tools.sandbox.containers import hosts
from treadle_tools.sandbox.containers.hosts import (
    Allotment,
    ContainerLost,
    Ending,
    HostFailed,
    Pipe,
    Recipe,
)
from treadle_tools.sandbox.sandboxes import NOBODY, VARIABLES
from treadle_tools.tool import WORK_FOLDER_INODES, WORKER_PROCESSES

log = structlog.get_logger()

STDERR = 2
OWNER = "treadle.tools.owner"
TOOL = "treadle.tools.tool"
PERIOD_US = 100_000
# Of one call to the daemon; a container is made in half a second on an idle machine
CALL_TIMEOUT_S = 60.0
UNIX = "unix://"
PULL_PAUSES_S = (1.0, 4.0, 16.0)  # a registry that refuses is busy: back off
FINAL_STATUSES = (400, 401, 403, 404)  # a registry answers the same in a moment


class DockerPipe:
    """A `Pipe` to the attached standard input and outputs of a container's init."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write_in(data)
        # The library asserts that there is a connection.
        except (aiohttp.ClientError, OSError, AssertionError, RuntimeError) as error:
            raise ConnectionError(str(error) or "the connection is gone") from error

    async def read(self) -> tuple[bool, bytes] | None:
        with contextlib.suppress(aiohttp.ClientError, OSError, aiodocker.DockerError):
            if (message := await self._stream.read_out()) is not None:
                return message.stream == STDERR, message.data
        return None

    async def close(self) -> None:
        # The library's, where the other end has gone first
        with contextlib.suppress(AssertionError):
            await self._stream.close()


class DockerHost:
    """`Host` that is a Docker daemon.

    mirror: a registry that is tried first for images, such as `registry.local:5000`; empty: none.
    tls: a folder with ca.pem, cert.pem and key.pem, for a daemon that is not on this machine.
    """

    def __init__(self, url: str, *, owner: str, mirror: str = "", tls: str = "") -> None:
        self.name = url
        self._owner = owner
        self._mirror = mirror
        self._tls = tls
        self._docker: aiodocker.Docker | None = None
        self._images: Images | None = None
        self._all_cores = ""
        # Of new containers: attached before the start, so that nothing is missed that they write.
        self._pipes: dict[str, DockerPipe] = {}

    async def check(self) -> str:
        with _failures(self.name, missing=HostFailed):
            about = await self._connect().system.info()
        self._all_cores = f"0-{int(about['NCPU']) - 1}"
        return f"docker {about['ServerVersion']}"

    async def make(self, recipe: Recipe, name: str) -> None:
        if not self._all_cores:  # it did not answer when the service started
            await self.check()
        async with contextlib.AsyncExitStack() as undo:
            undo.enter_context(_failures(self.name, missing=HostFailed))
            docker = self._connect()
            assert self._images is not None
            await self._images.require(recipe.image)
            container = await _create(docker, self._config(recipe), name)
            undo.push_async_callback(_remove, container)
            pipe = await _attach(container)
            undo.push_async_callback(pipe.close)
            await container.start()
            undo.pop_all()
            self._pipes[name] = pipe

    async def attach(self, name: str) -> Pipe:
        if (pipe := self._pipes.pop(name, None)) is not None:
            return pipe
        with _failures(f"container {name}"):
            return await _attach(self._container(name))

    async def allot(self, name: str, allotment: Allotment) -> None:
        """Change what a container may use, as `docker update` does.

        Core numbers mean nothing on another machine.
        """
        limits: dict[str, Any] = {
            "CpuPeriod": PERIOD_US,
            "CpuQuota": allotment.cpu_cores * PERIOD_US,
        }
        if self.name.startswith(UNIX):
            limits["CpusetCpus"] = ",".join(map(str, allotment.cores)) or self._all_cores
        if allotment.memory_bytes is not None:
            limits |= {"Memory": allotment.memory_bytes, "MemorySwap": allotment.memory_bytes}
        with _failures(f"container {name}"):
            # The library has no method for it.
            await self._connect()._query_json(
                f"containers/{name}/update", method="POST", data=limits
            )

    async def ending(self, name: str) -> Ending:
        try:
            with _failures(f"container {name}"):
                state = (await self._container(name).show())["State"]
        except ContainerLost:
            return Ending()
        return Ending(bool(state["Running"]), int(state["ExitCode"]), bool(state["OOMKilled"]))

    async def remove(self, name: str) -> None:
        if (pipe := self._pipes.pop(name, None)) is not None:
            await pipe.close()
        with contextlib.suppress(ContainerLost), _failures(f"container {name}"):
            await _remove(self._container(name))

    async def list_names(self, *, running: bool = False) -> Sequence[str]:
        filters = {"label": [f"{OWNER}={self._owner}"]} | (
            {"status": ["running"]} if running else {}
        )
        with _failures(self.name):
            found = await self._connect().containers.list(all=True, filters=filters)
        return [str(container["Names"][0]).removeprefix("/") for container in found]

    async def close(self) -> None:
        if self._docker is not None:
            docker, self._docker = self._docker, None
            await docker.close()
            await docker.connector.close()

    def _container(self, name: str) -> DockerContainer:
        return self._connect().containers.container(name)

    def _connect(self) -> aiodocker.Docker:
        if self._docker is None:
            # Each attached container holds a connection, and the library's own connector stops at a
            # hundred.
            connector: aiohttp.BaseConnector
            if self.name.startswith(UNIX):
                url, connector = (
                    f"{UNIX}localhost",
                    aiohttp.UnixConnector(self.name.removeprefix(UNIX), limit=0),
                )
            else:
                url = self.name.replace("tcp://", "https://" if self._tls else "http://")
                connector = aiohttp.TCPConnector(limit=0, ssl=self._make_context())
            timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
            self._docker = aiodocker.Docker(url, connector=connector, timeout=timeout)
            self._images = Images(self._docker, self._mirror)
        return self._docker

    def _make_context(self) -> ssl.SSLContext | bool:
        if not self._tls:
            return True
        context = ssl.create_default_context(cafile=f"{self._tls}/ca.pem")
        context.load_cert_chain(f"{self._tls}/cert.pem", f"{self._tls}/key.pem")
        return context

    def _config(self, recipe: Recipe) -> dict[str, Any]:
        code = recipe.code
        mounts = [
            {"Type": "bind", "Source": str(path), "Target": place, "ReadOnly": True}
            for path, place in code
        ]
        limits = f"size={recipe.tool.work_bytes},nr_inodes={WORK_FOLDER_INODES}"
        tmp = f"rw,exec,nosuid,nodev,{limits},mode=1777"
        most = {"nofile": hosts.MOST_DESCRIPTORS, "core": 0, "fsize": recipe.tool.work_bytes}
        return {
            "Image": recipe.image,
            "Entrypoint": [recipe.argv[0]],
            "Cmd": list(recipe.argv[1:]),
            "Env": [f"{name}={value}" for name, value in VARIABLES.items()],
            "User": f"{NOBODY}:{NOBODY}",
            "WorkingDir": "/tmp",
            "Hostname": "sandbox",
            "Labels": {OWNER: self._owner, TOOL: recipe.tool.name},
            "AttachStdin": True,
            "OpenStdin": True,
            "StdinOnce": False,  # the input stays open for the service's next run
            "Tty": False,
            "HostConfig": {
                "NetworkMode": recipe.tool.network or "none",
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "ReadonlyRootfs": True,
                "Tmpfs": {"/tmp": tmp},
                "ShmSize": recipe.tool.work_bytes,
                "IpcMode": "private",
                "PidsLimit": recipe.tool.processes + WORKER_PROCESSES,
                "Memory": recipe.memory_bytes,
                "MemorySwap": recipe.memory_bytes,
                "CpuPeriod": PERIOD_US,
                "CpuQuota": recipe.tool.limits.cpu_cores * PERIOD_US,
                "OomScoreAdj": 500,  # before the machine's own programs
                "Ulimits": [
                    {"Name": name, "Soft": value, "Hard": value} for name, value in most.items()
                ],
                "LogConfig": {"Type": "none"},  # a log would let others read the answers
                "RestartPolicy": {"Name": "no"},
                "Mounts": mounts,
            },
        }


async def _create(docker: aiodocker.Docker, settings: dict[str, Any], name: str) -> DockerContainer:
    """Create a container.

    The daemon does so even if this call is cancelled: then wait for it, and remove it.
    """
    creating = asyncio.ensure_future(docker.containers.create(settings, name=name))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with contextlib.suppress(aiodocker.DockerError, aiohttp.ClientError):
            await _remove(await creating)
        raise


async def _attach(container: DockerContainer) -> DockerPipe:
    stream = container.attach(stdin=True, stdout=True, stderr=True)
    await stream.__aenter__()
    return DockerPipe(stream)


async def _remove(container: DockerContainer) -> None:
    """Kill and remove a container; do nothing where it is gone (404), or its removal has begun
    (409)."""
    try:
        await container.delete(force=True, v=True)
    except aiodocker.DockerError as error:
        if error.status not in (404, 409):
            raise


@contextlib.contextmanager
def _failures(what: str, missing: type[Exception] = ContainerLost) -> Iterator[None]:
    """Raise the daemon's failures as HostFailed, or as `missing` where something is not there."""
    try:
        yield
    except aiodocker.DockerError as error:
        if error.status == 404:
            raise missing(f"{what}: {error.message}") from error
        raise HostFailed(f"{what}: {error.message}") from error
    except (aiohttp.ClientError, OSError, TimeoutError, ssl.SSLError) as error:
        raise HostFailed(
            f"{what} does not answer ({str(error) or type(error).__name__})"
        ) from error


class Images:
    """Images of one daemon, taken from the nearest place: the daemon itself, the mirror, the
    image's own registry.

    RollArt §8: a reset of an environment fails most often where an image is fetched, and takes
    longest there. Invariant: an image is fetched once at a time, however many containers wait for
    it.
    """

    def __init__(self, docker: aiodocker.Docker, mirror: str) -> None:
        self._docker = docker
        self._mirror = mirror
        self._fetching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def require(self, image: str) -> None:
        """Return once the daemon has the image.

        Raises aiodocker.DockerError where no registry gives it.
        """
        async with self._fetching[image]:
            try:
                await self._docker.images.inspect(image)
            except aiodocker.DockerError as error:
                if error.status != 404:
                    raise
                worth_it = retry_if_exception(
                    lambda error: (
                        isinstance(error, aiodocker.DockerError)
                        and error.status not in FINAL_STATUSES
                    )
                )
                retry = hosts.retry_after(
                    PULL_PAUSES_S, worth_it, "an image is fetched again", image=image
                )
                await retry(self._fetch, image)

    async def _fetch(self, image: str) -> None:
        if self._mirror:
            mirrored = f"{self._mirror}/{image}"
            try:
                await self._docker.images.pull(mirrored)
            except aiodocker.DockerError as error:
                log.warning(
                    "the mirror does not have an image", image=mirrored, error=error.message
                )
            else:
                repository, tag = split_image(image)
                await self._docker.images.tag(mirrored, repository, tag=tag)
                return
        await self._docker.images.pull(image)


def split_image(image: str) -> tuple[str, str]:
    """Split a reference into repository and tag."""
    repository, _, tag = image.rpartition(":")
    if not repository or "/" in tag:  # the colon was a registry's port, or there was none
        return image, "latest"
    return repository, tag
