"""Call tools and rewards that are HTTP functions, within the caller's time.

`FunctionTools` runs such a tool as one action; `Caller` makes the HTTP calls: it waits longer for a
function that may have been scaled to zero, retries, honours Retry-After, and counts each try
against the limits of the tool's provider.

Invariants: a call ends by its deadline, waits included. What the caller reads, errors included,
holds no secret of the operator: a function is called by its name and not by its URL, and secrets
that it sends back are removed. Redirects are not followed, so a call goes to the host that was
allowed. A refused call (429, 502, 503, 504, no connection) is sent again; a call whose answer was
lost is sent again only where the function is idempotent; always under the same Idempotency-Key.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import tenacity
from opentelemetry import propagate
from treadle_core.tools.action import Action
from treadle_core.tools.grants import SERVED, End, Ended
from treadle_core.tools.providers import BasicManager
from treadle_runtime.calls import remaining_s
from treadle_runtime.errors import Unavailable

from treadle_tools.actions import ActionScheduler, Facts
from treadle_tools.metrics import Meters
from treadle_tools.remote import HttpFunction
from treadle_tools.replies import Reply, result_of_function
from treadle_tools.resources import UNORDERED, RecentMeans
from treadle_tools.tool import Kind, Limits, Result, Status, Tool

ANSWER_MARGIN_S = 0.25  # of the caller's time, kept for sending it the result
FAILED = Ended(End.FAILED)
RETRY_S = 1.0  # before a reward's function is called again

AWAY = frozenset({502, 503, 504})
RETRIED = AWAY | {429}
FIRST_PAUSE_S = 0.2  # drawn from 0 to this, doubling: full jitter
LONGEST_PAUSE_S = 20.0
QUOTED_CHARS = 300  # of a refusal's body
REDACTED, SHORTEST_SECRET = b"[redacted]", 4
PIECE_BYTES = 64 * 1024  # of a body that is read

MEAN_SHARE = 1 / 8  # of the newest wait in the mean, RFC 6298
DEVIATION_SHARE = 1 / 4
DEVIATIONS = 4
SHORTEST_WARM_S = 5.0  # a pause of a garbage collector or a busy node is no failure
SHORTEST_COLD_S = 20.0  # an image may have to be pulled this time


class FunctionTools:
    """Runs tools that are HTTP functions.

    They need no cores, so they wait only for their provider.
    """

    def __init__(self, caller: "Caller", facts: Facts, meters: Meters) -> None:
        self._caller = caller
        self._facts = facts
        self._meters = meters
        self._learned_s = RecentMeans()

    async def run(
        self,
        tool: Tool,
        function: HttpFunction,
        arguments: Mapping[str, Any],
        limits: Limits,
        trajectory_id: str,
        job: str = "",
    ) -> Result:
        """Call `function`.

        job: whose share of its provider's limits each try takes. queue_s of the result: until its
        last try began; execution_s: of that try.

        Raises Unavailable for a reward whose function does not answer now.
        """
        arrived = time.monotonic()
        left_s = remaining_s()
        within_s = (
            limits.wall_s
            if left_s is None
            else min(limits.wall_s, max(left_s - ANSWER_MARGIN_S, 0.001))
        )
        await self._facts.started(trajectory_id, tool.name, self._learned_s.get(tool.name, 0.0))
        result = Result(Status.CRASHED, error="cancelled", alive=False)
        try:
            reply = await self._caller.call(function, arguments, within_s, job)
            total_s = time.monotonic() - arrived
            self._learned_s.add(tool.name, total_s)
            result = result_of_function(reply, tool, limits.output_bytes)
            result = replace(result, queue_s=reply.waited_s, execution_s=total_s - reply.waited_s)
            return result
        except CallFailed as failure:
            if failure.again and tool.kind is Kind.REWARD:
                # A trajectory that was scored badly by a busy network would be trained on.
                raise Unavailable(
                    "FUNCTION_UNAVAILABLE",
                    str(failure),
                    retry_after_s=failure.retry_after_s or RETRY_S,
                ) from failure
            tried = f" ({failure.tries} tries)" if failure.tries > 1 else ""
            status = Status.TIMED_OUT if failure.timed_out else Status.TOOL_ERROR
            result = Result(status, error=f"{failure}{tried}", queue_s=time.monotonic() - arrived)
            return result
        finally:
            await self._facts.finished(trajectory_id, tool.name, result)
            self._meters.record_action(tool, result)


@dataclass(eq=False)
class CallFailed(Exception):  # noqa: N818 - what happened, as callers speak of it
    """There is no answer; the message gives the reason.

    again: whether the call may be sent again. retry_after_s: seconds before which it may not, where
    the function sent them. tries: begun. timed_out: whether the caller's time was up. ended: how
    the try ended for the provider.
    """

    message: str
    again: bool = False
    retry_after_s: float | None = None
    tries: int = 1
    timed_out: bool = False
    ended: Ended = SERVED


@dataclass(eq=False)
class Caller:
    """Calls functions. Owns the HTTP session, and each function's patience and slots.

    Each try of a function that has a provider is an action of its own: the provider's Basic manager
    (ARL-Tangram §5.1) decides, for all jobs and tools, how many calls it takes, and how long it
    rests after it refused or failed. numbers: of actions, each once over all users of the
    scheduler. environment: where headers' secrets are.
    """

    scheduler: ActionScheduler
    providers: Mapping[str, BasicManager]
    numbers: Iterator[int]
    environment: Mapping[str, str]
    _patience: dict[str, "Patience"] = field(default_factory=dict, init=False)
    _slots: dict[str, asyncio.Semaphore] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        connector, no_cookies = aiohttp.TCPConnector(limit=0), aiohttp.DummyCookieJar()
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=no_cookies)

    async def close(self) -> None:
        """Break off calls under way."""
        await self._session.close()

    async def call(
        self, function: HttpFunction, arguments: Any, within_s: float, job: str = ""
    ) -> Reply:
        """Call the function with `arguments` and return its answer.

        Raises CallFailed, at the latest when `within_s` are over.
        """
        began = time.monotonic()
        headers = self._headers(function)
        slots = self._slots.setdefault(function.url, asyncio.Semaphore(function.at_once))
        tries = 0

        async def send() -> Reply:
            nonlocal tries
            tries += 1
            waited_s = time.monotonic() - began
            return replace(
                await self._send(function, arguments, headers, within_s - waited_s),
                waited_s=waited_s,
            )

        async def send_in_turn() -> Reply:
            async with slots:
                return await self._send_in_turn(
                    send, function.provider, within_s - (time.monotonic() - began), job
                )

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, CallFailed) and error.again
            ),
            stop=tenacity.stop_after_attempt(function.tries) | tenacity.stop_before_delay(within_s),
            wait=_pause_s,
            reraise=True,
        )
        try:
            async with asyncio.timeout(within_s):
                return await retrying(send_in_turn)
        except CallFailed as failed:
            failed.tries = tries
            raise
        except TimeoutError:
            raise CallFailed(
                f"no answer within {within_s:g} s", tries=tries, timed_out=True
            ) from None

    async def _send_in_turn(
        self, send: Callable[[], Awaitable[Reply]], provider: str, within_s: float, job: str
    ) -> Reply:
        """Send once the provider's limits allow it; where `provider` is empty, at once.

        Raises CallFailed where the provider rests for longer than `within_s`.
        """
        if not provider:
            return await send()
        manager = self.providers[provider]
        rest_s = manager.rests_s(time.monotonic())
        if rest_s > within_s:
            why = f"provider {provider!r} is left alone for another {rest_s:.1f} s"
            raise CallFailed(why, again=True, retry_after_s=rest_s)
        call_id = f"call-{next(self.numbers)}"
        async with self.scheduler.hold(
            Action(call_id, call_id, UNORDERED, manager.cost()), job
        ) as running:
            try:
                return await send()
            except CallFailed as failed:
                failure, running.ended = failed, failed.ended
        raise failure  # once the turn has ended: a turn that raises counts as abandoned

    def _headers(self, function: HttpFunction) -> dict[str, str]:
        headers = {"Idempotency-Key": uuid.uuid4().hex, **function.headers}
        for name, variable in function.headers_from_env.items():
            headers[name] = self.environment[variable]
        propagate.inject(headers)
        return headers

    def _redact(self, function: HttpFunction, body: bytes) -> bytes:
        """Return the body without the values of headers that come from the environment, whole or
        behind their scheme."""
        for variable in function.headers_from_env.values():
            secret = self.environment[variable].strip()
            for text in (secret, secret.rpartition(" ")[2]):
                body = (
                    body.replace(text.encode(), REDACTED) if len(text) >= SHORTEST_SECRET else body
                )
        return body

    async def _send(
        self, function: HttpFunction, arguments: Any, headers: Mapping[str, str], left_s: float
    ) -> Reply:
        patience = self._patience.setdefault(
            function.url, Patience(function.cold_s, function.idle_s)
        )
        began = time.monotonic()
        # Where a call cannot be repeated after a lost answer, only waiting can bring the answer.
        silence_s = (
            patience.longest_s(began)
            if function.learns and function.idempotent
            else function.cold_s
        )
        timeout = aiohttp.ClientTimeout(
            total=max(left_s, 0.001), sock_connect=function.connect_s, sock_read=silence_s
        )
        body = {"json": arguments}
        if function.method == "GET":
            texts = {
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in arguments.items()
            }
            body = {"params": texts}
        try:
            async with self._session.request(
                function.method,
                function.url,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                **body,
            ) as response:
                if response.status in AWAY:
                    # It is a proxy that answers: the function may still have to start
                    patience.failed()
                elif response.status not in RETRIED:
                    patience.answered(began, time.monotonic())
                content = await _read_body(function, response)
                return _reply(function, response, self._redact(function, content))
        except (aiohttp.ClientError, ConnectionError) as error:
            patience.failed()
            if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                why = f"no connection to {_name(function)} ({type(error).__name__})"
                raise CallFailed(why, again=True, ended=FAILED) from error
            silent = isinstance(error, aiohttp.SocketTimeoutError)
            problem = (
                f"was silent for {silence_s:.1f} s"
                if silent
                else f"broke off ({type(error).__name__})"
            )
            raise CallFailed(
                f"{_name(function)} {problem}", again=function.idempotent, ended=FAILED
            ) from error


def _pause_s(state: tenacity.RetryCallState) -> float:
    """Return a pause with full jitter over an exponential bound, at least as long as the function
    requests."""
    jittered = tenacity.wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)(
        state
    )
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = error.retry_after_s if isinstance(error, CallFailed) else None
    return max(jittered, asked_s or 0.0)


def _name(function: HttpFunction) -> str:
    return f"function {function.name!r}"


async def _read_body(function: HttpFunction, response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_chunked(PIECE_BYTES):
        content += piece
        if len(content) > function.response_bytes:
            raise CallFailed(
                f"{_name(function)} answered with more than {function.response_bytes} bytes"
            )
    return bytes(content)


def _reply(function: HttpFunction, response: aiohttp.ClientResponse, content: bytes) -> Reply:
    quoted = " ".join(content[:QUOTED_CHARS].decode(errors="replace").split())
    refusal = f"HTTP {response.status} from {_name(function)}: {quoted}"
    if response.status in RETRIED:
        after_s = retry_after_s(
            response.headers.get("Retry-After", ""), response.headers.get("Date", "")
        )
        if after_s is not None:
            refusal = f"{refusal} (retry after {after_s:g} s)"
        ended = Ended(End.REFUSED if response.status == 429 else End.FAILED, after_s)
        raise CallFailed(refusal, again=True, retry_after_s=after_s, ended=ended)
    if not 200 <= response.status < 300:
        raise CallFailed(refusal, ended=FAILED if response.status >= 500 else SERVED)
    return Reply(content, response.content_type)


def retry_after_s(header: str, date: str) -> float | None:
    """Return the seconds of a Retry-After, which is a number of seconds or a date (RFC 9110,
    10.2.3); None where it is neither. date: of the answer, by the clock of the same machine; this
    machine's clock takes its place where it is none.
    """
    if header.strip().isdigit():
        return float(header)
    try:
        until_s = parsedate_to_datetime(header).timestamp()
    except ValueError:
        return None
    try:
        now_s = parsedate_to_datetime(date).timestamp()
    except ValueError:
        now_s = time.time()
    return max(0.0, until_s - now_s)


@dataclass
class _Waits:
    """Mean and mean deviation of waits, as TCP learns its retransmission timeout (RFC 6298)."""

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
    """Longest wait for a function's first byte: long where it may have been scaled to zero, else as
    learned.

    cold_s: the longest wait at all. idle_s: after so long without an answer the function may be
    cold.
    """

    def __init__(self, cold_s: float, idle_s: float) -> None:
        self._cold_s = cold_s
        self._idle_s = idle_s
        self._warm = _Waits()
        self._cold = _Waits()
        self._answered_at_s: float | None = None  # None: it never did, or failed since

    def is_cold(self, now_s: float) -> bool:
        """Return whether the function may have to start."""
        return self._answered_at_s is None or now_s - self._answered_at_s > self._idle_s

    def longest_s(self, now_s: float) -> float:
        """Return how long a call that begins now waits for its first byte."""
        cold = self.is_cold(now_s)
        waits, shortest_s = (self._cold, SHORTEST_COLD_S) if cold else (self._warm, SHORTEST_WARM_S)
        if waits.count == 0:
            return self._cold_s  # one cold answer does not predict warm ones
        return min(max(waits.longest_s, shortest_s), self._cold_s)

    def answered(self, began_s: float, now_s: float) -> None:
        """Learn from a call that began at `began_s` and has its first byte now."""
        (self._cold if self.is_cold(began_s) else self._warm).add(now_s - began_s)
        self._answered_at_s = now_s

    def failed(self) -> None:
        """Note that a call got no byte in time, or no connection: the next call waits as for a cold
        function.
        """
        self._answered_at_s = None
        self._cold = _Waits()
