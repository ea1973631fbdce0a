"""Serve the page, its stream of changes, one trajectory, the interactive page on long tails, and
control over HTTP.

Nothing but `/api/control` changes the mesh, with a key that no browser sends by itself. Where the
console has a token, a browser presents it once, in the URL (`Login`). A browser runs only scripts
of this origin (Content-Security-Policy). `treadle_runtime.http.web` refuses pages of other origins,
and names that lead here and are not this server's.

Changes are server-sent events, at most two a second, each with what has changed. The id of an event
is the cursor after it, so that a browser which reconnects (Last-Event-ID) continues where it was.
An id from another process of the console is no cursor here: the page then begins anew.

The page on long tails plays a rollout of given lengths, with a cap and with more samples or
without. The core (`treadle_core.rollouts.tail`) computes the answer, for a seed that the page
names, so that two answers differ by what the user changed and not by chance.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_core.rollouts.redundancy import LatencyCurve
from treadle_core.rollouts.tail import (
    Tail,
    TailQuestion,
    expected_longest,
    longest_by_formula,
    play_tail,
)
from treadle_runtime.http.web import read_json, refuse_errors, refuse_plainly

from treadle_console import convert
from treadle_console.control import Control
from treadle_console.records import Cursor
from treadle_console.state import Mesh

PERIOD_S = 0.5  # between two messages to a page
HEARTBEAT_S = 10.0  # a page that receives nothing for longer takes the connection for lost
RETRY_MS = 1000  # after which a browser connects again


class Feed:
    """Streams of changes, one for each open page. epoch: names this process, of A-Z a-z 0-9.
    now_ms: the time, since the epoch."""

    def __init__(self, mesh: Mesh, epoch: str, stopping: asyncio.Event, now_ms: Any) -> None:
        self._mesh, self._epoch, self._stopping, self._now_ms = mesh, epoch, stopping, now_ms
        # messages of this revision, by what they follow
        self._made: dict[tuple[Cursor, int], tuple[str, Cursor]] = {}
        self.open = 0

    def cursor_of(self, event_id: str) -> Cursor | None:
        """Return the cursor that an id names; None where a page has to begin anew."""
        epoch, *numbers = event_id.split("-")
        if (
            epoch != self._epoch
            or len(numbers) != 3
            or not all(each.isascii() and each.isdigit() and len(each) < 20 for each in numbers)
        ):
            return None
        return Cursor(*map(int, numbers))

    async def events(self, last_id: str) -> AsyncIterator[str]:
        """Yield the text of one page's stream, from the event after `last_id` on; it ends with the
        service."""
        cursor = self.cursor_of(last_id)
        reset, cursor = cursor is None, cursor or Cursor()
        self.open += 1
        try:
            yield f"retry: {RETRY_MS}\n\n"
            quiet_s = HEARTBEAT_S  # so that a page learns at once that it is connected
            while not self._stopping.is_set():
                message, following = self._message(cursor)
                if following != cursor or reset or quiet_s >= HEARTBEAT_S:
                    begins = f'{{"reset":{json.dumps(reset)},"now_ms":{self._now_ms()},'
                    ids = "-".join(map(str, following))
                    yield f"id: {self._epoch}-{ids}\ndata: {begins}{message}\n\n"
                    cursor, reset, quiet_s = following, False, 0.0
                    if cursor.span < self._mesh.spans.end:  # more is waiting
                        continue
                quiet_s += PERIOD_S
                await self._pause()
        finally:
            self.open -= 1

    def _message(self, since: Cursor) -> tuple[str, Cursor]:
        """Return the rest of a message's object, and the cursor after it. Pages at the same cursor
        share one message."""
        key = since, self._mesh.revision
        if key not in self._made:
            self._made = {
                known: made for known, made in self._made.items() if known[1] == self._mesh.revision
            }
            delta, following = self._mesh.delta(since)
            self._made[key] = convert.to_json(delta)[1:], following
        return self._made[key]

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._stopping.wait()
        except TimeoutError:
            return


MOST_SAMPLES = 4_096  # most samples of all prompts: what a page draws, and a millisecond of work


class Asked(BaseModel):
    """Question that a page sends. oversample: samples that are started, over those that are
    trained. base_s, per_sequence_s: seconds of a decode step, and more for each sample in it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompts: int = Field(8, ge=1, le=256)
    samples: int = Field(16, ge=1, le=256)
    mean_tokens: float = Field(800.0, ge=1, le=1e6)
    variation: float = Field(1.0, ge=0.01, le=5)
    cap_percentile: float = Field(1.0, gt=0.5, le=1)
    oversample: float = Field(1.0, ge=1, le=4)
    base_s: float = Field(0.012, ge=1e-5, le=1)
    per_sequence_s: float = Field(0.0002, ge=0, le=0.1)
    seed: int = Field(0, ge=0, le=2**32 - 1)


class QuestionError(Exception):
    """A question that has no answer; the message names the field and what would be right."""


