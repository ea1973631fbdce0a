"""Read what all HTTP forms share of a request, and hold a generation's order and its output.

A request of any form becomes orders; tokens and an end come back. A call whose caller has gone is
ended.
"""

import asyncio
import json
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from starlette.requests import Request
from treadle import Sampling, VersionSpan
from treadle_runtime.http.sglang import SAMPLING

Finish = Literal["stop", "length", "abort"]
HIGHEST_ID = 2**31 - 1  # logprob of a token
EVENT_STREAM = "text/event-stream"
# Headers that name a session, the first present one counts: SkyRL and prime-rl; SGLang's gateway.
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
MOST_COPIES = 1024  # most answers to one prompt
# What the mesh does not carry, under the same names in all forms, and the value that changes
# nothing.
PENALTIES: Mapping[str, float] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}

T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """One generation. session: whose trajectory it belongs to; empty: found by its tokens. prompt:
    the whole context, as token ids, which nobody changes. rid: name by which it may be aborted.
    Raises Refused for a value of the wrong kind or outside its range."""

    session: str
    prompt: list[int]
    sampling: Sampling
    rid: str

    def __post_init__(self) -> None:
        if not self.prompt:
            raise Refused("the prompt must have at least one token")
        if not isinstance(self.rid, str):
            raise Refused(f"rid: must be a text, is {self.rid!r}")
        for name, value in vars(self.sampling).items():
            if value is not None and (problem := SAMPLING[name].problem(value)):
                raise Refused(f"{name}: {problem}")


@dataclass(frozen=True)
class Tokens:
    """New tokens of a generation. logprobs: one for each token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weight_version: str


@dataclass(frozen=True)
class Ended:
    """The end of a generation. trajectory_id: empty where the mesh was away."""

    finish: Finish
    trajectory_id: str = ""
    cached_tokens: int = 0


@dataclass
class Output:
    """Tokens of a generation so far, and its end. spans: of weight versions, over its tokens."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    ended: Ended | None = None

    def add(self, event: Tokens | Ended) -> None:
        """Take the next event."""
        if isinstance(event, Ended):
            self.ended = event
            return
        start, end = len(self.token_ids), len(self.token_ids) + len(event.token_ids)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if self.spans and self.spans[-1].weight_version == event.weight_version:
            self.spans[-1] = VersionSpan(event.weight_version, self.spans[-1].start_token, end)
        elif start < end:
            self.spans.append(VersionSpan(event.weight_version, start, end))


def read_tokens(name: str, given: object) -> list[int]:
    """Return the value of a field that holds token ids. Raises Refused."""
    if (
        isinstance(given, list)
        and set(map(type, given)) == {int}
        and min(given) >= 0
        and max(given) <= HIGHEST_ID
    ):
        return given
    raise Refused(f"{name}: must be a list of token ids from 0 to {HIGHEST_ID}, at least one")


def read_stops(given: Mapping[str, object]) -> dict[str, Any]:
    """Return Sampling's stop and stop_token_ids, which have these names in all forms. Raises
    Refused."""
    stop, ids = given.get("stop") or [], given.get("stop_token_ids") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not isinstance(ids, list):
        raise Refused("stop, stop_token_ids: must be lists")
    return {"stop": tuple(stop), "stop_token_ids": tuple(ids)}


class Refused(Exception):  # noqa: N818 - what happened to the request
    """Raised where the request cannot be served as it is; the message names the field and what
    would be right."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class CallerGone(Exception):  # noqa: N818 - what happened
    """Raised where the caller closed the connection before the answer."""


def read_body(raw: bytes) -> dict[str, Any]:
    """Return a request's JSON object. Raises Refused."""
    try:
        body = json.loads(raw or b"{}")
    except ValueError as error:
        raise Refused(f"the body must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    return body


def session_of(request: Request, body: Mapping[str, Any]) -> str:
    """Return the session that a request names; empty where it names none."""
    for header in SESSION_HEADERS:
        if value := request.headers.get(header):
            return value
    nvext = body.get("nvext")
    context = nvext.get("agent_context") if isinstance(nvext, dict) else None
    found = (
        body.get("session_id")
        or (context.get("trajectory_id") if isinstance(context, dict) else "")
        or ""
    )
    if not isinstance(found, str):
        raise Refused(f"session_id: must be a text, is {found!r}")
    return found


async def run_unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the caller closes the connection. Raises
    CallerGone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    waits: set[Awaitable[Any]] = {working, gone}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if not working.done():
            raise CallerGone
        try:
            return await working
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first request of a batch that was refused
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
