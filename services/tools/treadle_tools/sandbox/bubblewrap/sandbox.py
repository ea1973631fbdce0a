"""One bubblewrap sandbox as the service sees it: a connection to its init, its limits, a way to end it.

Owns: the connection. The process tree itself belongs to the daemon (`fork_server.py`). Where there are no control
groups, memory is summed over the process tree ten times a second: a tree can exceed its limit for one interval, and
RLIMIT_AS and the limit on processes bound by how much.
"""

import asyncio
import resource
import select
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treadle_tools.limits import BACKSTOP_S, WORKER_BYTES, WORKER_PROCESSES, Granted, Limits
from treadle_tools.sandbox.bubblewrap.cgroups import Slot
from treadle_tools.sandbox.inside import frames
from treadle_tools.sandbox.sandboxes import SandboxLost
from treadle_tools.tool import Status

PIECE_BYTES = 1024 * 1024
MEMORY_INTERVAL_S = 0.1  # a look costs about 0.1 ms of CPU for a handful of processes
PAGE_BYTES = resource.getpagesize()


class BubblewrapSandbox:
    """A `Sandbox`. name: given by the daemon. pid: of its init. end: has it killed, without waiting."""

    reusable = True

    def __init__(
        self, name: str, connection: socket.socket, pid: int, slot: Slot | None, end: Callable[[], None]
    ) -> None:
        connection.setblocking(False)
        self.name = name
        self._connection = connection
        self._pid = pid
        self._slot = slot
        self._end = end
        self._memory_kills = 0  # by this service

    @property
    def alive(self) -> bool:
        """Whether it can take a request. It sends nothing unasked, so anything to read here is its end."""
        if self._connection.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return not poll.poll(0)

    async def ask(
        self,
        op: str,
        arguments: Any,
        limits: Limits,
        processes: int,
        *,
        request_id: str = "",
        file: int | None = None,
        again: bool = False,
    ) -> dict[str, Any]:
        request = {"op": op, "id": request_id, "arguments": arguments, "limits": limits.message(), "again": again}
        if op == "recall" or self._slot is None:
            reply = await self._ask(request, limits, file)
            reply.pop("cpu_s", None)  # not counted, whatever the sandbox may say
            return reply
        try:
            self._slot.limit(
                memory_bytes=None if op in ("step", "snapshot") else limits.memory_bytes + WORKER_BYTES,
                cpu_cores=limits.cpu_cores,
                processes=processes + WORKER_PROCESSES,
                cores=limits.cores if isinstance(limits, Granted) else (),
            )
        except FileNotFoundError as error:
            raise SandboxLost("the worker's control group is gone, and so is the worker") from error
        used_s = self._slot.cpu_s()
        try:
            reply = await self._ask(request, limits, file)
        finally:
            self._slot.unpin()
        now_s = self._slot.cpu_s()
        return reply | {"cpu_s": None if used_s is None or now_s is None else now_s - used_s}

    async def _ask(self, request: Mapping[str, Any], limits: Limits, file: int | None) -> dict[str, Any]:
        kills = self._count_memory_kills()
        try:
            async with asyncio.timeout(limits.wall_s + BACKSTOP_S):
                reply = await self._exchange_watched(request, limits, file)
        except TimeoutError:
            raise SandboxLost.after_wall_clock(limits) from None
        except SandboxLost as lost:
            if self._count_memory_kills() > kills:
                raise SandboxLost.above_memory(limits) from lost
            raise
        if reply.get("status") == Status.CRASHED and self._count_memory_kills() > kills:
            reply |= {"status": Status.OUT_OF_MEMORY, "error": str(SandboxLost.above_memory(limits))}
        return reply

    def _count_memory_kills(self) -> int:
        """Kills for memory up to now: by the kernel in the slot, or by this service."""
        if self._slot is None:
            return self._memory_kills
        try:
            return self._slot.oom_kills()
        except FileNotFoundError:  # removed after the sandbox's end
            return 0

    async def _exchange_watched(self, request: Mapping[str, Any], limits: Limits, file: int | None) -> dict[str, Any]:
        """Exchange messages, and kill the sandbox above its memory limit where no control group does."""
        if self._slot is not None:
            return await self._exchange(request, file)
        reply: dict[str, Any] | SandboxLost
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._kill_above(limits.memory_bytes))
            try:
                reply = await self._exchange(request, file)
            except SandboxLost as lost:
                reply = lost
            finally:
                watch.cancel()
        if isinstance(reply, SandboxLost):
            raise reply
        return reply

    async def _kill_above(self, memory_bytes: int) -> None:
        await wait_for_growth(self._pid, memory_bytes)
        self._memory_kills += 1
        self._end()

    async def _exchange(self, request: Mapping[str, Any], file: int | None) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            data = frames.encode(request)
            if file is not None:  # an idle sandbox's socket is empty: it takes a part of the frame at once
                data = data[socket.send_fds(self._connection, [data], [file]) :]
            await loop.sock_sendall(self._connection, data)
            length = frames.read_length(await self._receive(frames.HEADER.size))
            return frames.decode(await self._receive(length))
        except (OSError, frames.FrameError) as error:
            raise SandboxLost(f"the worker ended without an answer ({error})") from error

    async def _receive(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < count:
            piece = await loop.sock_recv(self._connection, min(count - len(parts), PIECE_BYTES))
            if not piece:
                raise SandboxLost("the worker ended without an answer")
            parts += piece
        return bytes(parts)

    def close(self) -> None:
        if self._connection.fileno() >= 0:
            self.disconnect()
            self._end()

    def disconnect(self) -> None:
        """Leave the sandbox to the daemon. No request may be under way."""
        self._connection.close()


def read_private_bytes(pid: int, inherited_bytes: int = 0, proc: Path = Path("/proc")) -> int:
    """Resident bytes of `pid` and its descendants that no file backs; 0 once it has ended.

    inherited_bytes: what each of them shares with the worker it was forked from, not counted again for each.
    """
    total, waiting = 0, [pid]
    while waiting:
        process = proc / str(waiting.pop())
        try:
            total += max(0, _read_own_bytes(process) - inherited_bytes)
            for thread in (process / "task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _read_own_bytes(process: Path) -> int:
    try:
        resident, shared = (process / "statm").read_text().split()[1:3]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return max(0, int(resident) - int(shared)) * PAGE_BYTES


async def wait_for_growth(pid: int, more_bytes: int) -> None:
    """Return once the process tree of `pid` holds `more_bytes` more than now."""
    inherited = _read_own_bytes(Path("/proc") / str(pid))
    most = read_private_bytes(pid, inherited) + more_bytes
    while True:
        if read_private_bytes(pid, inherited) > most:
            return
        await asyncio.sleep(MEMORY_INTERVAL_S)
