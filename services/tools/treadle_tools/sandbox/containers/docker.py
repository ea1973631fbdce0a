"""Containers of a Docker daemon.

Owns: the connection to the daemon. Invariants: a container has no network unless its recipe names one, no capability,
no way to more privileges, a read-only root, a /tmp of a limited size, and limits on memory, processes and cores; it is
labelled with its owner, who finds it again.

The line to process 1 of a container, over its attached input and outputs."""

import asyncio
import contextlib
import ssl
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.stream import Stream

from treadle_tools.sandbox.containers.hosts import Images
from treadle_tools.sandbox.containers.recipe import (
    MOST_DESCRIPTORS,
    MOST_FILES,
    USER,
    Allotment,
    Ending,
    HostFailed,
    Pipe,
    Recipe,
    VesselLost,
)

COMPLAINTS_BYTES = 8192  # of what it wrote to stderr, the newest
STDERR = 2


class DockerPipe:
    """Bytes to and from process 1, attached."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._complaints = b""

    async def write(self, piece: bytes) -> None:
        """See `vessel.Pipe`."""
        try:
            await self._stream.write_in(piece)
        # The library asserts that there is a connection.
        except (aiohttp.ClientError, OSError, AssertionError, RuntimeError) as error:
            raise ConnectionError(str(error) or "the connection is gone") from error

    async def read(self) -> bytes:
        """See `vessel.Pipe`."""
        try:
            while (message := await self._stream.read_out()) is not None:
                if message.stream != STDERR:
                    return message.data
                self._complaints = (self._complaints + message.data)[-COMPLAINTS_BYTES:]
        except (aiohttp.ClientError, OSError, aiodocker.DockerError):
            pass
        return b""

    @property
    def complaints(self) -> str:
        """See `vessel.Pipe`."""
        return self._complaints.decode(errors="replace").strip()

    async def close(self) -> None:
        """See `vessel.Pipe`."""
        with contextlib.suppress(AssertionError):  # the library's, where the other end has gone first
            await self._stream.close()


OWNER = "treadle.tools.owner"
TOOL = "treadle.tools.tool"
PERIOD_US = 100_000
CALL_TIMEOUT_S = 60.0  # of one question to the daemon; a container is made in half a second on an idle machine
UNIX = "unix://"


class DockerVessel:
    """One container. pipe: the one that was laid before it was started, so that nothing it says is missed."""

    def __init__(self, host: "DockerHost", container: DockerContainer, name: str, pipe: Pipe | None = None) -> None:
        self.name = name
        self._host = host
        self._container = container
        self._pipe = pipe

    async def attach(self) -> Pipe:
        """See `vessel.Vessel`."""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            with _failures(f"container {self.name}"):
                pipe = await attached(self._container)
        return pipe

    async def allot(self, allotment: Allotment) -> None:
        """See `vessel.Vessel`: what `docker update` does."""
        with _failures(f"container {self.name}"):
            await self._host.update(self._container, allotment)

    async def ending(self) -> Ending:
        """See `vessel.Vessel`."""
        try:
            with _failures(f"container {self.name}"):
                state = (await self._container.show())["State"]
        except VesselLost:
            return Ending()
        return Ending(
            runs=bool(state["Running"]), exit_code=int(state["ExitCode"]), out_of_memory=bool(state["OOMKilled"])
        )

    async def remove(self) -> None:
        """See `vessel.Vessel`."""
        if self._pipe is not None:
            await self._pipe.close()
        with contextlib.suppress(VesselLost), _failures(f"container {self.name}"):
            await removed(self._container)


class DockerHost:
    """See the module. tls: a folder with ca.pem, cert.pem and key.pem, for a daemon that is not on this machine."""

    def __init__(self, url: str, *, owner: str, mirror: str = "", tls: str = "") -> None:
        self.name = url
        self._owner = owner
        self._mirror = mirror
        self._tls = tls
        self._docker: aiodocker.Docker | None = None
        self._images: Images | None = None
        self._all_cores = ""

    async def check(self) -> str:
        """See `vessel.Host`."""
        with _failures(self.name):
            docker = await self._connected()
            about = await docker.system.info()
        self._all_cores = f"0-{int(about['NCPU']) - 1}"
        return f"docker {about['ServerVersion']}"

    async def make(self, recipe: Recipe, name: str) -> DockerVessel:
        """See `vessel.Host`."""
        try:
            if not self._all_cores:  # it did not answer when the service started
                await self.check()
            with _failures(self.name):
                docker = await self._connected()
                assert self._images is not None
                await self._images.require(recipe.image)
                container = await created(docker, self._config(recipe), name)
                try:
                    pipe = await attached(container)
                    try:
                        await container.start()
                    except BaseException:
                        await pipe.close()
                        raise
                except BaseException:
                    await removed(container)
                    raise
        except VesselLost as missing:
            raise HostFailed(str(missing)) from missing
        return DockerVessel(self, container, name, pipe)

    async def running(self) -> Sequence[DockerVessel]:
        """See `vessel.Host`."""
        with _failures(self.name):
            return [DockerVessel(self, one, name_of(one)) for one in await self._ours(status=["running"])]

    async def sweep(self, kept: Collection[str]) -> int:
        """See `vessel.Host`."""
        swept = [one for one in await self._ours() if name_of(one) not in kept]
        for one in swept:
            with contextlib.suppress(VesselLost), _failures(self.name):
                await removed(one)
        return len(swept)

    async def close(self) -> None:
        """See `vessel.Host`."""
        if self._docker is not None:
            docker, self._docker = self._docker, None
            await docker.close()
            await docker.connector.close()

    async def update(self, container: DockerContainer, allotment: Allotment) -> None:
        """Write limits of a container that runs. Cores by number are this machine's, and mean nothing on another."""
        docker = await self._connected()
        limits: dict[str, Any] = {"CpuPeriod": PERIOD_US, "CpuQuota": allotment.cpu_cores * PERIOD_US}
        if self.name.startswith(UNIX):
            limits["CpusetCpus"] = ",".join(map(str, allotment.cores)) or self._all_cores
        if allotment.memory_bytes is not None:
            limits |= {"Memory": allotment.memory_bytes, "MemorySwap": allotment.memory_bytes}
        # The library has no word of its own for it.
        await docker._query_json(f"containers/{container.id}/update", method="POST", data=limits)

    async def _ours(self, **filters: list[str]) -> list[DockerContainer]:
        with _failures(self.name):
            docker = await self._connected()
            asked = {"label": [f"{OWNER}={self._owner}"], **filters}
            return await docker.containers.list(all=True, filters=asked)

    async def _connected(self) -> aiodocker.Docker:
        if self._docker is None:
            # A connection for each container that is attached: the library's own connector stops at a hundred.
            connector: aiohttp.BaseConnector
            if self.name.startswith(UNIX):
                connector = aiohttp.UnixConnector(self.name.removeprefix(UNIX), limit=0)
            else:
                connector = aiohttp.TCPConnector(limit=0, ssl=self._context())
            url = self.name.replace("tcp://", "https://" if self._tls else "http://")
            self._docker = aiodocker.Docker(
                url if not url.startswith(UNIX) else f"{UNIX}localhost",
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
            )
            self._images = Images(self._docker, self._mirror)
        return self._docker

    def _context(self) -> ssl.SSLContext | bool:
        if not self._tls:
            return True
        folder = Path(self._tls)
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
        return context

    def _config(self, recipe: Recipe) -> dict[str, Any]:
        mounts = [
            {"Type": "bind", "Source": str(path), "Target": place, "ReadOnly": True} for path, place in recipe.code
        ]
        limit = recipe.memory_bytes
        return {
            "Image": recipe.image,
            "Entrypoint": [recipe.argv[0]],
            "Cmd": list(recipe.argv[1:]),
            "Env": [f"{name}={value}" for name, value in recipe.variables.items()],
            "User": f"{USER}:{USER}",
            "WorkingDir": "/tmp",
            "Hostname": "sandbox",
            "Labels": {OWNER: self._owner, TOOL: recipe.tool},
            "AttachStdin": True,
            "OpenStdin": True,
            "StdinOnce": False,  # the input stays open for the service's next life
            "Tty": False,
            "HostConfig": {
                "NetworkMode": recipe.network or "none",
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "ReadonlyRootfs": True,
                "Tmpfs": {
                    "/tmp": f"rw,exec,nosuid,nodev,size={recipe.work_bytes},nr_inodes={MOST_FILES},mode=1777",
                },
                "ShmSize": recipe.work_bytes,
                "IpcMode": "private",
                "PidsLimit": recipe.processes,
                "Memory": limit,
                "MemorySwap": limit,
                "CpuPeriod": PERIOD_US,
                "CpuQuota": recipe.cpu_cores * PERIOD_US,
                "OomScoreAdj": 500,  # before the machine's own programs
                "Ulimits": [
                    {"Name": "nofile", "Soft": MOST_DESCRIPTORS, "Hard": MOST_DESCRIPTORS},
                    {"Name": "core", "Soft": 0, "Hard": 0},
                    {"Name": "fsize", "Soft": recipe.work_bytes, "Hard": recipe.work_bytes},
                ],
                "LogConfig": {"Type": "none"},  # answers are nobody else's to read
                "RestartPolicy": {"Name": "no"},
                "Mounts": mounts,
            },
        }


