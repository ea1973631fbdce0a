"""Runs tools that are HTTP functions: what Actions is for those in the sandbox, without cores to wait for."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treadle_runtime.calls import remaining_s
from treadle_runtime.errors import Unavailable

from treadle_tools.remote.answers import failed, result_of
from treadle_tools.remote.caller import Caller
from treadle_tools.remote.function import CallFailed, HttpFunction
from treadle_tools.scheduling.actions import Facts
from treadle_tools.scheduling.meters import NO_METERS, Meters
from treadle_tools.tool import Kind, Limits, Result, Status, Tool

ANSWER_MARGIN_S = 0.25  # of the caller's time, kept for telling it what came of the call
RETRY_S = 1.0  # before a reward's function is asked again
RECENT_SHARE = 0.2  # of the newest time in the learned one, as in Actions


class Invocations:
    """See the module."""

    def __init__(self, caller: Caller, facts: Facts, meters: Meters = NO_METERS) -> None:
        self._caller = caller
        self._facts = facts
        self._meters = meters
        self._learned_s: dict[str, float] = {}

    async def run(
        self, tool: Tool, function: HttpFunction, arguments: Mapping[str, Any], limits: Limits, trajectory_id: str
    ) -> Result:
        """What came of it; queue_s: until its last try began, execution_s: of that one.

        Raises Unavailable for a reward that could not be asked.
        """
        arrived = time.monotonic()
        left_s = remaining_s()
        within_s = limits.wall_s if left_s is None else min(limits.wall_s, max(left_s - ANSWER_MARGIN_S, 0.001))
        await self._facts.started(trajectory_id, tool.name, self._learned_s.get(tool.name, 0.0))
        result = Result(Status.CRASHED, error="cancelled", alive=False)
        try:
            try:
                reply = await self._caller.call(function, arguments, within_s, tool.provider)
            except CallFailed as failure:
                if failure.again and tool.kind is Kind.REWARD:
                    # A trajectory that was scored badly by a busy network would be trained on.
                    raise Unavailable(
                        "FUNCTION_UNAVAILABLE", str(failure), retry_after_s=failure.retry_after_s or RETRY_S
                    ) from failure
                total_s = time.monotonic() - arrived
                result = replace(failed(failure), queue_s=total_s)
            else:
                total_s = time.monotonic() - arrived
                result = replace(
                    result_of(reply, tool.kind, limits.output_bytes),
                    queue_s=reply.waited_s,
                    execution_s=total_s - reply.waited_s,
                )
                self._learn(tool, total_s)
            return result
        finally:
            await self._facts.finished(trajectory_id, tool.name, result)
            self._meters.ended(tool, result)

    def _learn(self, tool: Tool, newest_s: float) -> None:
        known = self._learned_s.setdefault(tool.name, newest_s)
        self._learned_s[tool.name] = known + RECENT_SHARE * (newest_s - known)
