"""Waiting for a descriptor."""

import asyncio
import socket


async def readable(file: socket.socket | int) -> None:
    """Returns once `file` (a socket, a pidfd) can be read, or has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    descriptor = file if isinstance(file, int) else file.fileno()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
