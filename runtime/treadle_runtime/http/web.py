"""Serve an ASGI application over HTTP beside the gRPC server of a service, with its certificate
where it has one, and keep out what strangers and foreign web pages send.

A browser runs pages of anybody, and such a page can reach a server on the loopback interface. So
`Guard` refuses, before the application sees it, what names another host (a foreign name that leads
here), what a page of another origin sends, and a body that is no JSON. A browser sends JSON to
another origin only after it has asked, and here nobody agrees.

Memory is bounded. A head and a body have a most size and arrive within a time; connections that
have sent no whole head make way for new ones; all requests together hold `Edge.held_bytes` at most,
by an estimate that is above what Python takes. What would be more is refused with 503.
"""

import asyncio
import json
import math
import re
import resource
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import structlog
import uvicorn
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from treadle.certificates import CERTIFICATE, KEY
from treadle.connection import finish
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
MOST_FILES = 65_536  # open files that the process requests, where the system lets it
MOST_CONNECTIONS = 8_192  # more than the trajectories of a large rollout
MOST_HEAD_BYTES = 32 * 1024  # of a request line and its headers
# Of a connection between two requests. A request that is sent in the moment in which the server
# closes is lost, so clients have to close first: httpx does so after 5 s, aiohttp after 15. An idle
# connection makes way for a new one.
IDLE_S = 75
HEAD_S = 10.0  # for a head, from the connection or from its first byte on
BODY_S = 120.0  # for a body: 16 MiB at 1.2 Mbit/s
MOST_PIPELINED = 16  # requests of a connection that wait for the answer to an earlier one
MOST_BODY_BYTES = 16 * 1024 * 1024
MOST_HELD_BYTES = 2 * 1024**3
# A body from here on is parsed alone, and others go on for PAUSES times as long as it took. It also
# leaves a quarter of the memory to smaller ones.
LARGE_BYTES, PAUSES = 1024 * 1024, 3
# After a refusal, the rest of a body is read and dropped for so long. A client that cannot send
# does not read the answer.
LINGER_S = 2.0
UNREAD_BYTES = 64 * 1024  # a body that nobody reads is dropped up to this size
# Bytes that Python takes at most for a part of a JSON text, beside the text: a number of a list, a
# list, an object with one field. A character is wider where the text has others than ASCII.
VALUE_BYTES, LIST_BYTES, OBJECT_BYTES, WIDE = 40, 96, 256, 4
JSON = "application/json"
# Content types that a browser sends to another origin without asking first.
UNASKED = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
OWN_SITES = ("same-origin", "none")  # of Sec-Fetch-Site; none: a person typed the address
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?", re.IGNORECASE)
# what a number has that is beyond a double's range
_LARGE_NUMBER = re.compile(rb"[eE]\+?\d{3}|\d{300}")
_BODY = "treadle.body"  # key of a request's scope


def refuse_plainly(status: int, words: str) -> Response:
    """Return a refusal as {"error": words}."""
    return JSONResponse({"error": words}, status)


def refuse_errors(
    refuse: Callable[[int, str], Response],
) -> Callable[[Request, Exception], Coroutine[Any, Any, Response]]:
    """Return an application's handler of HTTPException, which answers as `refuse` does."""

    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        asked, headers = f"{request.method} {request.url.path[:200]}", error.headers or {}
        words = {404: f"{asked}: is not served here", 405: f"{asked}: use {headers.get('Allow')}"}
        answer = refuse(error.status_code, words.get(error.status_code, error.detail))
        answer.headers.update(headers)
        return answer

    return handle


@dataclass(frozen=True)
class Edge:
    """Requests that a server takes."""

    hosts: Sequence[str] = ()
    """Callers may reach it under these names, beside its addresses and those of its certificate;
    `*.example.com`: all names below one."""
    hosts_variable: str = ""
    """Setting that adds names."""
    body_bytes: int = MOST_BODY_BYTES
    """Most bytes of a body."""
    held_bytes: int = MOST_HELD_BYTES
    """Most bytes that all requests in flight take."""
    refuse: Callable[[int, str], Response] = refuse_plainly
    """Writes a refusal, from its status and words."""


