"""The line to process 1 of a container, over its attached input and outputs."""

import contextlib

import aiodocker
import aiohttp
from aiodocker.stream import Stream

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
