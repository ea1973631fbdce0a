"""Messages to and from a container's first process, over a pipe.

Owns: the pipe, and what has been read of it. Invariants: `open` turns False as soon as the other end is gone; what an
earlier service was being told is passed over by `greet`.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from typing import Any

from treadle_tools.containers.vessel import Pipe
from treadle_tools.inside import frames
from treadle_tools.inside.container import HELLO


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
