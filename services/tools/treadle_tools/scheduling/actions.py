"""Run a tool's action on what it is granted, measure it, and publish that it started and ended.

The time of an action is its queue time, its execution (the tool's own) and its overhead (the rest). A call that its
provider refused is made again when the provider allows it, if its caller still waits then.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from treadle_core.tools.grants import SERVED, End, Ended
from treadle_core.tools.providers import BasicManager
from treadle_runtime.calls import remaining_s
from treadle_runtime.errors import Unavailable

from treadle_tools.metrics import Meters
from treadle_tools.replies import result_of
from treadle_tools.sandbox.sandboxes import SandboxLost, WorkerFailed
from treadle_tools.scheduling.demand import Demands
from treadle_tools.scheduling.scheduler import ActionScheduler, RunningAction
from treadle_tools.tool import Granted, Kind, Limits, Result, Status, Tool

RETRY_WORKER_S = 2.0  # about what a worker takes to start
# Of the caller's time left, what a refused call may wait for another turn: the rest is for the answer to arrive.
RETRY_SHARE = 0.9

Work = Callable[[Granted], Awaitable[Mapping[str, Any]]]


class Facts(Protocol):
    """Publishes that an action starts (expected_s: 0 where unknown) and that it has ended (convert.py)."""

    async def started(self, trajectory_id: str, tool: str, expected_s: float) -> None: ...
    async def finished(self, trajectory_id: str, tool: str, result: Result) -> None: ...


@dataclass
class _Call:
    """queue_s: seconds waited so far, over all tries."""

    number: int
    tool: Tool
    limits: Limits
    work: Work
    job: str
    holder: str
    arrived: float
    queue_s: float = 0.0


@dataclass(eq=False)
class Actions:
    """pinned: whether an action runs on its cores only. numbers: of actions, each once over all users of scheduler."""

    scheduler: ActionScheduler
    facts: Facts
    demands: Demands
    pinned: bool
    providers: Mapping[str, BasicManager]
    meters: Meters
    numbers: Iterator[int]

    async def run(
        self, tool: Tool, trajectory_id: str, limits: Limits, work: Work, *, job: str = "", holder: str = ""
    ) -> Result:
        """Run `work`, which asks a sandbox and may raise SandboxLost or WorkerFailed.

        job: whose share of the cores it takes. holder: the session whose memory is held until the scheduler forgets it;
        empty: held for the action only. Raises ResourceExhausted when too many actions wait, Unavailable where the
        tool's worker does not start or its provider cannot be asked within the caller's time.
        """
        call = _Call(next(self.numbers), tool, limits, work, job, holder, time.monotonic())
        await self.facts.started(trajectory_id, tool.name, self.demands.expected_s(tool))
        result = Result(Status.CRASHED, error="cancelled", alive=False)
        try:
            result = await self._until_served(call)
            result = result.timed(queue_s=call.queue_s, total_s=time.monotonic() - call.arrived)
            if result.refused_s is None:
                self.demands.learn(tool, result)
            return result
        finally:
            await self.facts.finished(trajectory_id, tool.name, result)
            self.meters.record_action(tool, result)

    async def _until_served(self, call: _Call) -> Result:
        refused: Result | None = None
        while True:
            within_s = None
            if call.tool.provider:
                left_s, rest_s = remaining_s(), self.providers[call.tool.provider].rests_s(time.monotonic())
                if refused is not None:
                    if left_s is None or rest_s > left_s * RETRY_SHARE:
                        return refused
                    within_s = left_s * RETRY_SHARE
                elif left_s is not None and rest_s > left_s:
                    why = f"provider {call.tool.provider!r} is left alone for another {rest_s:.1f} s"
                    raise Unavailable("PROVIDER_UNAVAILABLE", why, retry_after_s=rest_s)
            asked = time.monotonic()
            try:
                result = await self._try(call, within_s)
            except TimeoutError:
                if refused is None:
                    raise
                call.queue_s += time.monotonic() - asked
                return refused
            if result.refused_s is None or call.tool.kind is Kind.ENVIRONMENT:
                return result
            refused = result

    async def _try(self, call: _Call, within_s: float | None) -> Result:
        """Try once. Raises TimeoutError where the action does not start `within_s`."""
        asked = time.monotonic()
        action_id = f"action-{call.number}"
        action = self.demands.action(action_id, call.holder or action_id, call.tool, call.limits)
        try:
            async with self.scheduler.hold(action, call.job, within_s) as running:
                call.queue_s += time.monotonic() - asked
                result = await self._execute(call, running)
                running.ended = ended_of(call.tool, result)
                return result
        finally:
            if not call.holder:
                self.scheduler.forget(action_id)

    async def _execute(self, call: _Call, running: RunningAction) -> Result:
        cpu = running.started.grant.cpu
        assert cpu is not None  # every action asks for cores
        granted = Granted(
            cpu_cores=len(cpu.cores),
            memory_bytes=call.limits.memory_bytes,
            wall_s=call.limits.wall_s,
            output_bytes=call.limits.output_bytes,
            cores=cpu.cores if self.pinned else (),
        )
        began = time.monotonic()
        try:
            result = result_of(await call.work(granted), call.tool, granted.output_bytes)
        except SandboxLost as lost:
            result = Result(lost.status, error=str(lost), alive=False)
        except WorkerFailed as failure:
            raise Unavailable("TOOL_NOT_READY", str(failure), retry_after_s=RETRY_WORKER_S) from failure
        refused_s = result.refused_s if call.tool.provider else None
        return replace(result, cores=granted.cpu_cores, held_s=time.monotonic() - began, refused_s=refused_s)


def ended_of(tool: Tool, result: Result) -> Ended:
    """How the action ended for the tool's provider."""
    if result.refused_s is not None:
        return Ended(End.REFUSED, result.refused_s)
    failed = tool.provider and result.status is not Status.OK and result.invalid is None
    return Ended(End.FAILED) if failed else SERVED
