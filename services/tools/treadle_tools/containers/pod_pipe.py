"""The line to process 1 of a pod, over a web socket of the API server."""

import contextlib

import aiohttp

PIECE_BYTES = 32 * 1024  # of a message to a pod: what the kubelet itself sends at a time
COMPLAINTS_BYTES = 8192  # of what it wrote to stderr, the newest
STDIN, STDOUT, STDERR = 0, 1, 2


class PodPipe:
    """Bytes to and from process 1, attached over a web socket; its first byte names the channel."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._complaints = b""

    async def write(self, piece: bytes) -> None:
        """See `vessel.Pipe`."""
        try:
            for start in range(0, len(piece), PIECE_BYTES):
                await self._socket.send_bytes(bytes([STDIN]) + piece[start : start + PIECE_BYTES])
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise ConnectionError(str(error) or "the connection is gone") from error

    async def read(self) -> bytes:
        """See `vessel.Pipe`."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            while (message := await self._socket.receive()).type is aiohttp.WSMsgType.BINARY:
                channel, data = message.data[0], message.data[1:]
                if channel == STDOUT and data:
                    return bytes(data)
                if channel == STDERR:
                    self._complaints = (self._complaints + data)[-COMPLAINTS_BYTES:]
        return b""

    @property
    def complaints(self) -> str:
        """See `vessel.Pipe`."""
        return self._complaints.decode(errors="replace").strip()

    async def close(self) -> None:
        """See `vessel.Pipe`."""
        await self._socket.close()
