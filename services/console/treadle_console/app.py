"""Serve the page, its stream of changes, one trajectory, the interactive page on long tails, and
control over HTTP.

Nothing but `/api/control` changes the mesh. A browser runs only scripts of this origin
(Content-Security-Policy), and only requests that name this server are answered, so that a page of
somebody else cannot read it through a name that leads here. Control takes JSON from pages of this
server alone, with a key that no browser sends by itself.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc

from treadle_console import convert, tail_page
from treadle_console.control import Control
from treadle_console.feed import Feed

STATIC = Path(__file__).parent / "static"
CALL_S = 5.0
MOST_PAGES = 64  # most that are open at a time
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
SCHEMES = ("http", "https")  # a proxy in front uses the second
MOST_CONTROL_BYTES = 512  # most bytes of a request that changes something
HTTP_OF = {
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.PERMISSION_DENIED: 403,
}


class _SafeHeaders:
    """Middleware that adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((a.encode(), b.encode()) for a, b in HEADERS.items()),
                ]
            await send(message)

        await self._app(scope, receive, add)


class Pages:
    """The endpoints of the console, one for each path."""

    def __init__(
        self, feed: Feed, scheduler: scheduler_pb2_grpc.SchedulerServiceAsyncStub, control: Control
    ) -> None:
        self._feed, self._scheduler, self._control = feed, scheduler, control

    async def index(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def events(self, request: Request) -> Response:
        if self._feed.open >= MOST_PAGES:
            return _refuse(503, f"{MOST_PAGES} pages are open, which is the most: close one")
        last_id = request.headers.get("last-event-id", request.query_params.get("after", ""))
        return StreamingResponse(self._feed.events(last_id), media_type="text/event-stream")

    async def trajectory(self, request: Request) -> Response:
        asked = pb.GetTrajectoryRequest(
            trajectory_id=request.query_params.get("id", ""), history=True
        )
        try:
            said = await self._scheduler.GetTrajectory(asked, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return _refuse_as(error)
        return Response(convert.to_json(convert.history_view(said)), media_type="application/json")

    async def tail(self, request: Request) -> Response:
        try:
            return JSONResponse(tail_page.answer(dict(request.query_params)))
        except tail_page.QuestionError as error:
            return _refuse(400, str(error))

    async def control(self, request: Request) -> Response:
        """Pause, resume, drain or undrain: {"action", "engine"}. Return {"errors"} by engine."""
        if not self._control.offered:
            return _refuse(
                404, "this console changes nothing: start it with TREADLE_CONSOLE_CONTROL_KEY"
            )
        if request.headers.get("origin") not in [
            f"{scheme}://{request.headers['host']}" for scheme in SCHEMES
        ]:
            return _refuse(403, "Origin: must be this console's own page")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _refuse(415, "Content-Type: must be application/json")
        if not await self._control.admits(request.headers.get("authorization", "")):
            return _refuse(401, "the key is not that of this console (TREADLE_CONSOLE_CONTROL_KEY)")
        try:
            action, engine = await _read_action(request)
            return JSONResponse({"errors": await self._control.act(action, engine)})
        except ValueError as error:
            return _refuse(400, str(error))
        except grpc.aio.AioRpcError as error:
            return _refuse_as(error)


async def _read_action(request: Request) -> tuple[str, str]:
    """Return the action and the engine of a request. Raises ValueError."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_CONTROL_BYTES:
            raise ValueError(f"the body: must have {MOST_CONTROL_BYTES} bytes at most")
    asked = json.loads(body)
    found = (
        [asked.get(name, "") for name in ("action", "engine")] if isinstance(asked, dict) else []
    )
    if not found or not all(isinstance(each, str) for each in found):
        raise ValueError('the body: must be an object with "action" and "engine", both texts')
    return found[0], found[1]


def _refuse_as(error: grpc.aio.AioRpcError) -> Response:
    return _refuse(HTTP_OF.get(error.code(), 502), error.details() or error.code().name)


def _refuse(status: int, words: str) -> Response:
    return JSONResponse({"error": words}, status)


def make_app(pages: Pages, hosts: list[str]) -> Starlette:
    """Return the application. hosts: names under which browsers may reach it."""
    endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/": pages.index,
        "/api/events": pages.events,
        "/api/trajectory": pages.trajectory,
        "/api/tail": pages.tail,
    }
    routes: list[Any] = [Route(path, endpoint) for path, endpoint in endpoints.items()]
    routes.append(Route("/api/control", pages.control, methods=["POST"]))
    routes.append(Mount("/static", StaticFiles(directory=STATIC)))
    middleware = [
        Middleware(_SafeHeaders),
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
        Middleware(GZipMiddleware, minimum_size=1024),
    ]
    return Starlette(routes=routes, middleware=middleware)
