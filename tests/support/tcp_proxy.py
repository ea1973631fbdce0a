"""A TCP proxy in this process, whose connections can be cut: the network between one process and a
server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

READ_BYTES = 65_536


class Proxy:
    """Forwards connections to a port of this machine. While it is cut, it closes them and takes no
    new ones."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.port = 0

    def cut(self) -> None:
        """Close all connections."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def join(self) -> None:
        """Forward again."""
        self._is_cut = False

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        if self._is_cut:
            writer.transport.abort()
            return
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
        own = {writer, to_writer}
        self._writers |= own
        try:
            await asyncio.wait(
                [
                    asyncio.ensure_future(_copy(reader, to_writer)),
                    asyncio.ensure_future(_copy(to_reader, writer)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._writers -= own
            for each in own:
                each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def proxy(port: int) -> AsyncIterator[Proxy]:
    """A proxy to a port, for the time of the block."""
    made = Proxy(port)
    server = await asyncio.start_server(made.forward, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.cut()
        server.close()
