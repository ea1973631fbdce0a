"""A fake host of containers: each "container" is a plain process of this machine that runs the real worker, unwalled.

What it shows is how the service deals with hosts, lines and sessions; what it cannot show is any wall.
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence

from treadle_tools.sandbox.containers.recipe import Allotment, Ending, HostFailed, Recipe, VesselLost

BOOT = """
import sys, json
config = json.loads(sys.argv[1])
sys.path += config["paths"]
from treadle_tools.sandbox.inside import cell
from treadle_tools.sandbox.inside import container
cell.close_doors = lambda: None
container.main(config)
"""


def started(argv: Sequence[str], paths: Sequence[str]) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """A worker as a recipe's command starts it, but here, and our end of its standard input and output."""
    config = {**json.loads(argv[-1]), "paths": paths}
    end, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", BOOT, json.dumps(config)],
            stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return process, end


class FakePipe:
    """Bytes to and from a process that others may be attached to later."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end.dup()
        self._end.setblocking(False)
        self._cut = asyncio.Event()

    async def write(self, piece: bytes) -> None:
        """See `vessel.Pipe`."""
        if self._cut.is_set():
            raise ConnectionError("it is cut")
        await asyncio.get_running_loop().sock_sendall(self._end, piece)

    async def read(self) -> bytes:
        """See `vessel.Pipe`."""
        reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._end, 65536))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((reading, cut), return_when=asyncio.FIRST_COMPLETED)
            return b"" if self._cut.is_set() else await reading
        except ConnectionError:
            return b""
        finally:
            reading.cancel()
            cut.cancel()
            await asyncio.wait((reading, cut))
            if self._cut.is_set():
                self._end.close()

    @property
    def complaints(self) -> str:
        """See `vessel.Pipe`."""
        return ""

    async def close(self) -> None:
        """See `vessel.Pipe`."""
        self._cut.set()
        self._end.close()

    def cut(self) -> None:
        """The line breaks, for whoever reads it."""
        self._cut.set()


class FakeVessel:
    """One process."""

    def __init__(self, host: "FakeHost", name: str, process: "subprocess.Popen[bytes]", end: socket.socket) -> None:
        self.name = name
        self.process = process
        self.allotted: list[Allotment] = []
        self.pipes: list[FakePipe] = []
        self._host = host
        self._end = end

    async def attach(self) -> FakePipe:
        """See `vessel.Vessel`."""
        if self.name not in self._host.vessels:
            raise VesselLost(self.name)
        self.pipes.append(FakePipe(self._end))
        return self.pipes[-1]

    async def allot(self, allotment: Allotment) -> None:
        """See `vessel.Vessel`."""
        self.allotted.append(allotment)

    async def ending(self) -> Ending:
        """See `vessel.Vessel`."""
        code = self.process.poll()
        return Ending(runs=code is None, exit_code=None if code is None else (code if code >= 0 else 128 - code))

    async def remove(self) -> None:
        """See `vessel.Vessel`."""
        if self._host.vessels.pop(self.name, None) is not None:
            self.process.kill()
            self.process.wait()
            self._end.close()


class FakeHost:
    """See the module. fails: how many of the next creations it refuses."""

    def __init__(self, name: str = "fake", fails: int = 0) -> None:
        self.name = name
        self.fails = fails
        self.asked = 0
        self.vessels: dict[str, FakeVessel] = {}

    async def check(self) -> str:
        """See `vessel.Host`."""
        return "fake 1"

    async def make(self, recipe: Recipe, name: str) -> FakeVessel:
        """See `vessel.Host`."""
        self.asked += 1
        if self.fails:
            self.fails -= 1
            raise HostFailed(f"{self.name} refuses")
        process, end = started(recipe.argv, sorted({str(path.parent) for path, _ in recipe.code}))
        self.vessels[name] = FakeVessel(self, name, process, end)
        return self.vessels[name]

    async def running(self) -> Sequence[FakeVessel]:
        """See `vessel.Host`."""
        return [vessel for vessel in self.vessels.values() if vessel.process.poll() is None]

    async def sweep(self, kept: Collection[str]) -> int:
        """See `vessel.Host`."""
        swept = [vessel for name, vessel in self.vessels.items() if name not in kept]
        for vessel in swept:
            await vessel.remove()
        return len(swept)

    async def close(self) -> None:
        """See `vessel.Host`."""
