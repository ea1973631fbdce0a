"""Asks a judge for the score of one trajectory."""

import json
import time
from collections.abc import Mapping
from typing import Any

from treadle_runtime.errors import Unavailable

from treadle_tools.functions.caller import Caller, Reply
from treadle_tools.functions.failure import CallFailed
from treadle_tools.functions.function import HttpFunction
from treadle_tools.judges.endpoints import Endpoints
from treadle_tools.judges.judge import Judge
from treadle_tools.judges.reading import NoScore, answer_in, question, score_in
from treadle_tools.tool import Result, Status

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
