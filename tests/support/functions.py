"""HTTP functions on loopback, served by aiohttp: one that starts from zero, refuses, dies, and what
it was asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from support.conditions import SHUTDOWN_S
from support.processes import ServiceProcess, StartService, free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


OVER = web.AppKey("over", asyncio.Event)  # set as the server stops


class FunctionServer:
    """One function. It answers what `answers` says, in order, then with `last` for ever; it is
    asked at `url`.

    cold_s: how long the first request, and the first after it went to sleep, waits for it to start.
    """

    def __init__(self, last: Handler, *answers: Handler, cold_s: float, port: int) -> None:
        self._last = last
        self._answers = list(answers)
        self._cold_s = cold_s
        self._asleep = True
        self._now = 0
        self.requests: list[web.Request] = []
        self.bodies: list[Any] = []
        self.most_at_once = 0
        self.url = f"http://127.0.0.1:{port}/ask"

    def sleep(self) -> None:
        """Scale to zero: the next request has to wait."""
        self._asleep = True

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        self.requests.append(request)
        self.bodies.append(await request.json() if request.can_read_body else dict(request.query))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            if self._asleep:
                await asyncio.sleep(self._cold_s)
                self._asleep = False
            return await (self._answers.pop(0) if self._answers else self._last)(request)
        finally:
            self._now -= 1


@asynccontextmanager
async def function(
    last: Handler, *answers: Handler, cold_s: float = 0.0, port: int = 0
) -> AsyncIterator[FunctionServer]:
    """A function that listens; afterwards its port refuses connections."""
    port = port or free_port()
    server = FunctionServer(last, *answers, cold_s=cold_s, port=port)
    app = web.Application()
    over = app[OVER] = asyncio.Event()
    app.add_routes([web.route("*", "/{path:.*}", server.serve)])
    runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield server
    finally:
        over.set()
        await runner.cleanup()


def says(value: Any, status: int = 200, **headers: str) -> Handler:
    """Answers with plain text, or with JSON where it is no text; of headers, `_` stands for `-`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(value, str):
            return web.Response(text=value, status=status, headers=named)
        return web.json_response(value, status=status, headers=named)

    return answer


def breaks_off() -> Handler:
    """Ends the connection in the middle of an answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


def is_silent() -> Handler:
    """Says nothing until its server stops."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.app[OVER].wait()
        return web.Response(text="too late")

    return answer


async def start_declared(
    start_service: StartService, folder: Path, document: dict[str, Any], **env: str
) -> ServiceProcess:
    """A tools service with what `document` declares, and no tools and rewards of its own."""
    path = folder / "functions.json"
    path.write_text(json.dumps(document))
    settings = {"FUNCTIONS": str(path), "FUNCTION_HOSTS": "127.0.0.1", "BUILTIN": "", "REWARDS": ""}
    return await start_service(
        "treadle_tools", {**{f"TREADLE_TOOLS_{k}": v for k, v in settings.items()}, **env}
    )
