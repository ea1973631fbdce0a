"""HTTP beside a service: what strangers send is refused, and its certificate may change."""

import asyncio
import contextlib
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from treadle.certificates import AUTHORITY, CERTIFICATE, KEY
from treadle_cli.certs import make_certificates
from treadle_cli.mesh.services import GATEWAY_FOLDER
from treadle_runtime.http import web
from treadle_runtime.http.web import (
    RENEW_S,
    Edge,
    bind_http,
    hold,
    read_json,
    refuse_errors,
    refuse_plainly,
    serve_http,
)

OWN = "127.0.0.1:7409"  # any port of this machine may lead here
JSON_BODY = "Content-Type: application/json\r\n"


async def test_while_one_of_two_new_files_is_written_the_old_certificate_serves(
    tmp_path: Path,
) -> None:
    old = make_certificates(tmp_path / "old") / GATEWAY_FOLDER
    new = make_certificates(tmp_path / "new") / GATEWAY_FOLDER
    stopping, listener = asyncio.Event(), bind_http("LISTEN", "127.0.0.1:0")
    folder = Path(shutil.copytree(old, tmp_path / "used"))
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/"

    async def connect(authority: Path) -> None:
        """Raises ClientError where this authority has not signed the certificate, or where there is
        none."""
        trust = ssl.create_default_context(cafile=str(authority / AUTHORITY))
        async with (
            aiohttp.ClientSession() as http,
            http.get(url, ssl=trust, server_hostname="gateway.treadle") as response,
        ):
            assert response.status == 404

    async with asyncio.TaskGroup() as group:
        group.create_task(
            serve_http(
                Starlette(), listener, stopping, edge=Edge(), tls_folder=str(folder), grace_s=1.0
            )()
        )
        await connect(old)
        shutil.copy(new / CERTIFICATE, folder / CERTIFICATE)
        await asyncio.sleep(2 * RENEW_S)
        await connect(old)
        shutil.copy(new / KEY, folder / KEY)
        await asyncio.sleep(2 * RENEW_S)
        await connect(new)
        stopping.set()


class Server:
    """A server whose application answers the JSON that it gets. waiting: set once a request is at
    /wait, which is answered once let_go is."""

    def __init__(self, port: int) -> None:
        self.port, self.waiting, self.let_go = port, asyncio.Event(), asyncio.Event()
        self.talks: list[Talk] = []

    async def connect(self, raw: bytes) -> "Talk":
        """A connection on which these bytes are sent. It is closed with the server."""
        talk = Talk(*await asyncio.open_connection("127.0.0.1", self.port))
        self.talks.append(talk)
        await talk.send(raw)
        return talk

    async def ask(self, raw: str | bytes) -> int:
        """The status of the answer to a whole request, or to as much of it as is read."""
        talk = await self.connect(raw.encode() if isinstance(raw, str) else raw)
        return await talk.status()

    async def get(self, headers: str = f"Host: {OWN}\r\n", method: str = "GET") -> int:
        return await self.ask(f"{method} / HTTP/1.1\r\n{headers}\r\n")

    async def post(self, body: str = "{}", headers: str = JSON_BODY) -> int:
        length = f"Content-Length: {len(body.encode())}\r\n"
        return await self.ask(f"POST / HTTP/1.1\r\nHost: {OWN}\r\n{headers}{length}\r\n{body}")


class Talk:
    """A connection of a test's own making."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, raw: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it may refuse before it has all
            self.writer.write(raw)
            await self.writer.drain()

    async def status(self) -> int:
        """Of the next answer; 0 where the connection ends without one."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        return int(head.split()[1])

    async def is_closed(self) -> bool:
        """Whether the server has closed it."""
        with contextlib.suppress(ConnectionError):
            await self.reader.read()
        return self.reader.at_eof() or self.reader.exception() is not None


