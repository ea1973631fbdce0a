"""What asks one reward function, and the one that asks a tool of kind REWARD.

Invariant: a score is finite. What a function does wrong is a Result; what only stands in its way for now is raised, and
the pool tries again.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from treadle_runtime.errors import Unavailable

from treadle_tools.tool import Limits, Result, Status, Tool

SANDBOX_LANE = "(sandbox)"  # no name of a tool

Call = Callable[[Tool, Mapping[str, Any], Limits, str], Awaitable[Result]]


class Scorer(Protocol):
    """One reward function. lane: scorers of one lane share its slots, which are how many of them run at a time."""

    @property
    def lane(self) -> str: ...
    @property
    def slots(self) -> int: ...

    async def score(self, arguments: Mapping[str, Any]) -> Result:
        """What came of it; `reward` is the score where the status is OK.

        Raises InvalidArgument where the function refuses an argument; Unavailable, ResourceExhausted or
        FailedPrecondition where it cannot be asked at the moment.
        """
        ...


class ToolScorer:
    """A registered function, in the sandbox or over HTTP. call: Gateway.call. sandbox_slots: of all in the sandbox."""

    def __init__(self, tool: Tool, call: Call, sandbox_slots: int) -> None:
        self._tool = tool
        self._call = call
        self.lane = SANDBOX_LANE if tool.remote is None else tool.name
        self.slots = sandbox_slots if tool.remote is None else tool.remote.at_once

    async def score(self, arguments: Mapping[str, Any]) -> Result:
        """See Scorer. Its actions belong to no trajectory: the trajectory has ended."""
        return scored(await self._call(self._tool, arguments, self._tool.limits, ""))


def scored(result: Result) -> Result:
    """The same; an error where there should be a score and is none. Raises Unavailable where its provider refused."""
    if result.refused_s is not None:
        raise Unavailable("PROVIDER_REFUSED", result.error or "refused", retry_after_s=result.refused_s)
    if result.status is not Status.OK:
        return result
    if result.reward is None:
        return replace(result, status=Status.TOOL_ERROR, error="the reward function gave no reward")
    if not math.isfinite(result.reward):
        return replace(result, status=Status.TOOL_ERROR, error=f"the reward is {result.reward}, no finite number")
    return result
