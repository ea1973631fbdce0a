"""One cell as the service sees it: a link of frames to its first process, a handle to kill it, its limits.

Owns: the link's socket, the pidfd. Invariant: after `kill` returns, no process of the cell runs.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping
from typing import Any

from treadle_tools.inside import frames
from treadle_tools.sandbox import memory
from treadle_tools.sandbox.cgroups import Slot
from treadle_tools.sandbox.ready import readable
from treadle_tools.tool import MIB, Granted, Limits, Status

BACKSTOP_S = 2.0  # the cell keeps its own wall clock; this is for a cell that does not
KILL_DEADLINE_S = 10.0  # a killed process that is still there then is stuck in the kernel
WORKER_BYTES = 64 * MIB  # pages of the preloaded modules that a fork copies by touching them, and the supervisor
WORKER_PROCESSES = 4  # process 1, the environment, and one being born


class CellLost(Exception):  # noqa: N818 - the sandbox's news, not a fault
    """The cell died, broke the protocol or would not answer. out_of_memory, timed_out: why, where known."""

    def __init__(self, message: str, *, out_of_memory: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory
        self.timed_out = timed_out


class Cell:
    """See the module. Made by `Door.cell`."""

    def __init__(self, link: socket.socket, pid: int, slot: Slot | None) -> None:
        self._link = link
        self._pid = pid
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise CellLost("the worker ended before it was ready") from error
        self._slot = slot
        self._killed = False
        self._outgrown = 0

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return not self._killed and not poll.poll(0)

    async def ask(self, op: str, arguments: Any, limits: Granted, processes: int) -> dict[str, Any]:
        """The worker's answer to one request. Raises CellLost; the cell must be killed then.

        op: `call`, `open` or `step`. A step keeps the memory of the session's opening; its own, lower limit holds for
        each process that the step starts. The granted cores are let go with the answer.
        """
        if self._slot is None:
            return await self._asked(op, arguments, limits) | {"cpu_s": None}
        memory_bytes = None if op == "step" else limits.memory_bytes + WORKER_BYTES
        self._slot.limit(
            memory_bytes=memory_bytes,
            cpu_cores=limits.cpu_cores,
            processes=processes + WORKER_PROCESSES,
            cores=limits.cores,
        )
        used_s = self._slot.cpu_s()
        try:
            reply = await self._asked(op, arguments, limits)
        finally:
            self._slot.unpin()
        now_s = self._slot.cpu_s()
        return reply | {"cpu_s": None if used_s is None or now_s is None else now_s - used_s}

    async def _asked(self, op: str, arguments: Any, limits: Granted) -> dict[str, Any]:
        kills = self._oom_kills()
        allowed = {
            "memory_bytes": limits.memory_bytes,
            "wall_s": limits.wall_s,
            "output_bytes": limits.output_bytes,
            "cpu_cores": limits.cpu_cores,
        }
        try:
            async with asyncio.timeout(limits.wall_s + BACKSTOP_S):
                reply = await self._converse({"op": op, "arguments": arguments, "limits": allowed}, limits)
        except TimeoutError:
            raise CellLost(f"stopped after {limits.wall_s:g} s", timed_out=True) from None
        except CellLost as lost:
            if self._oom_kills() > kills:
                raise CellLost(_outgrown(limits), out_of_memory=True) from lost
            raise
        if reply["status"] == Status.CRASHED and self._oom_kills() > kills:
            reply |= {"status": Status.OUT_OF_MEMORY, "error": _outgrown(limits)}
        return reply

    def _oom_kills(self) -> int:
        """Kills for memory up to now: the kernel's in the slot, or our own."""
        return self._slot.oom_kills() if self._slot is not None else self._outgrown

    async def _converse(self, request: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
        if self._slot is not None:
            return await self._exchange(request)
        reply: dict[str, Any] | CellLost
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._kill_when_outgrown(limits.memory_bytes))
            try:
                reply = await self._exchange(request)
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
        self._signal()

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._link, frames.encode(request))
            length = frames.length_of(await self._exactly(frames.HEADER.size))
            return frames.decode(await self._exactly(length))
        except (OSError, frames.FrameError) as error:
            raise CellLost(f"the worker ended without an answer ({error})") from error

    async def _exactly(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < count:
            piece = await loop.sock_recv(self._link, min(count - len(parts), 1024 * 1024))
            if not piece:
                raise CellLost("the worker ended without an answer")
            parts += piece
        return bytes(parts)

    async def kill(self) -> None:
        """Kill every process of the cell and wait for their end. Safe to call again."""
        if self._killed:
            return
        self._killed = True
        self._signal()
        try:
            async with asyncio.timeout(KILL_DEADLINE_S):
                await readable(self._handle)
        finally:
            self._link.close()
            os.close(self._handle)

    def _signal(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _outgrown(limits: Limits) -> str:
    return f"stopped above {limits.memory_bytes} bytes of memory"