@asynccontextmanager
async def serve(edge: Edge) -> AsyncIterator[Server]:
    stopping, listener = asyncio.Event(), bind_http("LISTEN", "127.0.0.1:0")
    server = Server(listener.getsockname()[1])

    async def echo(request: Request) -> Response:
        try:
            return JSONResponse(await read_json(request))
        except ValueError as error:
            return refuse_plainly(400, str(error))

    async def wait(request: Request) -> Response:
        hold(request, len(await read_json(request)))
        server.waiting.set()
        await server.let_go.wait()
        return Response()

    app = Starlette(
        routes=[
            Route("/", echo, methods=["GET", "POST"]),
            Route("/wait", wait, methods=["POST"]),
            Route("/unread", lambda _: Response(), methods=["POST"]),
        ],
        exception_handlers={HTTPException: refuse_errors(refuse_plainly)},
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_http(app, listener, stopping, edge=edge, grace_s=1.0)())
        try:
            yield server
        finally:
            for talk in server.talks:
                talk.writer.close()
            stopping.set()


async def test_only_names_of_the_server_are_answered() -> None:
    async with serve(Edge(["Mesh.Example", "*.lab"])) as server:
        for host in (
            *(OWN, "localhost", "LOCALHOST:80", "127.0.0.1", "127.8.8.8:1", "[::1]:7409"),
            *("mesh.example", "Mesh.Example:443", "a.lab", "a.b.lab:8080"),
        ):
            assert await server.get(f"Host: {host}\r\n") == 200, host
        for host in (
            *("rebound.evil.example", "rebound.evil.example:7409", "127.0.0.1.evil.example"),
            *("localhost.evil.example", "evil.localhost", "lab", "xlab", "mesh.example.evil"),
            *(
                "10.0.0.1",
                "8.8.8.8:7409",
                "[2001:db8::1]",
                "a@127.0.0.1",
                "127.0.0.1:a",
                "",
                "[::1",
            ),
            *("127.0.0.1/", "127.0.0.1?", "127.0.0.1, localhost", "*.lab", "*", "2130706433"),
        ):
            assert await server.get(f"Host: {host}\r\n") == 400, host
        assert await server.get("") == 400
        assert await server.get(f"Host: {OWN}\r\nHost: evil.example\r\n") == 400
        # the host of an absolute path counts for nothing
        assert await server.ask(f"GET http://evil.example/ HTTP/1.1\r\nHost: {OWN}\r\n\r\n") == 200


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", "", 200),
        ("GET", "Sec-Fetch-Site: none\r\n", 200),
        ("GET", "Sec-Fetch-Site: same-origin\r\n", 200),
        ("GET", f"Origin: http://{OWN}\r\n", 200),
        ("GET", f"Origin: https://{OWN}\r\n", 200),  # a proxy has the certificate
        ("POST", f"Origin: http://{OWN}\r\n", 200),
        ("GET", "Sec-Fetch-Site: cross-site\r\n", 403),
        ("GET", "Sec-Fetch-Site: same-site\r\n", 403),
        ("POST", "Sec-Fetch-Site: same-site\r\n", 403),
        ("GET", "Origin: null\r\n", 403),
        ("GET", "Origin: \r\n", 403),
        ("GET", "Origin: http://127.0.0.1:1\r\n", 403),
        ("POST", "Origin: http://localhost:7409\r\n", 403),
        ("POST", f"Origin: http://{OWN}.evil.example\r\n", 403),
        ("POST", f"Origin: http://{OWN}\r\nOrigin: http://evil.example\r\n", 403),
        ("OPTIONS", "Origin: http://evil.example\r\n", 403),
        ("OPTIONS", "", 405),
        ("TRACE", "", 405),
    ],
)
async def test_pages_of_other_origins_are_refused(method: str, headers: str, status: int) -> None:
    async with serve(Edge()) as server:
        assert await server.get(f"Host: {OWN}\r\n{headers}", method) == status


