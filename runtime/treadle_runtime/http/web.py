"""Serve an ASGI application over HTTP beside the gRPC server of a service, with its certificate
where it has one."""

import asyncio
import math
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from treadle.certificates import CERTIFICATE, KEY

from treadle_runtime.errors import StartError

log = structlog.get_logger()

BACKLOG = 1024  # connections that wait to be accepted
RENEW_S = 1.0  # between two checks of the files of the certificate


class _Server(uvicorn.Server):
    """HTTP server that leaves signals to the runtime, which ends it by `stopping`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_http(variable: str, listen: str) -> socket.socket:
    """Return a socket that listens at host:port, the value of `variable`. Raises StartError where
    the port is taken."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartError(f"cannot listen on {variable}={listen}: {error}") from None
    # Connections inherit the option. Else the first token of a stream waits 40 ms for the
    # acknowledgement of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve_http(
    app: Any,
    listener: socket.socket,
    stopping: asyncio.Event,
    *,
    tls_folder: str = "",
    grace_s: float | None = None,
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a background task that serves `app` until the drain begins, and closes `listener`.

    tls_folder: folder of the certificate; empty: plaintext. Callers know its authority, and have no
    certificate. grace_s: how long requests may still run then; None: streams have to end by
    themselves.
    """

    async def serve() -> None:
        grace = None if grace_s is None else math.ceil(grace_s)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=grace,
        )
        config.load()
        server = _Server(config)
        try:
            async with asyncio.TaskGroup() as group:
                if tls_folder:
                    config.ssl = _context(Path(tls_folder))
                    group.create_task(_renew(config.ssl, Path(tls_folder), stopping))
                serving = group.create_task(server.serve(sockets=[listener]))
                try:
                    await stopping.wait()
                finally:  # also where this task is cancelled: uvicorn closes its connections itself
                    server.should_exit = True
                    await asyncio.wait([serving])
        finally:
            listener.close()  # uvicorn leaves sockets that it was given to their owner

    return serve


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    return context


async def _renew(context: ssl.SSLContext, folder: Path, stopping: asyncio.Event) -> None:
    """Present a new certificate to new connections once its files have changed."""
    known = _written(folder)
    while not stopping.is_set():
        await asyncio.sleep(RENEW_S)
        if (written := _written(folder)) != known:
            try:
                # a key that does not fit would leave the context in use without a key
                _context(folder)
                context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
                known = written
            except (OSError, ssl.SSLError) as error:  # one of the two files is not written yet
                log.warning("the new certificate cannot be used yet", error=str(error))


def _written(folder: Path) -> list[float]:
    return [
        (folder / name).stat().st_mtime for name in (CERTIFICATE, KEY) if (folder / name).exists()
    ]