class Guard:
    """Application in front of `app` that refuses what `edge` does not take. names: of the
    certificate."""

    def __init__(self, app: ASGIApp, edge: Edge, names: Sequence[str] = ()) -> None:
        self._app, self.edge = app, edge
        self._names = {"localhost", *(name.lower().strip("[]") for name in (*edge.hosts, *names))}
        self.held_bytes = 0
        self.large = asyncio.Lock()  # held while a large body is parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        scope[_BODY] = body = _Body(self, headers, receive)
        problem = self._problem(scope, headers, body)
        app = self._app if problem is None else self.edge.refuse(*problem)
        try:
            await app(scope, body.receive, body.answer_by(send))
        finally:
            self.held_bytes -= body.held_bytes

    def _problem(self, scope: Scope, headers: Headers, body: "_Body") -> tuple[int, str] | None:
        """Return the status and the words of a refusal; None where the request is let in."""
        head_bytes = sum(len(name) + len(value) for name, value in headers.raw)
        if head_bytes + len(scope["raw_path"]) + len(scope["query_string"]) > MOST_HEAD_BYTES:
            return 431, f"the path and headers: must have {MOST_HEAD_BYTES} bytes at most"
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._serves(host, scope["server"]):
            more = f"; {self.edge.hosts_variable} adds names" if self.edge.hosts_variable else ""
            return 400, f"Host: {host[:100]!r} is no name of this server{more}"
        if _is_foreign(scope, headers, host):
            return 403, "Origin, Sec-Fetch-Site: a page of another origin may not call this server"
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        unasked = kind in UNASKED and scope["method"] not in ("GET", "HEAD")
        if kind != JSON and (body.is_left or unasked):
            return 415, f"Content-Type: must be {JSON}, is {kind[:100]!r}"
        if body.length > self.edge.body_bytes:
            return 413, _too_large(self.edge.body_bytes)
        return None

    def _serves(self, host: str, server: tuple[str, int | None]) -> bool:
        """Return whether a Host names this server. server: the address at which the connection
        arrived. A page that leads a name of its own here names that, and never an address."""
        found = _HOST.fullmatch(host)
        name = found[1].lower().strip("[]") if found else ""
        try:
            address = ip_address(name)
        except ValueError:
            below = (f"*{name[at:]}" for at, letter in enumerate(name) if letter == ".")
            return name in self._names or any(each in self._names for each in below)
        return address.is_loopback or name in self._names or address == ip_address(server[0])


def _is_foreign(scope: Scope, headers: Headers, host: str) -> bool:
    """Return whether a page of another origin has sent a request. A link that a person follows is
    none: its answer is shown to that person alone."""
    # a proxy in front may have the certificate
    own = {f"{scheme}://{host}".lower() for scheme in ("https", scope["scheme"])}
    if any(origin.lower() not in own for origin in headers.getlist("origin")):
        return True
    follows_link = scope["method"] in ("GET", "HEAD") and (
        headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )
    sites = headers.getlist("sec-fetch-site")
    return not follows_link and any(site not in OWN_SITES for site in sites)


def _too_large(most_bytes: int) -> str:
    return f"the body: must have {most_bytes} bytes at most"


class _Body:
    """Body of a request, which is counted while it is read. is_left: some of it may still come.
    held_bytes: what the request holds in memory, by estimate."""

    def __init__(self, guard: Guard, headers: Headers, receive: Receive) -> None:
        self.guard, self._receive = guard, receive
        self.length = int(headers.get("content-length") or 0)
        chunked = "transfer-encoding" in headers
        self.is_left = chunked or self.length > 0
        self._must_close = chunked or self.length > UNREAD_BYTES
        self.held_bytes, self._read_bytes, self._is_wide = 0, 0, False
        self._due_s = asyncio.get_running_loop().time() + BODY_S

    async def receive(self) -> Message:
        """Return the next message. Raises HTTPException where the body is too long or too late, or
        where requests hold too much."""
        if not self.is_left:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._due_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body: must arrive within {BODY_S:.0f} s") from None
        if message["type"] == "http.request":
            part = message["body"]
            self.is_left = message["more_body"]
            self._read_bytes += len(part)
            if self._read_bytes > self.guard.edge.body_bytes:
                raise HTTPException(413, _too_large(self.guard.edge.body_bytes))
            if not self._is_wide and not (part.isascii() and b"\\" not in part):
                self._is_wide = True  # also of the parts before, which may be of the same text
                self.hold((WIDE - 1) * (self._read_bytes - len(part)))
            self.hold(weigh(part, wide=self._is_wide))
        return message

    def hold(self, more_bytes: int) -> None:
        """Count what the request holds from now on until it is answered. Raises HTTPException."""
        guard, held_bytes = self.guard, self.held_bytes + more_bytes
        most = guard.edge.held_bytes * (1.0 if held_bytes <= LARGE_BYTES else 0.75)
        if guard.held_bytes + more_bytes > most:
            raise HTTPException(
                503,
                f"requests in flight hold {guard.held_bytes} bytes, and this one would hold "
                f"{held_bytes}: ask again when others have ended",
                {"Retry-After": "1"},
            )
        self.held_bytes = held_bytes
        guard.held_bytes += more_bytes

    def answer_by(self, send: Send) -> Send:
        """Return a `send` which ends the connection where much of the body is left, once the client
        had time to read the answer."""

        async def answer(message: Message) -> None:
            closes = self.is_left and self._must_close
            if closes and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            elif closes and not message.get("more_body"):
                await send({**message, "more_body": True})
                await self._drop_rest()
                message = {"type": "http.response.body"}
            await send(message)

        return answer

    async def _drop_rest(self) -> None:
        dropped = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self.is_left and dropped <= self.guard.edge.body_bytes:
                    message = await self._receive()
                    if message["type"] != "http.request":
                        return
                    dropped += len(message["body"])
                    self.is_left = message["more_body"]