async def test_a_link_from_another_site_leads_here_and_a_frame_does_not() -> None:
    link = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: "
    async with serve(Edge()) as server:
        assert await server.get(f"Host: {OWN}\r\n{link}document\r\n") == 200
        assert await server.get(f"Host: {OWN}\r\n{link}iframe\r\n") == 403
        assert await server.get(f"Host: {OWN}\r\n{link}document\r\n", "POST") == 403


async def test_a_body_is_json_and_says_so() -> None:
    async with serve(Edge()) as server:
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/json;a"):
            assert await server.post('{"a": "é"}', f"Content-Type: {kind}\r\n") == 200
        for kind in (
            *("text/plain", "text/plain; application/json", "application/x-www-form-urlencoded"),
            *("multipart/form-data; boundary=a", "application/octet-stream", "text/json"),
        ):
            assert await server.post("{}", f"Content-Type: {kind}\r\n") == 415, kind
        assert await server.post("{}", "") == 415, "as a browser sends a Blob without a type"
        assert await server.post("", "") == 200
        assert await server.post("", "Content-Type: application/octet-stream\r\n") == 200
        assert await server.post("", "Content-Type: text/plain\r\n") == 415
        for text in (
            *("[" * 200_000, '{"a":' * 50_000, "[" * 250 + "]" * 250, "NaN", '{"a": Infinity}'),
            *('"\\ud800"', '{"a": 1' + "0" * 6_000 + "}", "{", "{'a': 1}", "1e999", "\ufeff{}"),
        ):
            assert await server.post(text) == 400, text[:40]
        raw = f"POST / HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}Content-Length: 3\r\n\r\n".encode()
        assert await server.ask(raw + b'"\xff"') == 400


