"""Use one container as a sandbox: connect to its init, set its cores before each action, and remove
it at the end.

This module owns the connection. Invariants: the cores of an action are written before it is sent
(ARL-Tangram §5.2, allocate on execution); memory is set when a call or a session begins, and kept
until its end; a connection that breaks while the container runs is made again, and a request that
has an id is carried out once all the same.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog
from tenacity import retry_if_exception_type

from treadle_tools.sandbox.containers.hosts import (
    Allotment,
    ContainerLost,
    Ending,
    Host,
    HostFailed,
    Pipe,
    retry_after,
)
from treadle_tools.sandbox.inside import messages
from treadle_tools.sandbox.inside.container import HELLO
from treadle_tools.sandbox.sandboxes import Sandbox, SandboxLost
from treadle_tools.tool import BACKSTOP_S, WORKER_BYTES, Granted, Limits

log = structlog.get_logger()

STDERR_BYTES = 8192  # of what the worker wrote to stderr, the newest
ALLOT_TIMEOUT_S = 30.0  # 10 ms on an idle machine
RECONNECT_PAUSES_S = (0.1, 0.5, 2.0)  # a daemon that is being restarted is back within seconds
# A host may learn a little later than this process that a container has ended
ENDING_PAUSES_S = (0.05, 0.2, 0.5, 1.0)

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Disconnected(Exception):  # noqa: N818 - named for what happened
    """The connection has ended, or the other side sends something else than lines."""


class Connection:
    """Connection that exchanges messages with a container's init, one a line. `pump` must run
    beside its user.

    Invariant: `open` turns False as soon as the other end is gone.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._stdout = asyncio.StreamReader(limit=messages.MAX_FRAME_BYTES)
        self._stderr = b""
        self.open = True

    @property
    def stderr(self) -> str:
        """Return the last that the worker has written to standard error."""
        return self._stderr.decode(errors="replace").strip()

    async def pump(self) -> None:
        """Read what the init sends until the end."""
        try:
            while self.open and (piece := await self._pipe.read()) is not None:
                is_stderr, data = piece
                if is_stderr:
                    self._stderr = (self._stderr + data)[-STDERR_BYTES:]
                elif self.open:
                    self._stdout.feed_data(data)
        finally:
            await self.close()

    async def greet(self) -> dict[str, Any]:
        """Find the border of a message, ignore answers to an earlier service, return the hello.

        Raises Disconnected.
        """
        word = uuid.uuid4().hex
        await self._write(b"\n" + _encode({"op": HELLO, HELLO: word}))
        while True:
            with contextlib.suppress(messages.FrameError):
                message = messages.decode(await self._next())
                if message.get(HELLO) == word:
                    return message

    async def exchange(self, header: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        """Send a request with its body and return its answer. Raises Disconnected."""
        await self._write(_encode(header) + body + b"\n")
        try:
            said = messages.decode(await self._next())
            printed, answer = [await self._content(said, name) for name in ("printed", "answer")]
            return messages.read_answer(said, printed, answer)
        except messages.FrameError as error:
            raise Disconnected(str(error)) from error

    async def _content(self, header: Mapping[str, Any], name: str) -> bytes:
        try:
            return await self._stdout.readexactly(messages.size_of(header, name))
        except asyncio.IncompleteReadError:
            raise Disconnected("it has ended") from None

    async def close(self) -> None:
        """Disconnect. May be called again."""
        self.open = False
        self._stdout.feed_eof()
        await self._pipe.close()

    async def _write(self, data: bytes) -> None:
        if not self.open:
            raise Disconnected("it has ended")
        try:
            await self._pipe.write(data)
        except ConnectionError as error:
            raise Disconnected(str(error)) from error

    async def _next(self) -> bytes:
        try:
            line = await self._stdout.readline()
        except ValueError as error:  # longer than any message
            await self.close()
            raise Disconnected(str(error)) from error
        if not line.endswith(b"\n"):
            raise Disconnected("it has ended")
        return line


def _encode(message: Mapping[str, Any]) -> bytes:
    return messages.encode(message)[messages.HEADER.size :] + b"\n"


class ContainerSandbox(Sandbox):
    """`Sandbox` that is a container or a pod.

    spawn: starts a task that runs beside it. on_close: called once, to remove the container.
    """

    reusable = False  # its process 1 may be the image's own

    def __init__(
        self, host: Host, name: str, spawn: Spawn, on_close: Callable[["ContainerSandbox"], None]
    ) -> None:
        self.host = host
        self.name = name
        self._spawn = spawn
        self._on_close = on_close
        self._connection: Connection | None = None
        self._resident_bytes = 0
        self._oom_kills = self._oom_kills_before = 0
        self._cpu_used_s: float | None = None
        self._allotted: Allotment | None = None
        self._closed = False

    @property
    def alive(self) -> bool:
        """Return whether it can take a request.

        A container that was found again counts as alive until its first request.
        """
        return not self._closed and (self._connection is None or self._connection.open)

    @property
    def stderr(self) -> str:
        """Return the last that its worker has written to standard error."""
        return "" if self._connection is None else self._connection.stderr

    async def start(self, limits: Limits) -> None:
        """Wait until its worker answers, and give it `limits`.

        Raises Disconnected, ContainerLost, HostFailed.
        """
        await self._connect()
        await self._allot("call", limits)

    async def _exchange(
        self, header: dict[str, Any], body: bytes, limits: Limits, processes: int
    ) -> dict[str, Any]:
        """Send a request and return its answer. processes: unused, as the container was made with
        its limit."""
        self._oom_kills_before = self._oom_kills
        try:
            await self._prepare(header["op"], limits)
            async with asyncio.timeout(limits.wall_s + BACKSTOP_S):
                reply = await self._exchange_once(header, body)
        except ContainerLost as lost:
            raise SandboxLost(f"the container is gone ({lost})") from lost
        except HostFailed as failed:
            raise SandboxLost(f"the container cannot be reached: {failed}") from failed
        except messages.FrameError as error:
            raise SandboxLost(str(error)) from error
        except Disconnected:
            raise await self._explain_loss() from None
        before_s, self._cpu_used_s = self._cpu_used_s, reply.pop("cpu_used_s", None)
        if before_s is not None and self._cpu_used_s is not None:
            reply["cpu_s"] = self._cpu_used_s - before_s
        self._oom_kills = int(reply.pop("oom_kills", self._oom_kills))
        return reply

    def _was_killed_for_memory(self) -> bool:
        return self._oom_kills > self._oom_kills_before

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._connection is not None:
                self._connection.open = False  # its pump closes the pipe
            self._on_close(self)

    async def disconnect(self) -> None:
        """Close the connection and leave the container as it is."""
        if self._connection is not None:
            await self._connection.close()

    async def _prepare(self, op: str, limits: Limits) -> None:
        """Connect, and write what the action may use; try again where the host fails."""

        async def prepare() -> None:
            await self._connect()
            # As the hello has it, if this was a new connection
            self._oom_kills_before = self._oom_kills
            await self._allot(op, limits)

        failed = retry_if_exception_type(HostFailed)
        retry = retry_after(
            RECONNECT_PAUSES_S, failed, "a container's host is asked again", container=self.name
        )
        try:
            # One that was found may be in a step
            async with asyncio.timeout(ALLOT_TIMEOUT_S + limits.wall_s):
                await retry(prepare)
        except TimeoutError:
            raise HostFailed(f"no answer in {ALLOT_TIMEOUT_S + limits.wall_s:g} s") from None

    async def _connect(self) -> Connection:
        if self._connection is None or not self._connection.open:
            self._connection = connection = Connection(await self.host.attach(self.name))
            self._spawn(connection.pump())
            hello = await connection.greet()
            self._resident_bytes = int(hello["resident_bytes"])
            self._oom_kills, self._cpu_used_s = int(hello["oom_kills"]), hello["cpu_used_s"]
        return self._connection

    async def _allot(self, op: str, limits: Limits) -> None:
        if op == "recall":
            return
        memory_bytes = (
            None if op == "step" else self._resident_bytes + limits.memory_bytes + WORKER_BYTES
        )
        if memory_bytes is None and self._allotted is not None:
            memory_bytes = self._allotted.memory_bytes
        allotment = Allotment(
            limits.cpu_cores, limits.cores if isinstance(limits, Granted) else (), memory_bytes
        )
        if allotment != self._allotted:
            await self.host.allot(self.name, allotment)
            self._allotted = allotment

    async def _exchange_once(self, header: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        """Return the answer, also where the connection breaks on the way but the container runs
        on."""
        connection = await self._connect()
        for pause_s in RECONNECT_PAUSES_S:
            try:
                return await connection.exchange(header, body)
            except Disconnected:
                if not header["id"] or not (await self.host.ending(self.name)).runs:
                    raise
            log.warning("a container is connected to again", container=self.name)
            await asyncio.sleep(pause_s)
            connection = await self._connect()
            last = await connection.exchange({**header, "op": "recall", "body": 0}, b"")
            if last["id"] == header["id"]:
                return last
        return await connection.exchange(header, body)

    async def _explain_loss(self) -> SandboxLost:
        try:
            ending = await self.wait_ending()
        except HostFailed as failed:
            return SandboxLost(f"the container cannot be reached: {failed}")
        self._oom_kills += ending.out_of_memory
        if self.stderr and not ending.out_of_memory:
            log.error("a container's worker ended", container=self.name, stderr=self.stderr)
        return SandboxLost(f"the container ended without an answer ({ending})")

    async def wait_ending(self) -> Ending:
        """Return how the container ended, after its connection has. Raises HostFailed."""
        for pause_s in ENDING_PAUSES_S:
            ending = await self.host.ending(self.name)
            if not ending.runs:
                break
            await asyncio.sleep(pause_s)
        return ending
