"""One container as the service sees it: asked over a line, given its cores before each action, removed at the end.

Owns: the line. Invariants: the cores of an action are written before it is sent (ARL-Tangram §5.2, allocate on
execution); memory is set when a call or a session begins, and kept until its end; a line that breaks while the
container runs is laid again, and a request that has an id is carried out once all the same.

Messages to and from a container's first process, over a pipe.

Owns: the pipe, and what has been read of it. Invariants: `open` turns False as soon as the other end is gone; what an
earlier service was being told is passed over by `greet`."""

import asyncio
import base64
import contextlib
import os
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from treadle_tools.limits import Limits
from treadle_tools.sandbox.bubblewrap.cell import BACKSTOP_S, WORKER_BYTES, CellLost
from treadle_tools.sandbox.containers.recipe import Allotment, Ending, HostFailed, Pipe, Vessel, VesselLost
from treadle_tools.sandbox.inside import frames
from treadle_tools.sandbox.inside.container import HELLO
from treadle_tools.sandbox.inside.frames import FrameError
from treadle_tools.tool import Status


class LineEnded(Exception):  # noqa: N818 - named for what happened
    """The other end is gone, or speaks no lines."""


class Line:
    """See the module. `pump` must run beside whoever uses it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._received = bytearray()
        self._looked = 0
        self.open = True

    @property
    def complaints(self) -> str:
        """What the other end has said on its standard error, the last of it."""
        return self._pipe.complaints

    async def pump(self) -> None:
        """Read until the end."""
        try:
            while self.open and (piece := await self._pipe.read()):
                self._take(piece)
        finally:
            await self.close()

    async def greet(self) -> dict[str, Any]:
        """Find the border of a message, and pass over what was meant for somebody else. Raises LineEnded."""
        word = uuid.uuid4().hex
        await self._write(b"\n" + _line({"op": HELLO, HELLO: word}))
        while True:
            with contextlib.suppress(frames.FrameError):
                message = frames.decode(await self._next())
                if message.get(HELLO) == word:
                    return message

    async def exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises LineEnded."""
        await self._write(_line(request))
        try:
            return frames.decode(await self._next())
        except frames.FrameError as error:
            raise LineEnded(str(error)) from error

    async def close(self) -> None:
        """From this side. Safe to call again."""
        self.open = False
        self._lines.put_nowait(None)
        await self._pipe.close()

    def hang_up(self) -> None:
        """The pump closes the pipe."""
        self.open = False

    async def _write(self, piece: bytes) -> None:
        if not self.open:
            raise LineEnded("it has ended")
        try:
            await self._pipe.write(piece)
        except ConnectionError as error:
            raise LineEnded(str(error)) from error

    async def _next(self) -> bytes:
        line = await self._lines.get()
        if line is None:
            self._lines.put_nowait(None)
            raise LineEnded("it has ended")
        return line

    def _take(self, piece: bytes) -> None:
        self._received += piece
        while (end := self._received.find(b"\n", self._looked)) >= 0:
            self._lines.put_nowait(bytes(self._received[:end]))
            del self._received[: end + 1]
            self._looked = 0
        self._looked = len(self._received)
        if self._looked > frames.MAX_FRAME_BYTES:
            self.open = False


def _line(message: Mapping[str, Any]) -> bytes:
    return frames.encode(message)[frames.HEADER.size :] + b"\n"


log = structlog.get_logger()

