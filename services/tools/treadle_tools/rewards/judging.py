"""Asks a judge for the score of one trajectory.

Where a judge is asked: the endpoint with the fewest questions under way, those that failed last.

Invariant: one that failed is asked again when the others are no better, or after a while.

Between a judge and a chat API: the question, and the score in an answer. Pure."""

import json
import math
import re
import string
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from treadle_runtime.errors import Unavailable

from treadle_tools.remote.caller import Caller, Reply
from treadle_tools.remote.function import CallFailed, HttpFunction
from treadle_tools.rewards.judge import Judge
from treadle_tools.tool import Result, Status

AVOIDED_S = 10.0  # an endpoint that failed; a server restarts in minutes, a network hiccup is over in seconds


class Seat(Protocol):
    """A place to ask, for one question."""

    @property
    def url(self) -> str: ...
    def failed(self) -> None:
        """It did not answer."""
        ...


class Endpoints(Protocol):
    """Gives seats."""

    def seat(self) -> AbstractAsyncContextManager[Seat]:
        """Waits for a place to ask, and holds it for the block."""
        ...


@dataclass
class _Endpoint:
    url: str
    asked: int = 0
    avoided_until_s: float = float("-inf")

    def failed(self) -> None:
        self.avoided_until_s = time.monotonic() + AVOIDED_S


class FixedEndpoints:
    """See the module. urls: at least one."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._endpoints = [_Endpoint(url) for url in urls]

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[Seat]:
        """See Endpoints."""
        now_s = time.monotonic()
        chosen = min(self._endpoints, key=lambda one: (one.avoided_until_s > now_s, one.asked))
        chosen.asked += 1
        try:
            yield chosen
        finally:
            chosen.asked -= 1


AGAIN_TEMPERATURE = 0.7  # asked again at 0 a model says the same


class NoScore(Exception):  # noqa: N818 - what the answer has, as callers speak of it
    """The answer has no score, or one out of range; the message says which."""


def question(judge: Judge, arguments: Mapping[str, Any], *, again: bool = False) -> dict[str, Any]:
    """The body of a request to /v1/chat/completions."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    parts = {"system": judge.system, "user": judge.prompt}
    return {
        "model": judge.model,
        "messages": [
            {"role": role, "content": string.Template(template).substitute(texts)}
            for role, template in parts.items()
            if template
        ],
        "temperature": max(judge.temperature, AGAIN_TEMPERATURE) if again else judge.temperature,
        "max_tokens": judge.max_tokens,
    }


def answer_in(reply: Any) -> str:
    """The text of a chat completion. Raises NoScore for what is none."""
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise NoScore("the server's answer is no chat completion") from None
    if not isinstance(text, str):
        raise NoScore("the judge said nothing")  # all its tokens went into reasoning, or into a call of a tool
    return text


def score_in(judge: Judge, text: str) -> float:
    """From 0 to 1. Raises NoScore."""
    found = list(re.finditer(judge.score, text))
    if not found:
        raise NoScore(f"the judge gave no score: {text[-200:]!r}")
    try:
        value = float(found[-1][1])
    except ValueError:
        raise NoScore(f"the judge's score is no number: {found[-1][1]!r}") from None
    if not (math.isfinite(value) and judge.low <= value <= judge.high):
        raise NoScore(f"the judge's score is not within {judge.low:g} and {judge.high:g}: {value:g}")
    return (value - judge.low) / (judge.high - judge.low)


CHAT_PATH = "/v1/chat/completions"
RETRY_S = 2.0  # before a judge that did not answer is asked again
TRIES_AT_ONE = 2  # of one endpoint, before another one is asked
ANSWER_BYTES = 4 * 1024 * 1024


class JudgeScorer:
    """See Scorer. name: of the reward; the judge has a lane of its own."""

    def __init__(self, name: str, judge: Judge, provider: str, endpoints: Endpoints, caller: Caller) -> None:
        self._judge = judge
        self._provider = provider
        self._endpoints = endpoints
        self._caller = caller
        self.lane = name
        self.slots = judge.at_once

    async def score(self, arguments: Mapping[str, Any]) -> Result:
        """See Scorer. queue_s: until a place to ask was free; execution_s: of the last answer."""
        arrived = time.monotonic()
        problem = ""
        for attempt in range(self._judge.tries):
            body = question(self._judge, arguments, again=attempt > 0)
            async with self._endpoints.seat() as seat:
                began = time.monotonic()
                try:
                    reply = await self._caller.call(self._function(seat.url), body, self._judge.wall_s, self._provider)
                except CallFailed as failed:
                    if failed.again or failed.timed_out:
                        seat.failed()
                        raise Unavailable(
                            "JUDGE_UNAVAILABLE", str(failed), retry_after_s=failed.retry_after_s or RETRY_S
                        ) from failed
                    return Result(Status.TOOL_ERROR, error=str(failed))
            took_s = time.monotonic() - began
            text = ""
            try:
                text = answer_in(_json(reply))
                score = score_in(self._judge, text)
            except NoScore as error:
                problem = str(error)
                continue
            return Result(Status.OK, output=text, reward=score, queue_s=began - arrived, execution_s=took_s)
        return Result(Status.TOOL_ERROR, error=f"{problem} ({self._judge.tries} tries)")

    def _function(self, base_url: str) -> HttpFunction:
        judge = self._judge
        return HttpFunction(
            url=base_url.rstrip("/").removesuffix("/v1") + CHAT_PATH,
            headers_from_env={"Authorization": judge.authorization_from_env} if judge.authorization_from_env else {},
            cold_s=judge.wall_s,
            learns=False,  # how long an answer takes says nothing of the next one's length
            tries=TRIES_AT_ONE,
            response_bytes=ANSWER_BYTES,
            at_once=judge.at_once,
        )


def _json(reply: Reply) -> Any:
    try:
        return json.loads(reply.body)
    except ValueError:
        raise NoScore("the server's answer is no JSON") from None
