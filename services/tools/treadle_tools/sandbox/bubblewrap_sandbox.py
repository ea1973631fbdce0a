"""One bubblewrap sandbox as the service sees it: a connection to its init, its limits, a way to end it.

Owns: the connection. The process tree itself belongs to the daemon (`fork_server.py`).
"""

import asyncio
import select
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from treadle_runtime.bus import run_beside

from treadle_tools.sandbox.cgroups import Slot
from treadle_tools.sandbox.inside import answers, frames
from treadle_tools.sandbox.processes import wait_for_growth
from treadle_tools.sandbox.sandboxes import Sandbox, SandboxLost
from treadle_tools.tool import BACKSTOP_S, WORKER_BYTES, WORKER_PROCESSES, Granted, Limits

PIECE_BYTES = 1024 * 1024


class BubblewrapSandbox(Sandbox):
    """name: given by the daemon. pid: of its init. end: has it killed, without waiting."""

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
        self._kills_before = 0  # the last request

    @property
    def alive(self) -> bool:
        """Whether it can take a request. It sends nothing unasked, so anything to read here is its end."""
        if self._connection.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return not poll.poll(0)

    async def _exchange(self, header: dict[str, Any], body: bytes, limits: Limits, processes: int) -> dict[str, Any]:
        self._kills_before = self._count_memory_kills()
        slot = None if header["op"] == "recall" else self._slot
        used_s = None if slot is None else self._limit(slot, header["op"], limits, processes)
        try:
            async with asyncio.timeout(limits.wall_s + BACKSTOP_S):
                # Without a control group this kills the sandbox above its memory limit.
                watches = [] if self._slot is not None else [partial(self._kill_above, limits.memory_bytes)]
                async with run_beside(watches):
                    reply = await self._exchange_messages(header, body)
        finally:
            if slot is not None:
                slot.unpin()
        if slot is not None and used_s is not None and (now_s := slot.cpu_s()) is not None:
            reply["cpu_s"] = now_s - used_s
        return reply

    def _limit(self, slot: Slot, op: str, limits: Limits, processes: int) -> float | None:
        """Limit the slot for an action; the CPU seconds that it has used before."""
        try:
            slot.limit(
                memory_bytes=None if op == "step" else limits.memory_bytes + WORKER_BYTES,
                cpu_cores=limits.cpu_cores,
                processes=processes + WORKER_PROCESSES,
                cores=limits.cores if isinstance(limits, Granted) else (),
            )
        except FileNotFoundError as error:
            raise SandboxLost("the worker's control group is gone, and so is the worker") from error
        return slot.cpu_s()

    def _was_killed_for_memory(self) -> bool:
        return self._count_memory_kills() > self._kills_before

    def _count_memory_kills(self) -> int:
        """Kills for memory up to now: by the kernel in the slot, or by this service."""
        if self._slot is None:
            return self._memory_kills
        try:
            return self._slot.oom_kills()
        except FileNotFoundError:  # removed after the sandbox's end
            return 0

    async def _kill_above(self, memory_bytes: int) -> None:
        await wait_for_growth(self._pid, memory_bytes)
        self._memory_kills += 1
        self._end()

    async def _exchange_messages(self, header: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        try:
            data = frames.encode(header) + body
            await asyncio.get_running_loop().sock_sendall(self._connection, data)
            received = bytearray()
            length = frames.read_length(await self._take(received, frames.HEADER.size))
            said = frames.decode(await self._take(received, length))
            printed = await self._take(received, answers.size_of(said, "printed"))
            return answers.read(said, printed, await self._take(received, answers.size_of(said, "answer")))
        except (OSError, frames.FrameError) as error:
            raise SandboxLost(f"the worker ended without an answer ({error})") from error

    async def _take(self, received: bytearray, count: int) -> bytes:
        """The next bytes of the answer. received: what has come of it, and was not taken."""
        while len(received) < count:
            piece = await asyncio.get_running_loop().sock_recv(self._connection, PIECE_BYTES)
            if not piece:
                raise SandboxLost("the worker ended without an answer")
            received += piece
        taken = bytes(received[:count])
        del received[:count]
        return taken

    def close(self) -> None:
        if self._connection.fileno() >= 0:
            self.disconnect()
            self._end()

    def disconnect(self) -> None:
        """Leave the sandbox to the daemon. No request may be under way."""
        self._connection.close()
