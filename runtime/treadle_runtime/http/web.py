"""Serve an ASGI application over HTTP beside the gRPC server of a service, with its certificate
where it has one."""

import asyncio
import math
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.responses import JSONResponse
from treadle.certificates import CERTIFICATE, KEY
from treadle.connection import finish

from treadle_runtime.bus import run_beside
from treadle_runtime.errors import StartError

log = structlog.get_logger()

BACKLOG = 1024  # connections that wait to be accepted
CUT = {
    "message": "this server is shutting down: send the request again",
    "type": "server_error",
    "code": 503,
}
SPARE_S = 2.0  # uvicorn needs two tenths of a second beyond the grace
RENEW_S = 1.0  # between two checks of the files of the certificate


class _Server(uvicorn.Server):
    """HTTP server that leaves signals to the runtime, which ends it by `stopping`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _AnswerCut:
    """Middleware that answers a request which is cancelled, as the end of the grace cuts it. By
    itself uvicorn answers 500 and logs each with a traceback."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begun = False

        async def note(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if not begun:
                await JSONResponse({"error": CUT}, 503)(scope, receive, send)


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
    grace_s: float,
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a task that serves `app` until the drain begins, and closes `listener`.

    tls_folder: folder of the certificate; empty: plaintext. Callers know its authority, and have no
    certificate. grace_s: how long requests may still run then; those that are cut after it are
    answered 503. The task ends in order also where it is cancelled, once or several times: a server
    that was cut off would go on accepting requests.
    """

    async def serve() -> None:
        config = uvicorn.Config(
            _AnswerCut(app),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=math.ceil(grace_s),
        )
        config.load()
        renewals = []
        if tls_folder:
            config.ssl = _context(Path(tls_folder))
            renewals.append(partial(_renew, config.ssl, Path(tls_folder)))
        server, loop = _Server(config), asyncio.get_running_loop()
        serving = loop.create_task(server.serve(sockets=[listener]))
        drain = loop.create_task(stopping.wait())
        try:
            async with run_beside(renewals):
                await asyncio.wait({serving, drain}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drain.cancel()
            try:
                await finish(_end(server, serving, math.ceil(grace_s) + SPARE_S))
            finally:
                listener.close()  # uvicorn leaves sockets that it was given to their owner
                serving.cancel()
        if serving.done():
            await serving

    return serve


async def _end(server: _Server, serving: "asyncio.Task[None]", limit_s: float) -> None:
    """Let requests end, and those that are cut after the grace be answered."""
    server.should_exit = True
    await asyncio.wait({serving}, timeout=limit_s)
    if cut := set(server.server_state.tasks):
        await asyncio.wait(cut, timeout=SPARE_S)


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    return context


async def _renew(context: ssl.SSLContext, folder: Path) -> None:
    """Present a new certificate to new connections once its files have changed."""
    known = _written(folder)
    while True:
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
