"""One action at a time for each core: waits for cores, runs, measures, says so on the bus.

Owns: the learned time of each tool, which is what `tool_started` predicts. The three times of an action add up to its
whole: queue (waiting for its turn), execution (the tool's own), overhead (all else).
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from treadle_runtime.errors import Unavailable

from treadle_tools.cores import Cores
from treadle_tools.sandbox.cell import CellLost
from treadle_tools.sandbox.zygote import WorkerFailed
from treadle_tools.tool import Limits, Result, Status, Tool

RECENT_SHARE = 0.2  # of the newest time in the learned one: five actions back still count for a third
RETRY_WORKER_S = 2.0  # about what a worker takes to start


class Facts(Protocol):
    """Where actions are told; see convert.py."""

    async def started(self, trajectory_id: str, tool: str, expected_s: float) -> None:
        """An action begins. expected_s: 0 where unknown."""
        ...

    async def finished(self, trajectory_id: str, tool: str, result: Result) -> None:
        """It has ended."""
        ...


class Actions:
    """See the module."""

    def __init__(self, cores: Cores, facts: Facts) -> None:
        self._cores = cores
        self._facts = facts
        self._learned_s: dict[str, float] = {}

    async def run(
        self, tool: Tool, trajectory_id: str, limits: Limits, work: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> Result:
        """What came of `work`, which asks a cell and may raise CellLost or WorkerFailed.

        Raises ResourceExhausted when too many wait, Unavailable where the tool's worker does not start.
        """
        arrived = time.monotonic()
        await self._facts.started(trajectory_id, tool.name, self._learned_s.get(tool.name, 0.0))
        result = Result(Status.CRASHED, error="cancelled", alive=False)
        try:
            async with self._cores.hold(limits.cpu_cores):
                queued = time.monotonic() - arrived
                try:
                    result = result_of(await work())
                except CellLost as lost:
                    result = result_of_lost(lost)
                except WorkerFailed as failure:
                    raise Unavailable("TOOL_NOT_READY", str(failure), retry_after_s=RETRY_WORKER_S) from failure
            result = result.timed(queue_s=queued, total_s=time.monotonic() - arrived)
            self._learn(tool, result)
            return result
        finally:
            await self._facts.finished(trajectory_id, tool.name, result)

    def _learn(self, tool: Tool, result: Result) -> None:
        newest = result.overhead_s + result.execution_s
        known = self._learned_s.setdefault(tool.name, newest)
        self._learned_s[tool.name] = known + RECENT_SHARE * (newest - known)


def result_of(reply: Mapping[str, Any]) -> Result:
    """A worker's reply."""
    invalid = reply.get("invalid")
    return Result(
        status=Status(reply["status"]),
        output=str(reply["output"]),
        truncated=bool(reply["truncated"]),
        error=str(reply["error"]),
        reward=None if reply.get("reward") is None else float(reply["reward"]),
        done=bool(reply.get("done", False)),
        data_json=str(reply.get("data_json", "")),
        alive=bool(reply["alive"]),
        invalid=None if invalid is None else (str(invalid[0]), str(invalid[1])),
        execution_s=float(reply["execution_s"]),
    )


def result_of_lost(lost: CellLost) -> Result:
    """What is left to say of a cell that gave no answer."""
    if lost.timed_out:
        status = Status.TIMED_OUT
    elif lost.out_of_memory:
        status = Status.OUT_OF_MEMORY
    else:
        status = Status.CRASHED
    return Result(status, error=str(lost), done=False, alive=False)
