"""Forward a request to an engine as it is, and its answer to the caller as it comes.

The sidecar does not know of these requests, and can neither hold nor end them. So the gateway does:
they wait while an engine is paused, asleep or without whole weights, and whoever changes an engine
ends them first, or waits for them.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from treadle_gateway.engines import EngineAway, Engines
from treadle_gateway.http.answers import run_unless_gone
from treadle_gateway.order import Order, Refused

log = structlog.get_logger()

T = TypeVar("T")
AGAIN_S = 1.0  # an engine forgets the abort of a request that it does not have yet


@dataclass(frozen=True, eq=False)
class _Forwarded:
    """A request that an engine has."""

    rids: list[str]
    url: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, eq=False)
class _Change:
    """A change of engines, during which they get no requests."""

    urls: Collection[str]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """Forwards requests that the mesh does not carry, and so does not schedule. until_runs: awaited
    with an engine's URL before a request is sent there. count: called for each request."""

    def __init__(
        self,
        engines: Engines,
        until_runs: Callable[[str], Awaitable[None]],
        count: Callable[[], None],
    ) -> None:
        self._engines, self._until_runs, self._count = engines, until_runs, count
        self._running: set[_Forwarded] = set()
        self._changes: set[_Change] = set()

    async def forward(self, request: Request, raw: bytes, session: str) -> Response:
        """Return the engine's answer. Raises Refused where no engine answers, CallerGone."""
        rids, raw = _with_rids(raw)
        path = request.url.path.removeprefix(f"/engines/{request.path_params.get('engine_id')}")
        path += f"?{request.url.query}" if request.url.query else ""

        async def attempt() -> Response:
            async with AsyncExitStack() as stack:
                url = await stack.enter_async_context(self._admit(session, rids))
                exchange = self._engines.request(request.method, url, path, raw=raw)
                response = await stack.enter_async_context(exchange)
                kind = response.headers.get("content-type")
                return _Relay(response.content.iter_any(), response.status, kind, stack.pop_all())

        return await run_unless_gone(request, self._send(attempt))

    async def ask(self, order: Order, body: Mapping[str, Any]) -> Any:
        """Return an engine's answer to SGLang's /generate with the order's rid. Raises Refused."""

        async def attempt() -> Any:
            async with self._admit(order.session, [order.rid]) as url:
                return await self._engines.ask(
                    "POST", "/generate", dict(body) | {"rid": order.rid}, url
                )

        return await self._send(attempt)

    async def _send(self, attempt: Callable[[], Awaitable[T]]) -> T:
        self._count()
        try:
            return await self._engines.until_sent(attempt)
        except EngineAway as error:
            raise Refused(str(error), 503) from error

    async def abort(self, rid: str, url: str | None) -> int:
        """End the requests whose rid begins with `rid`, all where it is empty, with the tokens that
        they have. url: only those of this engine. Return how many."""
        found = [
            (each, request.url)
            for request in self._running
            for each in request.rids
            if each.startswith(rid) and url in (None, request.url)
        ]

        async def end(each: str, at: str) -> None:
            try:
                await self._engines.ask("POST", "/abort_request", {"rid": each}, at)
            except (EngineAway, Refused) as error:
                log.warning("a forwarded request was not aborted", rid=each, error=str(error))

        async with asyncio.TaskGroup() as group:
            for each, at in found:
                group.create_task(end(each, at))
        return len(found)

    @asynccontextmanager
    async def keep_off(self, urls: Collection[str], *, abort: bool) -> AsyncIterator[None]:
        """Keep forwarded requests off these engines during the block. abort: end those that run,
        rather than wait."""
        change = _Change(urls)
        self._changes.add(change)
        try:
            if abort:
                for url in urls:
                    await self.abort("", url)
            while running := [request for request in self._running if request.url in urls]:
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S if abort else None):
                        await running[0].ended.wait()
                        continue
                await self.abort("", running[0].url)
            yield
        finally:
            self._changes.discard(change)
            change.ended.set()

    @asynccontextmanager
    async def _admit(self, session: str, rids: list[str]) -> AsyncGenerator[str, None]:
        """Yield the URL of an engine that has the request during the block. Raises EngineAway."""
        url = self._engines.choose(session)
        await self._until_runs(url)
        while changes := [change for change in self._changes if url in change.urls]:
            await changes[0].ended.wait()
            await self._until_runs(url)
        request = _Forwarded(rids, url)
        self._running.add(request)
        try:
            yield url
        finally:
            self._running.discard(request)
            request.ended.set()


class _Relay(StreamingResponse):
    """Response that releases what it holds once it has been sent, or cannot be."""

    def __init__(
        self, content: AsyncIterator[bytes], status: int, kind: str | None, held: AsyncExitStack
    ) -> None:
        super().__init__(content, status, media_type=kind)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


def _with_rids(raw: bytes) -> tuple[list[str], bytes]:
    """Return the rids of a body of JSON, and the body with one where it had none."""
    body = json.loads(raw)
    if given := body.get("rid"):
        rids = given if isinstance(given, list) else [given]
        if not all(isinstance(rid, str) for rid in rids):
            raise Refused(f"rid: must be a text, or a list of them, is {given!r}")
        return rids, raw
    rid = uuid.uuid4().hex
    return [rid], json.dumps(body | {"rid": rid}).encode()