async def created(docker: aiodocker.Docker, settings: dict[str, Any], name: str) -> DockerContainer:
    """A container. The daemon makes it although its caller is cancelled: then it is waited for, and removed."""
    creating = asyncio.ensure_future(docker.containers.create(settings, name=name))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with contextlib.suppress(aiodocker.DockerError, aiohttp.ClientError):
            await removed(await creating)
        raise


async def attached(container: DockerContainer) -> DockerPipe:
    """A pipe to the container's process 1."""
    stream = container.attach(stdin=True, stdout=True, stderr=True)
    await stream.__aenter__()
    return DockerPipe(stream)


async def removed(container: DockerContainer) -> None:
    """Kill and remove; one whose removal has begun already is as good as gone."""
    try:
        await container.delete(force=True, v=True)
    except aiodocker.DockerError as error:
        if error.status not in (404, 409):
            raise


def name_of(container: DockerContainer) -> str:
    """Of a container that was listed."""
    return str(container["Names"][0]).removeprefix("/")


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    """The daemon's failures in our own words."""
    try:
        yield
    except aiodocker.DockerError as error:
        if error.status == 404:
            raise VesselLost(f"{what}: {error.message}") from error
        raise HostFailed(f"{what}: {error.message}") from error
    except (aiohttp.ClientError, OSError, TimeoutError, ssl.SSLError) as error:
        raise HostFailed(f"{what} does not answer ({str(error) or type(error).__name__})") from error
