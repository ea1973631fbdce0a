"""Serve an ASGI application over HTTP beside the gRPC server of a service."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from treadle_runtime.config import Settings, is_loopback
from treadle_runtime.errors import StartError

BACKLOG = 1024  # connections that wait to be accepted


class _Server(uvicorn.Server):
    """Leaves signals to the runtime, which ends this server by `stopping`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_http(settings: Settings, variable: str, listen: str) -> socket.socket:
    """A socket that listens at host:port, the value of `variable`. Raises StartError where another machine would be
    served in plaintext, or the port is taken."""
    if not (settings.insecure_plaintext or is_loopback(listen)):
        raise StartError(
            f"{variable}={listen} would serve other machines in plaintext: put a proxy with TLS in front of a loopback "
            "address, or set TREADLE_INSECURE_PLAINTEXT=true"
        )
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartError(f"cannot listen on {variable}={listen}: {error}") from None


def serve_http(app: Any, listener: socket.socket, stopping: asyncio.Event) -> Callable[[], Coroutine[Any, Any, None]]:
    """A background task that serves `app` until the drain begins; streams have to end by themselves then."""

    async def serve() -> None:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", server_header=False)
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            await stopping.wait()
        finally:  # also where this task is cancelled: uvicorn closes its sockets itself
            server.should_exit = True
            await asyncio.wait([serving])

    return serve