def answer_tail(words: dict[str, str]) -> dict[str, Any]:
    """Return the answer to a question. Raises QuestionError."""
    try:
        asked = Asked.model_validate(words)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise QuestionError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    started = math.ceil(round(asked.samples * asked.oversample, 9))
    if asked.prompts * started > MOST_SAMPLES:
        raise QuestionError(
            f"prompts: {asked.prompts} of {started} samples are more than {MOST_SAMPLES} together"
        )
    curve = LatencyCurve(
        (1.0, 2.0), (asked.base_s + asked.per_sequence_s, asked.base_s + 2.0 * asked.per_sequence_s)
    )
    normals = np.random.default_rng(asked.seed).standard_normal((asked.prompts, started))
    lengths = (asked.mean_tokens, asked.variation)
    patched = TailQuestion(
        asked.prompts, started, asked.samples, *lengths, asked.cap_percentile, curve
    )
    plain = TailQuestion(asked.prompts, asked.samples, asked.samples, *lengths, 1.0, curve)
    return {
        "asked": asked.model_dump(),
        "cap_tokens": None if math.isinf(patched.cap_tokens) else round(patched.cap_tokens),
        "patched": _view(play_tail(patched, normals)),
        "plain": _view(play_tail(plain, normals[:, : asked.samples])),
        "formula": longest_by_formula(asked.samples, asked.variation),
        "expected": expected_longest(asked.samples, asked.variation),
    }


def _view(tail: Tail) -> dict[str, Any]:
    return {
        "ends_s": np.round(tail.ends_s, 3).tolist(),
        "how": (tail.aborted + 2 * tail.cut).tolist(),  # 0 trained, 1 aborted, 2 cut at the cap
        "makespan_s": tail.makespan_s,
        "tax": tail.tax,
        "last_tenth": tail.last_tenth,
        "utilization": tail.utilization,
        "tokens": round(float(tail.tokens.sum())),
        "kept": tail.kept._asdict(),
    }


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
NO_LOGIN = (
    "open the URL with ?token= that the command printed which started this console (its "
    "TREADLE_CONSOLE_LOGIN_TOKEN)"
)
SCHEMES = ("http", "https")  # a proxy in front uses the second
MOST_BODY_BYTES = 512  # most bytes of a request that changes something
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


class Login:
    """Whom a console lets in. token: what a browser presents in the URL, which sets a cookie;
    empty: everybody is let in. listen: host:port of the page. Browsers send a cookie to all ports
    of a host, so its name has the port."""

    def __init__(self, token: str, listen: str) -> None:
        self.token, self.cookie = token, f"treadle-console-{listen.rpartition(':')[2]}"

    def admits(self, given: str | None) -> bool:
        """Return whether this is the token."""
        return given is not None and hmac.compare_digest(given.encode(), self.token.encode())


class _LoginCheck:
    """Middleware that refuses browsers without the token."""

    def __init__(self, app: ASGIApp, login: Login) -> None:
        self._app, self._login = app, login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._login.token:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        logs_in = self._login.admits(request.query_params.get("token"))
        if not (logs_in or self._login.admits(request.cookies.get(self._login.cookie))):
            await refuse_plainly(401, NO_LOGIN)(scope, receive, send)
            return
        value = f"{self._login.cookie}={self._login.token}; HttpOnly; SameSite=Strict; Path=/"

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"set-cookie", value.encode())]
            await send(message)

        await self._app(scope, receive, add if logs_in else send)


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
            return refuse_plainly(503, f"{MOST_PAGES} pages are open, which is the most: close one")
        last_id = request.headers.get("last-event-id", request.query_params.get("after", ""))
        return StreamingResponse(self._feed.events(last_id), media_type="text/event-stream")

    async def trajectory(self, request: Request) -> Response:
        wanted = pb.GetTrajectoryRequest(
            trajectory_id=request.query_params.get("id", ""), history=True
        )
        try:
            found = await self._scheduler.GetTrajectory(wanted, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return _refuse_as(error)
        return Response(convert.to_json(convert.history_view(found)), media_type="application/json")

    async def tail(self, request: Request) -> Response:
        try:
            return JSONResponse(answer_tail(dict(request.query_params)))
        except QuestionError as error:
            return refuse_plainly(400, str(error))

    async def control(self, request: Request) -> Response:
        """Pause, resume, drain or undrain: {"action", "engine"}. Return {"errors"} by engine."""
        if not self._control.offered:
            return refuse_plainly(
                404, "this console changes nothing: start it with TREADLE_CONSOLE_CONTROL_KEY"
            )
        if not await self._control.admits(request.headers.get("authorization", "")):
            return refuse_plainly(
                401, "the key is not that of this console (TREADLE_CONSOLE_CONTROL_KEY)"
            )
        try:
            action, engine = await _read_action(request)
            return JSONResponse({"errors": await self._control.act(action, engine)})
        except ValueError as error:
            return refuse_plainly(400, str(error))
        except grpc.aio.AioRpcError as error:
            return _refuse_as(error)


async def _read_action(request: Request) -> tuple[str, str]:
    """Return the action and the engine of a request. Raises ValueError."""
    wanted = await read_json(request)
    found = (
        [wanted.get(name, "") for name in ("action", "engine")] if isinstance(wanted, dict) else []
    )
    if not found or not all(isinstance(each, str) for each in found):
        raise ValueError('the body: must be an object with "action" and "engine", both texts')
    return found[0], found[1]


def _refuse_as(error: grpc.aio.AioRpcError) -> Response:
    return refuse_plainly(HTTP_OF.get(error.code(), 502), error.details() or error.code().name)


def make_app(pages: Pages, login: Login) -> Starlette:
    """Return the application."""
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
        Middleware(_LoginCheck, login=login),
        Middleware(GZipMiddleware, minimum_size=1024),
    ]
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: refuse_errors(refuse_plainly)},
    )
