"""Calls an HTTP function: timeouts for scale to zero, retries that honour Retry-After, within the caller's time.

Owns: the HTTP session, and each function's patience and slots. Invariants: a call ends by its deadline, waits included;
redirects are not followed, so a call goes to the host that was allowed; a refused call (429, 502, 503, 504, no
connection) is sent again, one whose answer was lost only where the function is idempotent, always under the same
Idempotency-Key.

How long to wait for a function's first byte: long where it may have been scaled to zero, else as long as it was seen
to take.

Pure: time is given. Warm and cold waits are learned as TCP learns its retransmission timeout (Jacobson 1988; RFC 6298):
mean plus four mean deviations. A function that did not answer in time is taken to be cold, so the next wait is long."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import tenacity
from opentelemetry import propagate

from treadle_tools.remote.function import CallFailed, HttpFunction
from treadle_tools.remote.gate import Gate, Passage, Verdict

MEAN_SHARE = 1 / 8  # of the newest wait in the mean, RFC 6298
DEVIATION_SHARE = 1 / 4
DEVIATIONS = 4
SHORTEST_WARM_S = 5.0  # a pause of a garbage collector or a busy node is no death
SHORTEST_COLD_S = 20.0  # an image may have to be pulled this time


@dataclass
class _Learned:
    mean_s: float = 0.0
    deviation_s: float = 0.0
    count: int = 0

    def add(self, waited_s: float) -> None:
        if self.count == 0:
            self.mean_s, self.deviation_s = waited_s, waited_s / 2
        else:
            self.deviation_s += DEVIATION_SHARE * (abs(waited_s - self.mean_s) - self.deviation_s)
            self.mean_s += MEAN_SHARE * (waited_s - self.mean_s)
        self.count += 1

    @property
    def longest_s(self) -> float:
        return self.mean_s + DEVIATIONS * self.deviation_s


class Patience:
    """See the module. cold_s: the longest wait at all. idle_s: without an answer for so long it may be cold."""

    def __init__(self, cold_s: float, idle_s: float) -> None:
        self._cold_s = cold_s
        self._idle_s = idle_s
        self._warm = _Learned()
        self._cold = _Learned()
        self._answered_at_s: float | None = None  # None: it never did, or failed since

    def is_cold(self, now_s: float) -> bool:
        """Whether it may have to start."""
        return self._answered_at_s is None or now_s - self._answered_at_s > self._idle_s

    def longest_s(self, now_s: float) -> float:
        """How long a call that begins now waits for its first byte."""
        if self.is_cold(now_s):
            learned_s = max(self._cold.longest_s, SHORTEST_COLD_S) if self._cold.count else self._cold_s
        elif self._warm.count:
            learned_s = max(self._warm.longest_s, SHORTEST_WARM_S)
        else:
            learned_s = self._cold_s  # one cold answer says nothing of warm ones
        return min(learned_s, self._cold_s)

    def answered(self, began_s: float, now_s: float) -> None:
        """A call that began then has its first byte now."""
        (self._cold if self.is_cold(began_s) else self._warm).add(now_s - began_s)
        self._answered_at_s = now_s

    def failed(self) -> None:
        """A call got no byte in time, or no connection: the next one waits as for a cold one, its whole time."""
        self._answered_at_s = None
        self._cold = _Learned()


AWAY = frozenset({502, 503, 504})
RETRIED = AWAY | {429}
FIRST_PAUSE_S = 0.2  # drawn from 0 to this, doubling: full jitter
LONGEST_PAUSE_S = 20.0
QUOTED_CHARS = 300  # of a refusal's body


@dataclass(frozen=True)
class Reply:
    """An answer of status 2xx. tries: it took. waited_s: of them, until the last began."""

    body: bytes
    content_type: str
    tries: int = 1
    waited_s: float = 0.0


class Caller:
    """See the module. environment: where headers' secrets are; clock: seconds that never fall."""

    def __init__(self, gate: Gate, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._gate = gate
        self._environment = environment
        self._clock = clock
        self._patience: dict[str, Patience] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=True, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        """Breaks what is under way."""
        await self._session.close()

    async def call(self, function: HttpFunction, arguments: Any, within_s: float, provider: str = "") -> Reply:
        """The answer to `arguments`. Raises CallFailed, at the latest when `within_s` are over.

        provider: whose limits each try counts against.
        """
        began = self._clock()
        headers = self._headers(function)
        slots = self._slots.setdefault(function.url, asyncio.Semaphore(function.at_once))
        tries = 0
        waited_s = 0.0

        async def attempt() -> Reply:
            nonlocal tries, waited_s
            async with slots, self._gate.passage(provider, within_s - (self._clock() - began)) as passage:
                tries += 1
                waited_s = self._clock() - began
                return await self._once(function, arguments, headers, within_s - waited_s, passage)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, CallFailed) and error.again),
            stop=tenacity.stop_after_attempt(function.tries) | tenacity.stop_before_delay(within_s),
            wait=_pause_s,
            reraise=True,
        )
        try:
            async with asyncio.timeout(within_s):
                reply: Reply = await retrying(attempt)
        except CallFailed as failed:
            failed.tries = tries
            raise
        except TimeoutError:
            failure = CallFailed(f"no answer within {within_s:g} s")
            failure.tries, failure.timed_out = tries, True
            raise failure from None
        return replace(reply, tries=tries, waited_s=waited_s)

    def _headers(self, function: HttpFunction) -> dict[str, str]:
        headers = {"Idempotency-Key": uuid.uuid4().hex, **function.headers}
        for name, variable in function.headers_from_env.items():
            headers[name] = self._environment[variable]
        propagate.inject(headers)
        return headers

    async def _once(
        self,
        function: HttpFunction,
        arguments: Any,
        headers: Mapping[str, str],
        left_s: float,
        passage: Passage,
    ) -> Reply:
        """One attempt; says in `passage` how it went."""
        patience = self._patience.setdefault(function.url, Patience(function.cold_s, function.idle_s))
        began = self._clock()
        # Where a lost answer cannot be asked for again, all there is to gain is to wait for it.
        silence_s = patience.longest_s(began) if function.learns and function.idempotent else function.cold_s
        timeout = aiohttp.ClientTimeout(total=max(left_s, 0.001), sock_connect=function.connect_s, sock_read=silence_s)
        body = {"params": _query(arguments)} if function.method == "GET" else {"json": arguments}
        try:
            async with self._session.request(
                function.method, function.url, headers=headers, timeout=timeout, allow_redirects=False, **body
            ) as response:
                if response.status in AWAY:
                    patience.failed()  # it is a proxy that answers: the function may still have to start
                elif response.status not in RETRIED:
                    patience.answered(began, self._clock())
                passage.verdict = Verdict.SERVED
                content = await _content(response, function.response_bytes)
                return _reply(response, content, passage)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            patience.failed()
            passage.verdict = Verdict.FAILED
            raise CallFailed(f"no connection to {function.url}: {error}", again=True) from error
        except aiohttp.SocketTimeoutError as error:
            patience.failed()
            passage.verdict = Verdict.FAILED
            raise CallFailed(f"{function.url} was silent for {silence_s:.1f} s", again=function.idempotent) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            patience.failed()
            passage.verdict = Verdict.FAILED
            raise CallFailed(f"{function.url} broke off: {error!r}", again=function.idempotent) from error


