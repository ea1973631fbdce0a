"""A fake host of containers: each "container" is a plain process of this machine that runs the real
worker, unisolated.

It shows how the service deals with hosts, connections and sessions; it cannot show that anything is
isolated.
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle_tools.sandbox.containers.hosts import (
    Allotment,
    ContainerLost,
    Ending,
    HostFailed,
    Recipe,
)

BOOT = """
import sys, json
config = json.loads(sys.argv[1])
sys.path += config["paths"]
from treadle_tools.sandbox.inside import container, isolation
isolation.drop_privileges = lambda: None
container.main(config)
"""


def start_worker(
    argv: Sequence[str], paths: Sequence[str]
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a worker as a recipe's command does, but here; and our end of its standard input and
    output."""
    config = {**json.loads(argv[-1]), "paths": paths}
    end, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", BOOT, json.dumps(config)],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
        )
    return process, end


class FakePipe:
    """A `Pipe` to a process that others may attach to later."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end.dup()
        self._end.setblocking(False)
        self._cut = asyncio.Event()

    async def write(self, data: bytes) -> None:
        if self._cut.is_set():
            raise ConnectionError("it is cut")
        await asyncio.get_running_loop().sock_sendall(self._end, data)

    async def read(self) -> tuple[bool, bytes] | None:
        reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._end, 65536))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((reading, cut), return_when=asyncio.FIRST_COMPLETED)
            data = b"" if self._cut.is_set() else await reading
            return (False, data) if data else None
        except ConnectionError:
            return None
        finally:
            reading.cancel()
            cut.cancel()
            await asyncio.wait((reading, cut))
            if self._cut.is_set():
                self._end.close()

    async def close(self) -> None:
        self._cut.set()
        self._end.close()

    def cut(self) -> None:
        """Break the connection, for whoever reads it."""
        self._cut.set()


@dataclass
class FakeContainer:
    """One process, and what was asked of it."""

    process: "subprocess.Popen[bytes]"
    end: socket.socket
    allotted: list[Allotment] = field(default_factory=list)
    pipes: list[FakePipe] = field(default_factory=list)


class FakeHost:
    """A `Host`. fails: how many of the next creations it refuses."""

    def __init__(self, name: str = "fake", fails: int = 0) -> None:
        self.name = name
        self.fails = fails
        self.asked = 0
        self.containers: dict[str, FakeContainer] = {}

    async def check(self) -> str:
        return "fake 1"

    async def make(self, recipe: Recipe, name: str) -> None:
        self.asked += 1
        if self.fails:
            self.fails -= 1
            raise HostFailed(f"{self.name} refuses")
        worker = start_worker(recipe.argv, sorted({str(path.parent) for path, _ in recipe.code}))
        self.containers[name] = FakeContainer(*worker)

    async def attach(self, name: str) -> FakePipe:
        if name not in self.containers:
            raise ContainerLost(name)
        pipe = FakePipe(self.containers[name].end)
        self.containers[name].pipes.append(pipe)
        return pipe

    async def allot(self, name: str, allotment: Allotment) -> None:
        self.containers[name].allotted.append(allotment)

    async def ending(self, name: str) -> Ending:
        code = self.containers[name].process.poll()
        return Ending(
            runs=code is None,
            exit_code=None if code is None else (code if code >= 0 else 128 - code),
        )

    async def remove(self, name: str) -> None:
        if (container := self.containers.pop(name, None)) is not None:
            container.process.kill()
            container.process.wait()
            container.end.close()

    async def list_names(self, *, running: bool = False) -> Sequence[str]:
        return [
            name
            for name, each in self.containers.items()
            if not running or each.process.poll() is None
        ]

    async def close(self) -> None:
        pass
