"""One cell as the service sees it: a line of frames to its first process, its limits, a way to end it.

Owns: the line's socket. The cell itself is the keeper's (`sandbox/held.py`).
"""

import asyncio
import select
import socket
from collections.abc import Callable, Mapping
from typing import Any

from treadle_tools.limits import MIB, Granted, Limits
from treadle_tools.sandbox.bubblewrap import memory
from treadle_tools.sandbox.bubblewrap.cgroups import Slot
from treadle_tools.sandbox.inside import frames
from treadle_tools.tool import Status

BACKSTOP_S = 2.0  # the cell keeps its own wall clock; this is for a cell that does not
WORKER_BYTES = 64 * MIB  # pages of the preloaded modules that a fork copies by touching them, and the supervisor
WORKER_PROCESSES = 4  # process 1, the environment, and one being born


class CellLost(Exception):  # noqa: N818 - the sandbox's news, not a fault
    """The cell died, broke the protocol or would not answer. out_of_memory, timed_out: why, where known."""

    def __init__(self, message: str, *, out_of_memory: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory
        self.timed_out = timed_out


class WorkerFailed(Exception):  # noqa: N818 - named for what happened
    """A tool's worker did not start or could not make a cell; the message says why."""


class Cell:
    """See the module. name: the keeper's own for it. pid: of its first process. end: kills it, without waiting."""

    reusable = True

    def __init__(self, name: str, line: socket.socket, pid: int, slot: Slot | None, end: Callable[[], None]) -> None:
        line.setblocking(False)
        self.name = name
        self._line = line
        self._pid = pid
        self._slot = slot
        self._end = end
        self._outgrown = 0

    @property
    def alive(self) -> bool:
        """Whether it can be asked: a cell never speaks unasked, so anything to be read here is its end."""
        if self._line.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
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
        """The worker's answer to one request. Raises CellLost; the cell must be ended then.

        op: `call`, `open`, `step`; `recall` (the last answer again; {"id": ""} where there was none); `snapshot` (write
        the environment to `file`) or `restore` (open it from there). A step keeps the memory of the session's opening;
        its own, lower limit holds for each process that the step starts. The cell keeps its last answer with
        `request_id`, for a service that comes after this one. Cores that were granted are let go with the answer.
        """
        if op == "recall" or self._slot is None:
            reply = await self._asked(op, arguments, limits, request_id, file, again)
            reply.pop("cpu_s", None)  # nobody counts them, whatever the cell may say
            return reply
        self._limit(self._slot, op, limits, processes)
        used_s = self._slot.cpu_s()
        try:
            reply = await self._asked(op, arguments, limits, request_id, file, again)
        finally:
            self._slot.unpin()
        now_s = self._slot.cpu_s()
        return reply | {"cpu_s": None if used_s is None or now_s is None else now_s - used_s}

    async def _asked(
        self, op: str, arguments: Any, limits: Limits, request_id: str, file: int | None, again: bool
    ) -> dict[str, Any]:
        kills = self._oom_kills()
        allowed = {
            "memory_bytes": limits.memory_bytes,
            "wall_s": limits.wall_s,
            "output_bytes": limits.output_bytes,
            "cpu_cores": limits.cpu_cores,
        }
        request = {"op": op, "id": request_id, "arguments": arguments, "limits": allowed, "again": again}
        try:
            async with asyncio.timeout(limits.wall_s + BACKSTOP_S):
                reply = await self._converse(request, limits, file)
        except TimeoutError:
            raise CellLost(f"stopped after {limits.wall_s:g} s", timed_out=True) from None
        except CellLost as lost:
            if self._oom_kills() > kills:
                raise CellLost(_outgrown(limits), out_of_memory=True) from lost
            raise
        if reply.get("status") == Status.CRASHED and self._oom_kills() > kills:
            reply |= {"status": Status.OUT_OF_MEMORY, "error": _outgrown(limits)}
        return reply

    @staticmethod
    def _limit(slot: Slot, op: str, limits: Limits, processes: int) -> None:
        """What the whole cell may use from now on, written before each action."""
        memory_bytes = None if op in ("step", "snapshot") else limits.memory_bytes + WORKER_BYTES
        try:
            slot.limit(
                memory_bytes=memory_bytes,
                cpu_cores=limits.cpu_cores,
                processes=processes + WORKER_PROCESSES,
                cores=limits.cores if isinstance(limits, Granted) else (),
            )
        except FileNotFoundError as error:
            raise CellLost("the worker's control group is gone, and so is the worker") from error

    def _oom_kills(self) -> int:
        """Kills for memory up to now: the kernel's in the slot, or our own."""
        if self._slot is None:
            return self._outgrown
        try:
            return self._slot.oom_kills()
        except FileNotFoundError:  # removed after the cell's end
            return 0

    async def _converse(self, request: Mapping[str, Any], limits: Limits, file: int | None) -> dict[str, Any]:
        if self._slot is not None:
            return await self._exchange(request, file)
        reply: dict[str, Any] | CellLost
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._kill_when_outgrown(limits.memory_bytes))
            try:
                reply = await self._exchange(request, file)
            except CellLost as lost:
                reply = lost
            finally:
                watch.cancel()
        if isinstance(reply, CellLost):
            raise reply
        return reply

    async def _kill_when_outgrown(self, memory_bytes: int) -> None:
        await memory.outgrows(self._pid, memory_bytes)
        self._outgrown += 1
        self._end()

    async def _exchange(self, request: Mapping[str, Any], file: int | None) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            data = frames.encode(request)
            if file is not None:  # an idle cell's socket is empty: a part of it is taken at once
                data = data[socket.send_fds(self._line, [data], [file]) :]
            await loop.sock_sendall(self._line, data)
            length = frames.length_of(await self._exactly(frames.HEADER.size))
            return frames.decode(await self._exactly(length))
        except (OSError, frames.FrameError) as error:
            raise CellLost(f"the worker ended without an answer ({error})") from error

    async def _exactly(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < count:
            piece = await loop.sock_recv(self._line, min(count - len(parts), 1024 * 1024))
            if not piece:
                raise CellLost("the worker ended without an answer")
            parts += piece
        return bytes(parts)

    def close(self) -> None:
        """Hang up and have every process of the cell killed. Safe to call again."""
        if self._line.fileno() >= 0:
            self.hang_up()
            self._end()

    def hang_up(self) -> None:
        """Leave the cell to its keeper. Nobody may be asking it."""
        self._line.close()


def _outgrown(limits: Limits) -> str:
    return f"stopped above {limits.memory_bytes} bytes of memory"
