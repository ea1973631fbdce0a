"""Call the engines' own HTTP servers, for all requests while the mesh is away, and for what the
mesh does not carry.

While the mesh is away a session stays on its engine, where its KV is, and a new one goes to the
engine with the fewest requests of this gateway. The engines are those that the mesh named last.
"""

import asyncio
import json
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
from treadle import Sampling

from treadle_gateway.mesh import MeshLink
from treadle_gateway.order import Ended, Order, Refused, Tokens

ANSWER_TIMEOUT_S = 10.0
SILENT_S = 600.0  # silence of a stream; longer than the prefill of any context
LONGEST_LINE_BYTES = 4 * 1024 * 1024
REMEMBERED_SESSIONS = 100_000
AVOIDED_S = 5.0  # how long requests avoid an engine that did not answer, while another one answers
_LOST = (aiohttp.ClientError, ConnectionError, TimeoutError, asyncio.IncompleteReadError)
# Errors that an answer raises which SGLang would not give.
_BROKEN = (LookupError, TypeError, ValueError)

T = TypeVar("T")


class EngineAway(Exception):  # noqa: N818 - what happened
    """Raised where an engine does not answer, or broke off. unsent: it cannot have got the
    request."""

    def __init__(self, message: str, *, unsent: bool = False) -> None:
        super().__init__(message)
        self.unsent = unsent


class Engines:
    """The HTTP servers of the engines that `mesh` has named."""

    def __init__(self, mesh: MeshLink) -> None:
        self._mesh = mesh
        self._of_session: OrderedDict[str, str] = OrderedDict()  # URL of the session's engine
        self._running: Counter[str] = Counter()  # how many requests of this gateway run, by URL
        self._failed: dict[str, float] = {}  # when an engine did not answer, by URL
        self._http = aiohttp.ClientSession(
            # SGLang closes connections that are idle for 5 s
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            read_bufsize=LONGEST_LINE_BYTES,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=ANSWER_TIMEOUT_S, sock_read=SILENT_S
            ),
        )

    async def close(self) -> None:
        """Close all connections, also those of running requests."""
        await self._http.close()

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the engines that report one, without those that are drained unless all
        are."""
        told = [engine for engine in self._mesh.engines.values() if engine.url]
        return [engine.url for engine in told if not engine.draining] or [
            engine.url for engine in told
        ]

    def choose(self, session: str) -> str:
        """Return the URL of the session's engine, or of the one with the fewest requests. Raises
        EngineAway."""
        urls = self.urls
        if not urls:
            some = "no engine has told the URL of its HTTP server"
            raise EngineAway(some if self._mesh.engines else "no engine is registered yet")
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
        """Yield tokens as they come, then the end. Raises EngineAway, and Refused where the engine
        refuses."""
        body = {
            "rid": order.rid,
            "input_ids": order.prompt,
            "sampling_params": engine_sampling(order.sampling),
            "stream": True,
            "return_logprob": True,
        }
        received = 0
        async with self.request("POST", self.choose(order.session), "/generate", body) as response:
            if response.status != 200:
                raise Refused(await error_of(response), response.status)
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                answer = json.loads(line[6:])
                if "error" in answer:
                    raise Refused(str(answer["error"].get("message", answer["error"])))
                meta, ids = answer["meta_info"], answer["output_ids"]
                count, entries = meta["completion_tokens"], meta.get("output_token_logprobs") or []
                # An answer has all tokens so far, or with --incremental-streaming-output the new
                # ones alone.
                start = received if len(ids) >= count else 0
                new = slice(start, start + count - received)
                if count > received:
                    yield Tokens(
                        ids[new], [entry[0] for entry in entries[new]], meta["weight_version"]
                    )
                received = count
                if meta["finish_reason"]:
                    yield Ended(
                        meta["finish_reason"]["type"], cached_tokens=meta.get("cached_tokens") or 0
                    )
                    return
        raise EngineAway("the engine ended a stream without saying why")

    def _has_failed(self, url: str) -> bool:
        return time.monotonic() - self._failed.get(url, -AVOIDED_S) < AVOIDED_S

    async def until_sent(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what `attempt`, which chooses an engine, returns; repeat it where that engine
        takes no connection. Raises what the last attempt does."""
        for _ in self.urls[1:]:
            try:
                return await attempt()
            except EngineAway as error:
                if not error.unsent:
                    raise
        return await attempt()

    async def ask_any(self, method: str, path: str, body: object = None) -> Any:
        """Return the JSON with which one engine answers. Raises EngineAway, Refused."""
        return await self.until_sent(lambda: self.ask(method, path, body, self.choose("")))

    async def ask(self, method: str, path: str, body: object, url: str) -> Any:
        """Return the JSON with which this engine answers. Raises EngineAway, Refused."""
        async with self.request(method, url, path, body) as response:
            if response.status != 200:
                raise Refused(await error_of(response), response.status)
            return (
                await response.json()
                if response.content_type == "application/json"
                else await response.text()
            )

    @asynccontextmanager
    async def request(
        self, method: str, url: str, path: str, body: object = None, raw: bytes | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Run one HTTP exchange with one engine. raw: the body as it is, in place of JSON. Raises
        EngineAway."""
        headers = {"Content-Type": "application/json"} if raw is not None else None
        self._running[url] += 1
        try:
            async with self._http.request(
                method,
                f"{url}{path}",
                json=body if raw is None else None,
                data=raw,
                headers=headers,
            ) as response:
                self._failed.pop(url, None)
                yield response
        except _LOST as error:
            self._failed[url] = time.monotonic()
            unsent = isinstance(error, aiohttp.ClientConnectorError)
            raise EngineAway(
                f"the engine at {url} does not answer {path}: {error!r}", unsent=unsent
            ) from error
        except _BROKEN as error:
            raise EngineAway(
                f"the engine at {url} answers {path} as SGLang would not: {error!r}"
            ) from error
        finally:
            self._running[url] -= 1


def engine_sampling(sampling: Sampling) -> Mapping[str, object]:
    """Return SGLang's sampling_params."""
    given = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "sampling_seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    return {name: value for name, value in given.items() if value is not None}


async def error_of(response: aiohttp.ClientResponse) -> str:
    """Return the reason that an engine gives for its refusal."""
    text = await response.text()
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return text[:400]
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(
        error.get("message", error) if isinstance(error, dict) else answer.get("message") or answer
    )