async def test_a_body_that_is_too_long_is_refused_before_it_is_there() -> None:
    """Announced, or sent in pieces without an end. Result: the client reads the answer though it
    has not sent all, and the connection ends."""
    async with serve(Edge(body_bytes=100_000)) as server:
        head = f"POST / HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}"
        for more in ("", "Expect: 100-continue\r\n"):
            assert await server.ask(f"{head}{more}Content-Length: 8000000000\r\n\r\n") == 413
        talk = await server.connect(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(25):
            await talk.send(b"1000\r\n" + b" " * 4096 + b"\r\n")
        assert await talk.status() == 413
        talk.writer.write_eof()
        assert await talk.is_closed()
        big = json.dumps("a" * 90_000)
        assert await server.post(big) == 200
        unread = f"POST /unread HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}Content-Length: 90000\r\n\r\n"
        talk = await server.connect(unread.encode())
        assert await talk.status() == 200
        await talk.send(b" " * 90_000)
        assert await talk.is_closed(), "it does not read for ever what nobody wants"


@pytest.mark.parametrize(
    "request_",
    [
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        "Content-Length: -1\r\n\r\n",
        "Transfer-Encoding: gzip, chunked, x\r\n\r\n",
        "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 0x2\r\n\r\n{}",
    ],
)
async def test_a_request_with_two_ends_is_refused(request_: str) -> None:
    async with serve(Edge()) as server:
        assert await server.ask(f"POST / HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}{request_}") == 400


async def test_a_request_line_and_headers_have_a_most_size() -> None:
    """As one piece, without an end, in trailers, and behind the size of a chunk."""
    async with serve(Edge()) as server:
        endless = b"a" * 300_000
        for begin in (b"GET /", b"GET /?", b"GET / HTTP/1.1\r\nA: ", b"GET / HTTP/1.1\r\n"):
            talk = await server.connect(begin)
            for _ in range(10):
                await talk.send(endless)
            assert await talk.status() in (0, 400, 431), begin
            assert await talk.is_closed()
        assert await server.get(f"Host: {OWN}\r\nA: {'a' * 40_000}\r\n") == 431
        assert await server.ask(f"GET /?{'a' * 40_000} HTTP/1.1\r\nHost: {OWN}\r\n\r\n") == 431
        assert await server.get(f"Host: {OWN}\r\nA: {'a' * 16_000}\r\n") == 200
        chunked = (
            f"POST /wait HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}Transfer-Encoding: chunked\r\n\r\n"
        )
        for begin in (b"2\r\n{}\r\n0\r\nA: ", b"2;a="):
            talk = await server.connect(chunked.encode() + begin)
            for _ in range(10):
                await talk.send(endless)
            assert await talk.is_closed(), begin
        assert await server.get() == 200


async def test_whoever_sends_nothing_whole_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half heads, nothing at all, empty lines, half bodies, on first and on later requests."""
    monkeypatch.setattr(web, "HEAD_S", 0.5)
    monkeypatch.setattr(web, "BODY_S", 0.5)
    monkeypatch.setattr(web, "IDLE_S", 1)
    async with serve(Edge()) as server:
        whole = f"GET / HTTP/1.1\r\nHost: {OWN}\r\n\r\n".encode()
        half = whole[:-4]
        talks = [await server.connect(half) for _ in range(400)]
        talks += [await server.connect(raw) for raw in (b"", b"\r\n\r\n", whole + half)]
        later = await server.connect(whole)
        assert await later.status() == 200
        await later.send(half)
        for talk in [*talks, later]:
            assert await asyncio.wait_for(talk.is_closed(), 30)
        body = f"POST / HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}Content-Length: 99999\r\n\r\n{{"
        assert await server.ask(body) == 408
        assert await server.get() == 200


async def test_who_leaves_within_a_body_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = f"POST / HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}Content-Length: 9\r\n\r\n{{"
    async with serve(Edge()) as server:
        for _ in range(5):
            talk = await server.connect(head.encode())
            talk.writer.close()
        assert await server.get() == 200
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_a_new_connection_is_served_though_others_fill_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 20)
    async with serve(Edge()) as server:
        talks = [await server.connect(b"GET / HT") for _ in range(60)]
        for _ in range(3):
            assert await server.get() == 200
        for talk in talks[:40]:
            assert await asyncio.wait_for(talk.is_closed(), 30)


async def test_an_idle_connection_makes_way_for_a_new_one_and_a_request_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients keep connections between their requests. Result: the longest idle is closed first,
    and one whose request runs stays."""
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 20)
    whole = f"GET / HTTP/1.1\r\nHost: {OWN}\r\n\r\n".encode()
    waiting = f"POST /wait HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}Content-Length: 2\r\n\r\n{{}}"
    async with serve(Edge()) as server:
        running = await server.connect(waiting.encode())
        idle = [await server.connect(whole) for _ in range(19)]
        for talk in idle:
            assert await talk.status() == 200
        await idle[0].send(whole)
        await idle[0].reader.readexactly(2)
        assert await idle[0].status() == 200, "the last one that was used"
        for _ in range(3):
            await server.connect(b"GET / HT")
        for talk in idle[1:4]:
            assert await asyncio.wait_for(talk.is_closed(), 30)
        for talk in (idle[0], idle[4]):
            await talk.send(whole)
            await talk.reader.readexactly(2)
            assert await talk.status() == 200
        server.let_go.set()
        assert await running.status() == 200


async def test_requests_together_hold_no_more_than_they_may() -> None:
    """Result: one too many is told to come back, small ones pass a large one, and what has been
    answered counts no more."""
    async with serve(Edge(held_bytes=40_000_000)) as server:
        large = json.dumps([0] * 500_000)
        head = f"POST /wait HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}"
        raw = f"{head}Content-Length: {len(large)}\r\n\r\n{large}".encode()
        first = await server.connect(raw)
        await server.waiting.wait()
        assert await server.post(large) == 503
        assert await server.post() == 200
        server.let_go.set()
        assert await first.status() == 200
        assert await server.post(large) == 200
        for text in ("[" + "{}," * 200_000 + "{}]", json.dumps(["é" * 2_000_000])):
            assert await server.post(text) == 503, "each takes more in memory than as a text"


