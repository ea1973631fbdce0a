"""Functions that all HTTP forms share: read a body, find the session of a request, and end a call
whose caller has gone."""

import asyncio
import json
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from treadle_gateway.order import Refused

EVENT_STREAM = "text/event-stream"
# Headers that name a session, the first present one counts: SkyRL and prime-rl; SGLang's gateway.
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
MOST_COPIES = 1024  # most answers to one prompt

T = TypeVar("T")


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
