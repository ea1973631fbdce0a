"""Start an action once its resources are granted, run it, measure it, and publish start and end.

`ActionScheduler` decides: what arrives and what ends in one iteration of the event loop is decided
on together, and an action without a choice of units starts at once while none waits. It owns the
dispatcher and the future of each waiting action. `Actions` runs a tool's action in its turn. The
time of an action is its queue time, its execution (the tool's own) and its overhead (the rest). A
call that its provider refused is made again when the provider allows it, if its caller still waits
then. `Background` owns the task group of work that goes on after the call that began it has ended,
such as a step that must not be half done.

Invariants: what an action holds is given back once, whether it ends, fails or is cancelled; jobs
share what actions wait for equally, and within a job the first to arrive starts first.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from treadle_core.fair_share import FairOrder
from treadle_core.tools.action import Action
from treadle_core.tools.dispatcher import Dispatcher, Started
from treadle_core.tools.grants import NEVER_S, SERVED, End, Ended
from treadle_core.tools.providers import BasicManager
from treadle_runtime.calls import detached_context, remaining_s
from treadle_runtime.errors import ResourceExhausted, Unavailable

from treadle_tools.metrics import Meters
from treadle_tools.replies import result_of
from treadle_tools.resources import Demands
from treadle_tools.sandbox.sandboxes import SandboxLost, WorkerFailed
from treadle_tools.tool import Granted, Kind, Limits, Result, Status, Tool

R = TypeVar("R")

LONG_DECISION_S = 0.5e-3  # from here on decisions take half of the loop's time at most
RETRY_S = 1.0  # a full queue moves within a few actions, which take parts of a second


@dataclass
class RunningAction:
    """An action that holds what it was granted.

    ended: how it ended; the caller of `hold` sets it within the block.
    """

    started: Started
    ended: Ended = SERVED


@dataclass(eq=False)
class ActionScheduler:
    """Grants actions the resources that they request, and shares them equally among jobs.

    max_waiting: actions that may wait.

    decided: called with each decision's seconds. clock: the dispatcher's.
    """

    dispatcher: Dispatcher
    max_waiting: int
    decided: Callable[[float], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    _futures: dict[str, asyncio.Future[RunningAction]] = field(default_factory=dict, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _order: FairOrder = field(default_factory=FairOrder, init=False)

    @asynccontextmanager
    async def hold(
        self, action: Action, job: str, within_s: float | None = None
    ) -> AsyncIterator[RunningAction]:
        """Wait until the action's resources are granted, and hold them for the block.

        job: whose share it takes; the action's `arrival` is set here.

        Raises ResourceExhausted when too many actions wait, TimeoutError where it does not start
        `within_s`.
        """
        self.dispatcher.check(action)
        expected_s = (
            self.dispatcher.typical_s if action.single_unit_s is None else action.single_unit_s
        )
        action = replace(action, arrival=self._order.place(job, expected_s))
        began_s, took_s = self.clock(), 0.0
        try:
            running = await self._start(action, within_s)
            self._order.begin(action.arrival)
            began_s = self.clock()
            try:
                yield running
            except BaseException:
                running.ended = Ended(End.ABANDONED)
                raise
            finally:
                took_s = self.clock() - began_s
                self._end(action, running.ended)
        finally:
            self._order.settle(job, expected_s, took_s)

    def forget(self, holder: str) -> None:
        """Free what a session holds beyond its actions."""
        self.dispatcher.forget(holder)
        self._wake()

    async def _start(self, action: Action, within_s: float | None) -> RunningAction:
        if (started := self.dispatcher.start_at_once(action, self.clock())) is not None:
            return RunningAction(started)
        waiting = len(self.dispatcher)
        if waiting >= self.max_waiting and (waiting or not action.scalable):
            why = f"{self.max_waiting} actions wait already"
            raise ResourceExhausted("ACTIONS_WAITING", why, retry_after_s=RETRY_S)
        self.dispatcher.submit(action)
        future: asyncio.Future[RunningAction] = asyncio.get_running_loop().create_future()
        self._futures[action.action_id] = future
        self._wake()
        try:
            async with asyncio.timeout(within_s):
                return await future
        except (asyncio.CancelledError, TimeoutError):
            if self._futures.pop(action.action_id, None) is None:
                self._end(action, Ended(End.ABANDONED))  # it has started in the same moment
            else:
                self.dispatcher.withdraw(action.action_id)
                self._wake()
            raise

    def _end(self, action: Action, ended: Ended) -> None:
        self.dispatcher.end(action.action_id, self.clock(), ended)
        self._wake()

    async def run(self) -> None:
        """Decide for ever, once for all that happened in an iteration of the event loop."""
        next_s = NEVER_S
        while True:
            wait_s = None if next_s == NEVER_S else max(next_s - self.clock(), 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            self._changed.clear()
            began_s = self.clock()
            for started in self.dispatcher.decide(began_s):
                future = self._futures.pop(started.action.action_id)
                if not future.done():  # else its caller was cancelled, and will end the action
                    future.set_result(RunningAction(started))
            # As of the decision: what the clock has changed since then has not been decided on.
            next_s = self.dispatcher.next_change_s(began_s)
            took_s = self.clock() - began_s
            self.decided(took_s)
            if took_s > LONG_DECISION_S:
                # The event loop has other work; actions that arrive meanwhile are decided on
                # together.
                await asyncio.sleep(took_s)

    def _wake(self) -> None:
        if len(self.dispatcher):
            self._changed.set()


RETRY_WORKER_S = 2.0  # about what a worker takes to start
# Of the caller's time left, what a refused call may wait for another turn: the rest is for the
# answer to arrive.
RETRY_SHARE = 0.9

Work = Callable[[Granted], Awaitable[Mapping[str, Any]]]


class Facts(Protocol):
    """Publishes that an action starts (expected_s: 0 where unknown) and that it has ended
    (convert.py)."""

    async def started(self, trajectory_id: str, tool: str, expected_s: float) -> None: ...
    async def finished(self, trajectory_id: str, tool: str, result: Result) -> None: ...


@dataclass
class _Call:
    """One call of a tool, over all its tries.

    queue_s: seconds waited so far, over all tries.
    """

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
    """Runs actions of tools in their turn, measures them and publishes their facts.

    pinned: whether an action runs on its cores only.

    numbers: of actions, each once over all users of the scheduler.
    """

    scheduler: ActionScheduler
    facts: Facts
    demands: Demands
    pinned: bool
    providers: Mapping[str, BasicManager]
    meters: Meters
    numbers: Iterator[int]

    async def run(
        self,
        tool: Tool,
        trajectory_id: str,
        limits: Limits,
        work: Work,
        *,
        job: str = "",
        holder: str = "",
    ) -> Result:
        """Run `work`, which calls a sandbox and may raise SandboxLost or WorkerFailed.

        job: whose share of the cores it takes. holder: the session whose memory is held until the
        scheduler forgets it; empty: held for the action only. Raises ResourceExhausted when too
        many actions wait, Unavailable where the tool's worker does not start or its provider takes
        no call within the caller's time.
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
                left_s, rest_s = (
                    remaining_s(),
                    self.providers[call.tool.provider].rests_s(time.monotonic()),
                )
                if refused is not None:
                    if left_s is None or rest_s > left_s * RETRY_SHARE:
                        return refused
                    within_s = left_s * RETRY_SHARE
                elif left_s is not None and rest_s > left_s:
                    why = (
                        f"provider {call.tool.provider!r} is left alone for another {rest_s:.1f} s"
                    )
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
        """Try the call once. Raises TimeoutError where the action does not start `within_s`."""
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
        assert cpu is not None  # every action requests cores
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
            result = Result(
                lost.status, error=str(lost), alive=False, lost=lost.status is Status.CRASHED
            )
        except WorkerFailed as failure:
            raise Unavailable(
                "TOOL_NOT_READY", str(failure), retry_after_s=RETRY_WORKER_S
            ) from failure
        refused_s = result.refused_s if call.tool.provider else None
        return replace(
            result, cores=granted.cpu_cores, held_s=time.monotonic() - began, refused_s=refused_s
        )


def ended_of(tool: Tool, result: Result) -> Ended:
    """Return how the action ended for the tool's provider."""
    if result.refused_s is not None:
        return Ended(End.REFUSED, result.refused_s)
    failed = tool.provider and result.status is not Status.OK and result.invalid is None
    return Ended(End.FAILED) if failed else SERVED


class Background:
    """Runs work in one task group: `spawn` and forget, or `finish` whether or not the caller still
    waits."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Hold the group open until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            await asyncio.Event().wait()

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Start work that nobody need wait for; the work must not raise."""
        if self._group is None:
            raise RuntimeError("spawned before run")
        return self._group.create_task(work, context=detached_context())

    async def finish(self, call: Callable[[], Awaitable[R]]) -> R:
        """Return the result of `call`, which runs to its end even where the caller is cancelled."""

        async def work() -> R | Exception:
            try:
                return await call()
            except Exception as error:  # noqa: BLE001 - it is the caller's, who raises it
                return error

        ended = await asyncio.shield(self.spawn(work()))
        if isinstance(ended, Exception):
            raise ended
        return ended