ALLOT_TIMEOUT_S = 30.0  # 10 ms on an idle machine
RELINK_PAUSES_S = (0.1, 0.5, 2.0)  # a daemon that is being restarted is back within seconds
LAST_BREATH_S = (0.05, 0.2, 0.5, 1.0)

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class ContainerCell:
    """See the module. spawn: starts what runs beside it. removed: told once, when it is to be removed."""

    reusable = False  # its process 1 may be the image's own

    def __init__(self, vessel: Vessel, spawn: Spawn, removed: Callable[["ContainerCell"], None]) -> None:
        self.name = vessel.name
        self.vessel = vessel
        self._spawn = spawn
        self._removed = removed
        self._line: Line | None = None
        self._resident_bytes = 0
        self._oom_kills = 0
        self._cpu_used_s: float | None = None
        self._allotted: Allotment | None = None
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether it can be asked. One that was found again is believed to live until it is asked."""
        return not self._closed and (self._line is None or self._line.open)

    @property
    def complaints(self) -> str:
        """The last that its worker has said on standard error."""
        return "" if self._line is None else self._line.complaints

    async def ready(self, limits: Limits) -> None:
        """Returns once its worker answers, and has been given `limits`. Raises LineEnded, VesselLost, HostFailed."""
        await self._linked()
        await self._allot("call", limits)

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
        """See `backend.Cell`. processes: counted by the container as it was made."""
        allowed = {
            "memory_bytes": limits.memory_bytes,
            "wall_s": limits.wall_s,
            "output_bytes": limits.output_bytes,
            "cpu_cores": limits.cpu_cores,
        }
        request = {"op": op, "id": request_id, "arguments": arguments, "limits": allowed}
        if op == "restore" and file is not None:
            request["file"] = await asyncio.to_thread(_read, file)
        try:
            await self._prepared(op, limits)
            async with asyncio.timeout(limits.wall_s + BACKSTOP_S):
                reply = await self._answered(request)
        except TimeoutError:
            raise CellLost(f"stopped after {limits.wall_s:g} s", timed_out=True) from None
        except VesselLost as lost:
            raise CellLost(f"the container is gone ({lost})") from lost
        except HostFailed as failed:
            raise CellLost(f"the container cannot be reached: {failed}") from failed
        except FrameError as error:
            raise CellLost(str(error)) from error
        except LineEnded:
            raise await self._lost(limits) from None
        if (written := reply.pop("file", None)) is not None and file is not None:
            await asyncio.to_thread(_write, file, written)
        return self._judged(reply, limits)

    def close(self) -> None:
        """See `backend.Cell`."""
        if not self._closed:
            self._closed = True
            if self._line is not None:
                self._line.hang_up()
            self._removed(self)

    async def let_go(self) -> None:
        """Close the line from this side; the container stays as it is."""
        if self._line is not None:
            await self._line.close()

    async def _prepared(self, op: str, limits: Limits) -> None:
        """Ready for a request, and given what it may use; a host that hesitates is asked again."""
        try:
            async with asyncio.timeout(ALLOT_TIMEOUT_S + limits.wall_s):  # one that was found may be in a step
                for pause_s in RELINK_PAUSES_S:
                    try:
                        await self._linked()
                        await self._allot(op, limits)
                    except HostFailed as failed:
                        log.warning("a container's host is asked again", container=self.name, error=str(failed))
                        await asyncio.sleep(pause_s)
                    else:
                        return
                await self._linked()
                await self._allot(op, limits)
        except TimeoutError:
            raise HostFailed(f"no answer in {ALLOT_TIMEOUT_S + limits.wall_s:g} s") from None

    async def _linked(self) -> Line:
        if self._line is None or not self._line.open:
            line = Line(await self.vessel.attach())
            self._line = line
            self._spawn(line.pump())
            hello = await line.greet()
            self._resident_bytes = int(hello["resident_bytes"])
            self._oom_kills, self._cpu_used_s = int(hello["oom_kills"]), hello["cpu_used_s"]
        assert self._line is not None
        return self._line

    async def _allot(self, op: str, limits: Limits) -> None:
        if op == "recall":
            return
        memory_bytes = None if op in ("step", "snapshot") else self._resident_bytes + limits.memory_bytes + WORKER_BYTES
        if memory_bytes is None and self._allotted is not None:
            memory_bytes = self._allotted.memory_bytes
        allotment = Allotment(limits.cpu_cores, tuple(getattr(limits, "cores", ())), memory_bytes)
        if allotment != self._allotted:
            await self.vessel.allot(allotment)
            self._allotted = allotment

    async def _answered(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer, also where the line breaks on the way but not the container."""
        line = await self._linked()
        for pause_s in RELINK_PAUSES_S:
            try:
                return await line.exchange(request)
            except LineEnded:
                if not request["id"] or not (await self.vessel.ending()).runs:
                    raise
            log.warning("a container's line is laid again", container=self.name)
            await asyncio.sleep(pause_s)
            line = await self._linked()
            last = await line.exchange({**request, "op": "recall", "arguments": None})
            if last["id"] == request["id"]:
                return last
        return await line.exchange(request)

    async def _lost(self, limits: Limits) -> CellLost:
        try:
            ending = await ending_of(self.vessel)
        except HostFailed as failed:
            return CellLost(f"the container cannot be reached: {failed}")
        if ending.out_of_memory:
            return CellLost(_outgrown(limits), out_of_memory=True)
        if self.complaints:
            log.error("a container's worker ended", container=self.name, stderr=self.complaints)
        return CellLost(f"the container ended without an answer ({told(ending)})")

    def _judged(self, reply: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """Who was killed by the kernel for memory has not crashed by itself. cpu_s: of this action."""
        before_s, self._cpu_used_s = self._cpu_used_s, reply.pop("cpu_used_s", None)
        if before_s is not None and self._cpu_used_s is not None:
            reply["cpu_s"] = self._cpu_used_s - before_s
        kills, self._oom_kills = self._oom_kills, int(reply.pop("oom_kills", 0))
        if reply.get("status") == Status.CRASHED and self._oom_kills > kills:
            reply |= {"status": Status.OUT_OF_MEMORY, "error": _outgrown(limits)}
        return reply


async def ending_of(vessel: Vessel) -> Ending:
    """How a container ended whose line has: its host may hear of that a little later. Raises HostFailed."""
    for pause_s in LAST_BREATH_S:
        ending = await vessel.ending()
        if not ending.runs:
            break
        await asyncio.sleep(pause_s)
    return ending


def told(ending: Ending) -> str:
    """In words."""
    if ending.runs:
        return "its line broke"
    return "it is gone" if ending.exit_code is None else f"exit code {ending.exit_code}"


def _read(file: int) -> str:
    with os.fdopen(os.dup(file), "rb") as state:
        return base64.b64encode(state.read()).decode("ascii")


def _write(file: int, written: str) -> None:
    with os.fdopen(os.dup(file), "wb") as state:
        state.write(base64.b64decode(written))


def _outgrown(limits: Limits) -> str:
    return f"stopped above {limits.memory_bytes} bytes of memory"
