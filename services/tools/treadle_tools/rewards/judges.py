"""Have an LLM judge score a trajectory, over OpenAI's chat API.

Invariants: a score is finite. An answer without a score is a Result; what keeps a judge from
answering now is raised.
"""

import json
import math
import re
import string
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from treadle_runtime.errors import Unavailable

from treadle_tools.remote import HttpFunction, Judge
from treadle_tools.remote.functions import Caller, CallFailed
from treadle_tools.remote.gpus import Round, Rounds
from treadle_tools.replies import BadReply, Reply, read_json
from treadle_tools.rewards import remove_reasoning
from treadle_tools.tool import Result, Status

CHAT_PATH = "/v1/chat/completions"
RETRY_S = 1.0  # before a request is sent again to a judge that did not answer
TRIES_AT_ONE = 2  # of one endpoint, before another one is used
ANSWER_BYTES = 4 * 1024 * 1024
AGAIN_TEMPERATURE = 0.7  # at 0 a model would repeat its answer
QUOTED_CHARS = 200  # of an answer, in an error
# An endpoint that failed; a server restarts in minutes, a network hiccup is over in seconds
AVOIDED_S = 10.0


@dataclass
class _Endpoint:
    """A server with OpenAI's chat API at a known URL. asked: requests under way."""

    url: str
    asked: int = 0
    avoided_until_s: float = float("-inf")

    def failed(self) -> None:
        self.avoided_until_s = time.monotonic() + AVOIDED_S


class JudgeScorer:
    """`Scorer` that sends its requests to one of a judge's endpoints. Each judge has a queue of its
    own."""

    def __init__(self, judge: Judge, rounds: Rounds, caller: Caller) -> None:
        self._judge = judge
        self._rounds = rounds
        self._caller = caller
        self._endpoints = [_Endpoint(url) for url in judge.endpoints]
        self.queue = judge.name
        self.slots = judge.at_once

    async def score(self, arguments: Mapping[str, Any]) -> Result:
        """Return the judge's score (see Scorer).

        queue_s of the result: until an endpoint took the request; execution_s: of the last answer.
        """
        arrived = time.monotonic()
        problem = ""
        for attempt in range(self._judge.tries):
            body = chat_request(self._judge, arguments, again=attempt > 0)
            async with self._choose_endpoint() as endpoint:
                began = time.monotonic()
                function = self._function(endpoint.url)
                try:
                    reply = await self._caller.call(function, body, self._judge.wall_s)
                except CallFailed as failed:
                    if failed.again or failed.timed_out:
                        endpoint.failed()
                        raise Unavailable(
                            "JUDGE_UNAVAILABLE",
                            str(failed),
                            retry_after_s=failed.retry_after_s or RETRY_S,
                        ) from failed
                    return Result(Status.TOOL_ERROR, error=str(failed))
            took_s = time.monotonic() - began
            try:
                text = read_answer(reply)
                score = read_score(self._judge, text)
            except NoScore as error:
                problem = str(error)
                continue
            return Result(
                Status.OK, output=text, reward=score, queue_s=began - arrived, execution_s=took_s
            )
        return Result(Status.TOOL_ERROR, error=f"{problem} ({self._judge.tries} tries)")

    @asynccontextmanager
    async def _choose_endpoint(self) -> AsyncIterator[_Endpoint | Round]:
        """Wait for a server of the judge's service, or take the endpoint with fewest requests; one
        that failed lately last."""
        if self._judge.service:
            async with self._rounds.join(self._judge.service) as joined:
                yield joined
            return
        now_s = time.monotonic()
        chosen = min(self._endpoints, key=lambda one: (one.avoided_until_s > now_s, one.asked))
        chosen.asked += 1
        try:
            yield chosen
        finally:
            chosen.asked -= 1

    def _function(self, base_url: str) -> HttpFunction:
        judge = self._judge
        return HttpFunction(
            name=judge.name,
            url=base_url.removesuffix("/v1") + CHAT_PATH,
            headers_from_env=judge.headers_from_env,
            cold_s=judge.wall_s,
            learns=False,  # the time of one answer does not predict that of the next
            tries=TRIES_AT_ONE,
            response_bytes=ANSWER_BYTES,
            at_once=judge.at_once,
            provider=judge.provider,
        )


class NoScore(Exception):  # noqa: N818 - what the answer has, as callers speak of it
    """The answer has no score, or one out of range; the message gives which."""


def chat_request(
    judge: Judge, arguments: Mapping[str, Any], *, again: bool = False
) -> dict[str, Any]:
    """Return the body of a request to /v1/chat/completions.

    again: whether the judge's last answer had no score.
    """
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in arguments.items()
    }
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


def read_answer(reply: Reply) -> str:
    """Return the text of a chat completion.

    Raises NoScore where the reply is no chat completion, or has no text.
    """
    try:
        text = read_json("the server's answer", reply.body.decode())["choices"][0]["message"][
            "content"
        ]
    except (BadReply, UnicodeDecodeError, KeyError, IndexError, TypeError):
        raise NoScore("the server's answer is no chat completion") from None
    if not isinstance(text, str):
        # All its tokens went into reasoning, or into a call of a tool
        raise NoScore("the judge said nothing")
    return text


def read_score(judge: Judge, text: str) -> float:
    """Return the last score in `text` behind its reasoning, from 0 to 1. Raises NoScore."""
    if not (found := list(re.finditer(judge.score, remove_reasoning(text)))):
        raise NoScore(f"the judge gave no score: {text[-QUOTED_CHARS:]!r}")
    try:
        value = float(found[-1][1])
    except ValueError:
        raise NoScore(f"the judge's score is no number: {found[-1][1][:QUOTED_CHARS]!r}") from None
    if not (math.isfinite(value) and judge.low <= value <= judge.high):
        raise NoScore(
            f"the judge's score is not within {judge.low:g} and {judge.high:g}: {value:g}"
        )
    return (value - judge.low) / (judge.high - judge.low)
