"""Call the engines' own HTTP servers: for all requests while the mesh is away, and for what the
mesh does not carry.

While the mesh is away a session stays on its engine, where its KV is, and a new one goes to the
engine with the fewest requests of this gateway. The engines are those that the mesh named last.

The sidecar does not know of requests that the gateway forwards, and can neither hold nor end them.
So the gateway does: they wait while an engine is paused, asleep or without whole weights, and
whoever changes an engine ends them first, or waits for them.
"""

import asyncio
import hashlib
import json
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import structlog
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from treadle import Sampling
from treadle_runtime.http.sglang import (
    EngineClient,
    EngineLost,
    EngineRefused,
    EngineRequest,
    Limits,
    open_session,
    sglang_sampling,
)

from treadle_gateway.mesh import MeshLink
from treadle_gateway.order import (
    NOT_FORWARDED,
    Bounds,
    Ended,
    Finish,
    Order,
    Refused,
    Tokens,
    run_unless_gone,
)

log = structlog.get_logger()

# An engine answers a question late while it prefills; 600 s are longer than the prefill of any
# context.
LIMITS = Limits(connect_s=10.0, answer_s=600.0, silence_s=600.0)
LOOK = Limits(connect_s=2.0, answer_s=2.0)  # whether an engine is there at all
NO_EXPERTS = (
    "routed_experts: the engines tell none that fit this model; start SGLang with "
    "--enable-return-routed-experts, and set TREADLE_GATEWAY_TOKENIZER to the model's folder"
)
# Fields that an engine compiles into a grammar; SGLang's errors do not name them.
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "response_format", "tools")
REMEMBERED_SESSIONS = 100_000
UNREACHABLE_S = 60.0  # so long streams do not wait for engines that the gateway cannot reach
AVOIDED_S = 5.0  # how long requests avoid an engine that did not answer, while another one answers
MOST_FAILURES = 5  # engines that fail at a request in a row: it may be what upsets them
LEAST_FAILURE = 500  # status of HTTP for which an engine is to blame, and not the request
REMEMBERED_ENDINGS = 10_000
AGAIN_S = 1.0  # an engine forgets the abort of a request that it does not have yet

T = TypeVar("T")