async def test_many_requests_that_wait_on_one_connection_end_it() -> None:
    async with serve(Edge()) as server:
        head = f"POST /wait HTTP/1.1\r\nHost: {OWN}\r\n{JSON_BODY}Content-Length: 2\r\n\r\n{{}}"
        talk = await server.connect(head.encode() * 5_000)
        assert await asyncio.wait_for(talk.is_closed(), 30)
        whole = f"GET / HTTP/1.1\r\nHost: {OWN}\r\n\r\n"
        talk = await server.connect(whole.encode() * 5)
        for _ in range(5):
            assert await talk.status() == 200
            await talk.reader.readexactly(2)


async def test_nobody_is_given_another_protocol() -> None:
    upgrade = "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YQ==\r\n"
    async with serve(Edge()) as server:
        for protocol in ("websocket", "h2c"):
            headers = f"Host: {OWN}\r\n{upgrade}Upgrade: {protocol}\r\n"
            assert await server.get(headers) == 200, "as if nothing had been asked"
        assert await server.ask(f"CONNECT {OWN} HTTP/1.1\r\nHost: {OWN}\r\n\r\n") in (400, 405)
        assert await server.ask("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == 400


async def test_names_of_the_certificate_are_names_of_the_server(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path) / GATEWAY_FOLDER
    stopping, listener = asyncio.Event(), bind_http("LISTEN", "127.0.0.1:0")
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
    trust = ssl.create_default_context(cafile=str(folder / AUTHORITY))
    serving = serve_http(
        Starlette(), listener, stopping, edge=Edge(), tls_folder=str(folder), grace_s=1.0
    )
    async with asyncio.TaskGroup() as group, aiohttp.ClientSession() as http:
        group.create_task(serving())
        for host, status in (("gateway.treadle", 404), ("evil.example", 400)):
            own = {"Host": host}
            async with http.get(
                url, ssl=trust, server_hostname="gateway.treadle", headers=own
            ) as response:
                assert response.status == status
        stopping.set()


def test_a_server_that_is_cancelled_again_and_again_lets_its_request_end_and_takes_no_more() -> (
    None
):
    """As where a background task fails while the gateway serves. On uvloop, as services run: a
    server that is cut off there goes on accepting."""

    async def scenario() -> None:
        entered, goes_on = asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Response:
            entered.set()
            await goes_on.wait()
            return PlainTextResponse("done")

        listener = bind_http("LISTEN", "127.0.0.1:0")
        port = listener.getsockname()[1]
        app = Starlette(routes=[Route("/", slow)])
        serve = serve_http(app, listener, asyncio.Event(), edge=Edge(), grace_s=60.0)
        serving = asyncio.create_task(serve())
        async with aiohttp.ClientSession() as http:
            asked = asyncio.ensure_future(http.get(f"http://127.0.0.1:{port}/"))
            await entered.wait()
            for _ in range(3):
                serving.cancel()
                await asyncio.sleep(0.05)
            with pytest.raises(OSError):
                while True:  # until uvicorn sees that it is to end
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    await asyncio.sleep(0.01)
            goes_on.set()
            async with await asked as response:
                assert await response.text() == "done"
        await asyncio.wait({serving})
        assert serving.cancelled()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 60.0))


async def test_a_request_that_the_grace_cuts_is_told_to_come_again() -> None:
    entered, stopping = asyncio.Event(), asyncio.Event()

    async def endless(request: Request) -> Response:
        entered.set()
        await asyncio.Event().wait()
        return Response()

    listener = bind_http("LISTEN", "127.0.0.1:0")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    app = Starlette(routes=[Route("/", endless)])
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        group.create_task(serve_http(app, listener, stopping, edge=Edge(), grace_s=0.0)())
        asked = asyncio.ensure_future(http.get(url))
        await entered.wait()
        stopping.set()
        async with await asked as response:
            answer = await response.json()
    assert (response.status, answer["error"]["code"]) == (503, 503)