def weigh(raw: bytes, *, wide: bool = True) -> int:
    """Return the bytes that a JSON text and what is parsed from it take at most. wide: its texts
    may have characters that are not ASCII."""
    return (
        (1 + (WIDE if wide else 1)) * len(raw)
        + VALUE_BYTES * raw.count(b",")
        + LIST_BYTES * raw.count(b"[")
        + OBJECT_BYTES * raw.count(b"{")
    )


def hold(request: Request, more_bytes: int) -> None:
    """Count what a request behind a Guard holds from now on until it is answered, beside its body.
    Raises HTTPException where all requests would hold too much."""
    request.scope[_BODY].hold(more_bytes)


async def read_json(request: Request) -> Any:
    """Return the body of a request behind a Guard, {} where it has none; call it once. Raises
    ValueError where it is no JSON: also for NaN, for numbers beyond a double's range, for values in
    each other more than 200 deep, and for one half of a surrogate pair. Raises HTTPException."""
    try:
        raw = b"".join([part async for part in request.stream()]) or b"{}"
    except ClientDisconnect:
        raise HTTPException(400, "the body: ended early") from None
    if len(raw) < LARGE_BYTES:
        return _parse(raw)
    async with request.scope[_BODY].guard.large:
        began_s = time.monotonic()
        try:
            return _parse(raw)
        finally:
            del raw
            await asyncio.sleep(PAUSES * (time.monotonic() - began_s))


def _parse(raw: bytes) -> Any:
    value = from_json(raw, allow_inf_nan=False)
    if _LARGE_NUMBER.search(raw):  # which becomes infinite
        json.dumps(value, allow_nan=False)
    return value


class _Connection(HttpToolsProtocol):
    """Connection with limits for what comes before a request is known, which uvicorn has not.
    waiting: connections without a request (no whole head has come, or all is answered), the oldest
    first."""

    def __init__(self, waiting: "dict[_Connection, None]", most: int, **own: Any) -> None:
        super().__init__(**own)
        self._waiting, self._most = waiting, most
        self._timer: asyncio.TimerHandle | None = None
        # since the parser last found a whole head or a part of a body
        self._unread_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self._most:
            oldest = next(iter(self._waiting))
            oldest._stop_waiting()
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self._timer is None:
            self._wait()
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes <= MOST_HEAD_BYTES or self.transport.is_closing():
            return
        if answered:
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()
        else:
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._waiting[self] = None

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        self._stop_waiting()
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
            raise ConnectionAbortedError("too many requests wait on one connection")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def _wait(self) -> None:
        """Give the client HEAD_S for a head."""
        self._waiting[self] = None
        self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._stop_waiting()
        self.transport.close()


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
    edge: Edge,
    tls_folder: str = "",
    grace_s: float,
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a task that serves `app` until the drain begins, and closes `listener`.

    edge: the requests that it takes. tls_folder: folder of the certificate; empty: plaintext.
    Callers know its authority, and have no certificate. grace_s: how long requests may still run
    then; those that are cut after it are answered 503. The task ends in order also where it is
    cancelled, once or several times: a server that was cut off would go on accepting requests.
    """

    async def serve() -> None:
        names = certificate_names(Path(tls_folder)) if tls_folder else ()
        config = uvicorn.Config(
            Guard(_AnswerCut(app), edge, names),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=math.ceil(grace_s),
        )
        config.load()
        most = min(MOST_CONNECTIONS, _allow_files() // 2)  # an engine's stream is a file too
        connection = partial(_Connection, dict[_Connection, None](), most)
        config.http_protocol_class = cast(type[asyncio.Protocol], connection)
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


def certificate_names(folder: Path) -> list[str]:
    """Return the names and addresses for which the certificate in a folder is."""
    from cryptography import x509  # who serves plaintext needs no library for it

    certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = map(str, found.get_values_for_type(x509.IPAddress))
    return [*found.get_values_for_type(x509.DNSName), *addresses]


def _allow_files() -> int:
    """Let the process open MOST_FILES, or as many as it may; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


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