def _pause_s(state: tenacity.RetryCallState) -> float:
    """Full jitter over an exponential bound, and at least what the function asked for."""
    jittered = tenacity.wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)(state)
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = error.retry_after_s if isinstance(error, CallFailed) else None
    return max(jittered, asked_s or 0.0)


async def _content(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body. Raises CallFailed for one that is longer than `most`."""
    content = bytearray()
    async for piece in response.content.iter_chunked(64 * 1024):
        content += piece
        if len(content) > most:
            raise CallFailed(f"{response.url} answered with more than {most} bytes")
    return bytes(content)


def _reply(response: aiohttp.ClientResponse, content: bytes, passage: Passage) -> Reply:
    said = " ".join(content[:QUOTED_CHARS].decode(errors="replace").split())
    refusal = f"HTTP {response.status} from {response.url}: {said}"
    if response.status in RETRIED:
        passage.verdict = Verdict.REFUSED if response.status == 429 else Verdict.FAILED
        passage.retry_after_s = retry_after_s(response.headers.get("Retry-After", ""), time.time())
        if passage.retry_after_s is not None:
            refusal = f"{refusal} (retry after {passage.retry_after_s:g} s)"
        raise CallFailed(refusal, again=True, retry_after_s=passage.retry_after_s)
    if response.status >= 500:
        passage.verdict = Verdict.FAILED
    if not 200 <= response.status < 300:
        raise CallFailed(refusal)
    return Reply(content, response.content_type)


def retry_after_s(header: str, now_epoch_s: float) -> float | None:
    """Seconds of a Retry-After, which is a number of seconds or a date (RFC 9110, 10.2.3); None where it is neither."""
    if header.strip().isdigit():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - now_epoch_s)
    except ValueError:
        return None


def _query(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Texts as they are, everything else as JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