class Engines:
    """The HTTP servers of the engines that `mesh` has named. key: SGLang's, of all of them; empty:
    none."""

    def __init__(self, mesh: MeshLink, key: str = "") -> None:
        self._mesh = mesh
        self._of_session: OrderedDict[str, str] = OrderedDict()  # URL of the session's engine
        self._running: Counter[str] = Counter()  # how many requests of this gateway run, by URL
        self._failed: dict[str, float] = {}  # when an engine did not answer, by URL
        self._bounds: dict[str, Bounds] = {}  # by URL, since the engine answered last
        self._unreachable_until_s = 0.0
        self._session = open_session(key)

    async def close(self) -> None:
        """Close all connections, also those of running requests."""
        await self._session.close()

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the engines that report one, without those that are drained unless all
        are."""
        known = [engine for engine in self._mesh.engines.values() if engine.url]
        return [engine.url for engine in known if not engine.draining] or [
            engine.url for engine in known
        ]

    def choose(self, session: str) -> str:
        """Return the URL of the session's engine, or of the one with the fewest requests. Raises
        EngineLost."""
        urls = self.urls
        if not urls:
            some = "no engine has told the URL of its HTTP server"
            raise EngineLost(some if self._mesh.engines else "no engine is registered yet")
        kept = self._of_session.get(session) if session else None
        if kept in urls and not self._has_failed(kept):
            self._of_session.move_to_end(session)
            return kept
        chosen = min(urls, key=lambda url: (self._has_failed(url), self._running[url]))
        if session:
            self._of_session[session] = chosen
            if len(self._of_session) > REMEMBERED_SESSIONS:
                self._of_session.popitem(last=False)
        return chosen

    async def generate(self, order: Order) -> AsyncGenerator[Tokens | Ended, None]:
        """Yield tokens as they come, then the end. Raises EngineLost, and Refused where the engine
        refuses, or would not survive it."""
        url = self.choose(order.session)
        bounds = await self.bounds(url)
        bounds.require_order(order)
        request = EngineRequest(order.rid, order.prompt, engine_sampling(order.sampling))
        async with self.calling(url) as engine, aclosing(engine.generate(request)) as chunks:
            engine.vocab_size = bounds.vocab_size
            async for chunk in chunks:
                if chunk.token_ids:
                    yield Tokens(chunk.token_ids, chunk.logprobs, chunk.weight_version)
                if chunk.finish:
                    yield Ended(cast(Finish, chunk.finish), cached_tokens=chunk.cached_tokens)

    async def bounds(self, url: str) -> Bounds:
        """Return what this engine survives. Raises EngineLost, Refused."""
        found = self._bounds.get(url)
        if found is None:
            async with self.calling(url) as engine:
                server, _, vocab_size = await engine.describe()
            found = Bounds(
                vocab_size,
                deterministic=bool(server.get("enable_deterministic_inference")),
                incremental=bool(server.get("incremental_streaming_output")),
                experts=bool(server.get("enable_return_routed_experts")),
            )
            self._bounds[url] = found
        return found

    async def are_incremental(self) -> bool:
        """Return whether an event of the engines' own streams has the new tokens alone; False, as
        by SGLang's default, where no engine answers the gateway."""
        if time.monotonic() < self._unreachable_until_s:
            return False
        try:
            return (await self.bounds(self.choose(""))).incremental
        except (EngineLost, Refused):
            self._unreachable_until_s = time.monotonic() + UNREACHABLE_S  # each try may take long
            return False

    async def is_gone(self, url: str) -> bool:
        """Return whether nothing listens at an engine's URL any more."""
        try:
            await EngineClient(url, self._session, LOOK).health()
        except EngineLost as error:
            return error.is_gone
        except EngineRefused:
            return False
        return False

    def _has_failed(self, url: str) -> bool:
        return time.monotonic() - self._failed.get(url, -AVOIDED_S) < AVOIDED_S

    async def until_sent(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what `attempt`, which chooses an engine, returns; repeat it where that engine
        takes no connection, or fails. Raises what the last attempt does."""
        failures = 0
        for _ in self.urls[1:]:
            try:
                return await attempt()
            except EngineLost as error:
                failures += error.loss == "failed"
                if error.loss not in ("unsent", "failed") or failures >= MOST_FAILURES:
                    raise
        return await attempt()

    async def ask_any(self, question: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Return what one engine answers. Raises Refused."""

        async def attempt() -> T:
            async with self.calling(self.choose("")) as engine:
                return await question(engine)

        try:
            return await self.until_sent(attempt)
        except EngineLost as error:
            raise Refused(str(error), 503) from error

    async def ask(self, url: str, question: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Return what this engine answers. Raises Refused."""
        try:
            async with self.calling(url) as engine:
                return await question(engine)
        except EngineLost as error:
            raise Refused(str(error), 503) from error

    @asynccontextmanager
    async def calling(self, url: str) -> AsyncGenerator[EngineClient, None]:
        """Yield a client of this engine for one request, which counts as running within the block.
        Raises EngineLost, and Refused where the engine refuses."""
        self._running[url] += 1
        try:
            yield EngineClient(url, self._session, LIMITS)
        except EngineLost as error:
            if error.loss != "garbled":
                self._failed[url] = time.monotonic()
            self._bounds.pop(url, None)  # another engine may start there
            raise
        except EngineRefused as error:
            if error.status >= LEAST_FAILURE:  # failing fast, it would have the fewest requests
                self._failed[url] = time.monotonic()
            else:
                self._failed.pop(url, None)
            raise Refused(str(error), error.status) from error
        else:
            self._failed.pop(url, None)
        finally:
            self._running[url] -= 1


def engine_sampling(sampling: Sampling) -> Mapping[str, object]:
    """Return SGLang's sampling_params."""
    return {**sglang_sampling(vars(sampling).items()), "no_stop_trim": True}


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
        # Requests, without their rids, while which an engine ended. One of them may be the cause.
        self._ended_engines: OrderedDict[bytes, None] = OrderedDict()

    async def forward(self, request: Request, body: dict[str, Any], session: str) -> Response:
        """Return the engine's answer. Raises Refused where no engine answers, where it would not
        survive the request, or where one ended during it; CallerGone."""
        # What requests nothing is left out: an engine may take it for a value.
        unset = {name for name in NOT_FORWARDED if body.get(name) is None or body[name] is False}
        body = {name: value for name, value in body.items() if name not in unset}
        rids = _rids(body)
        path = request.url.path.removeprefix(f"/engines/{request.path_params.get('engine_id')}")
        path += f"?{request.url.query}" if request.url.query else ""

        async def attempt() -> Response:
            async with AsyncExitStack() as stack:
                url = await stack.enter_async_context(self._admit(session, rids))
                engine = await stack.enter_async_context(self._send_to(url, body))
                # What was checked is sent, not the bytes, which may name a field twice.
                exchange = engine.forward(request.method, path, json.dumps(body).encode())
                response = await stack.enter_async_context(exchange)
                kind = response.headers.get("content-type")
                return _Relay(response.content.iter_any(), response.status, kind, stack.pop_all())

        try:
            return await run_unless_gone(request, self._send(attempt))
        except Refused as refusal:
            if "rammar" not in str(refusal):
                raise
            raise Refused(f"{_grammars(body)}: {refusal}") from refusal

    async def are_incremental(self) -> bool:
        """Return whether an event of the engines' own streams has the new tokens alone."""
        return await self._engines.are_incremental()

    async def ask(self, order: Order, body: Mapping[str, Any]) -> Any:
        """Return an engine's answer to SGLang's /generate with the order's rid. Raises Refused."""

        sent = {**body, "rid": order.rid}

        async def attempt() -> Any:
            async with self._admit(order.session, [order.rid]) as url:
                bounds = await self._engines.bounds(url)
                bounds.require_order(order)
                if body.get("return_routed_experts") and not bounds.experts:
                    raise Refused(NO_EXPERTS, 501)
                async with self._send_to(url, sent) as engine:
                    return await engine.generate_whole(sent)

        return await self._send(attempt)

    async def _send(self, attempt: Callable[[], Awaitable[T]]) -> T:
        self._count()
        try:
            return await self._engines.until_sent(attempt)
        except EngineLost as error:
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
                await self._engines.ask(at, lambda engine: engine.abort(each))
            except Refused as error:
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
    async def _send_to(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[EngineClient]:
        """Yield the client of an engine that survives the request, as far as is known. Raises
        Refused, EngineLost."""
        (await self._engines.bounds(url)).require_forwardable(body)
        named = {name: value for name, value in body.items() if name != "rid"}
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()
        if digest in self._ended_engines:
            raise Refused(
                "an engine ended while it ran this same request, so no other one gets it; change "
                "the request, or look into the log of the engine"
            )
        try:
            async with self._engines.calling(url) as engine:
                yield engine
        except EngineLost as error:
            if error.loss != "unsent" and await self._engines.is_gone(url):
                log.warning("an engine ended during a request that was forwarded", url=url)
                self._ended_engines[digest] = None
                if len(self._ended_engines) > REMEMBERED_ENDINGS:
                    self._ended_engines.popitem(last=False)
            raise

    @asynccontextmanager
    async def _admit(self, session: str, rids: list[str]) -> AsyncGenerator[str, None]:
        """Yield the URL of an engine that has the request during the block. Raises EngineLost."""
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


def _grammars(body: Mapping[str, Any]) -> str:
    """Return the names of a request's fields that make a grammar."""
    sampling = body.get("sampling_params")
    named = {**body, **sampling} if isinstance(sampling, dict) else body
    return ", ".join(name for name in GRAMMARS if named.get(name)) or "the grammar"


def _rids(body: dict[str, Any]) -> list[str]:
    """Return the rids of a request; give it one where it has none. Raises Refused."""
    given = body.get("rid") or uuid.uuid4().hex
    rids = given if isinstance(given, list) else [given]
    if not all(isinstance(rid, str) for rid in rids):
        raise Refused(f"rid: must be a text, or a list of them, is {given!r:.100}")
    body["rid"] = given
    return rids
