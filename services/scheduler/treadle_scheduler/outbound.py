"""Send the controller's actions to other services in the background: predictions, plans,
priorities, moves, facts.

No request waits for these and none may delay another: each kind has queues of its own, one for each
address, so that a service that hangs delays its own calls alone. Calls have deadlines, and a
failure is logged and becomes an event where the controller waits for an answer. A newer action
replaces an older one of the same trajectory or ticket that still waits, so that a slow service gets
the newest and no queue outgrows what is open.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc.aio
import structlog
from treadle.engine.v1.engine_pb2_grpc import EngineServiceStub
from treadle.migrator.v1.migrator_pb2_grpc import MigratorServiceStub
from treadle.placement.v1.placement_pb2_grpc import PlacementServiceStub
from treadle.predictor.v1.predictor_pb2_grpc import PredictorServiceStub
from treadle_core import actions as act
from treadle_core.events import (
    ClosedAnnounced,
    Event,
    MoveEnded,
    PlanArrived,
    StepUnknown,
    WeightsUpdated,
)
from treadle_runtime.bus import Bus
from treadle_runtime.errors import contain
from treadle_runtime.telemetry import Tracing

from treadle_scheduler import convert, convert_engines
from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.metrics import Metrics, Traces

T = TypeVar("T")
Command = act.StartMigration | act.CancelMigration | act.AbortStep | act.AskStep | act.ReleasePrefix

log = structlog.get_logger()

# A prediction later than this is of no use: the step it would rank is over.
PREDICTION_TIMEOUT_S = 5.0
# Solvers answer in milliseconds; this is for one that is being restarted.
PLAN_TIMEOUT_S = 5.0
# Commands to sidecars and the migrator, which only note them.
COMMAND_TIMEOUT_S = 5.0
# Between the beginnings of two calls to the predictor, in which requests are gathered: a call costs
# as much as answering ten of them. A first request is sent at once, as a trajectory may wait for
# its answer before its first step.
GATHER_QUERIES_S = 0.01
# A load of hundreds of GB takes minutes; the sidecar ends one that takes longer than its own limit
# of half an hour.
LOAD_TIMEOUT_S = 2400.0
# Requests in one batch to the predictor; its limit is 4,096.
MOST_QUERIES = 512
# Commands under way at once to one address.
MOST_COMMANDS = 16


class Queues(Generic[T]):
    """Work that waits, in one queue for each address, and the tasks that do it.

    work: does some of the work of one address. tasks: most that run at once for an address. most:
    items that one of them takes at a time. gather_s: seconds between the beginnings of two pieces
    of work of the only task of an address, in which items are gathered. may_work: returns when work
    may be done. An address has tasks and a queue only while it has work.
    """

    def __init__(
        self,
        work: Callable[[str, list[T]], Awaitable[None]],
        *,
        tasks: int = 1,
        most: int = 1,
        gather_s: float = 0.0,
        may_work: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._work, self._tasks, self._most, self._gather_s = work, tasks, most, gather_s
        self._may_work = may_work
        self._items: dict[str, dict[str, T]] = {}
        self._running: Counter[str] = Counter()
        # by address, when the next piece of gathered work may begin
        self._next_s: dict[str, float] = {}
        self._filled: set[str] = set()  # addresses that got work since `run` last checked
        self._woken = asyncio.Event()

    def put(self, address: str, key: str, item: T) -> None:
        """Add an item, or replace the one of its key, which keeps its place in the queue; never
        block."""
        self._items.setdefault(address, {})[key] = item
        self._filled.add(address)
        self._woken.set()

    async def run(self) -> None:
        """Do the work, oldest first; a background task."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._woken.wait()
                self._woken.clear()
                while self._filled:
                    address = self._filled.pop()
                    wanted = min(
                        self._tasks, self._running[address] + len(self._items.get(address, ()))
                    )
                    for _ in range(wanted - self._running[address]):
                        self._running[address] += 1
                        group.create_task(self._empty(address))

    async def _empty(self, address: str) -> None:
        clock = asyncio.get_running_loop().time
        while items := self._items.get(address):
            if (wait_s := self._next_s.get(address, 0.0) - clock()) > 0:
                await asyncio.sleep(wait_s)
            if self._gather_s:
                self._next_s[address] = clock() + self._gather_s
            if self._may_work is not None:
                await self._may_work()
            taken = [items.pop(key) for key in list(items)[: self._most]]
            if not items:
                del self._items[address]
            with contain("an action for another service", address=address):
                await self._work(address, taken)
        self._running[address] -= 1
        if not self._running[address]:
            del self._running[address]


class Outbound:
    """Senders of actions to other services. `connect` opens channels; `may_send` returns when this
    process leads, so that one that was stopped for a while sends nothing late; `handle` is set
    once, before the workers run, and takes the events that answers become."""

    handle: Callable[[Event], object]

    def __init__(
        self,
        settings: SchedulerSettings,
        bus: Bus,
        connect: Callable[[str, str], grpc.aio.Channel],
        may_send: Callable[[], Awaitable[None]] | None = None,
        metrics: Metrics | None = None,
        traces: Traces | None = None,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._connect = connect
        self._metrics = metrics
        self._traces = traces or Traces(Tracing())
        self._predictions: Queues[act.AskPrediction] = Queues(
            self._predict, most=MOST_QUERIES, gather_s=GATHER_QUERIES_S, may_work=may_send
        )
        self._plans: Queues[act.AskPlan] = Queues(self._plan, may_work=may_send)
        self._priorities: Queues[tuple[str, float]] = Queues(
            self._reprioritize, most=MOST_QUERIES, may_work=may_send
        )
        self._commands: Queues[Command] = Queues(
            self._command, tasks=MOST_COMMANDS, may_work=may_send
        )
        self._loads: Queues[act.LoadWeights] = Queues(self._load, may_work=may_send)
        self._announcements: Queues[convert.Announcement] = Queues(
            self._announce, most=MOST_QUERIES, may_work=may_send
        )

    def send(self, action: act.Action) -> None:
        """Take an action to be carried out in the background; never block."""
        match action:
            case act.AskPrediction(record):
                if self._settings.predictor:
                    self._predictions.put(self._settings.predictor, record.trajectory_id, action)
            case act.AskPlan():
                self._plans.put(self._settings.placement, "plan", action)
            case act.Reprioritize(_, address, changes):
                for change in changes:
                    self._priorities.put(address, change[0], change)
            case act.StartMigration(move_id):
                self._commands.put(self._settings.migrator, move_id, action)
            case act.CancelMigration(_, migration_id):
                self._commands.put(self._settings.migrator, f"cancel {migration_id}", action)
            case act.AbortStep(address, ticket_id):
                self._commands.put(address, f"abort {ticket_id}", action)
            case act.AskStep(ticket):
                self._commands.put(ticket.engine_address, f"ask {ticket.ticket_id}", action)
            case act.LoadWeights(engine_id, address):
                self._loads.put(address, engine_id, action)
            case act.ReleasePrefix(address, trajectory_id):
                self._commands.put(address, f"release {trajectory_id}", action)
            case _ if isinstance(action, convert.Announcement):
                # A closing that still waits is not announced a second time.
                key = (
                    action.record.trajectory_id
                    if isinstance(action, act.AnnounceClosed)
                    else uuid.uuid4().hex
                )
                self._announcements.put("", key, action)
            case _:
                raise TypeError(f"{action} is not for another service")

    @property
    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Return the workers, to be run beside the server."""
        return [
            queues.run
            for queues in (
                self._predictions,
                self._plans,
                self._priorities,
                self._commands,
                self._loads,
                self._announcements,
            )
        ]

    async def _predict(self, address: str, asks: list[act.AskPrediction]) -> None:
        predictor = PredictorServiceStub(self._connect(address, "predictor"))
        request = convert.predictions_request(asks, self._traces.traceparent)
        try:
            response = await predictor.BatchPredictRemaining(request, timeout=PREDICTION_TIMEOUT_S)
            events = convert.predictions_arrived(asks, response)
        except (grpc.aio.AioRpcError, ValueError) as error:
            log.warning("no predictions", queries=len(asks), error=_brief(error))
            return
        for event in events:
            self.handle(event)

    async def _plan(self, address: str, asks: list[act.AskPlan]) -> None:
        (ask,) = asks
        event = PlanArrived(ask.plan_id)  # without engines, the core plans by itself
        if address:
            placement = PlacementServiceStub(self._connect(address, "placement"))
            began_s = time.monotonic()
            try:
                response = await placement.PlanPlacement(
                    convert_engines.plan_request(ask), timeout=PLAN_TIMEOUT_S
                )
                event = convert_engines.plan_arrived(ask, response)
                await self._bus.publish(convert_engines.plan_fact(response))
            except (grpc.aio.AioRpcError, ValueError) as error:
                log.warning("no plan", trajectories=len(ask.work), error=_brief(error))
            if self._metrics is not None:
                self._metrics.record_plan(time.monotonic() - began_s)
        self.handle(event)

    async def _reprioritize(self, address: str, changes: list[tuple[str, float]]) -> None:
        request = convert_engines.reprioritize_request(changes, uuid.uuid4().hex)
        try:
            await EngineServiceStub(self._connect(address, "sidecar")).Reprioritize(
                request, timeout=COMMAND_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            log.info("priorities were not changed", address=address, error=_brief(error))

    async def _command(self, address: str, commands: list[Command]) -> None:
        (command,) = commands
        about = command.ticket.trajectory_id if isinstance(command, act.AskStep) else ""
        try:
            with self._traces.within(about or getattr(command, "trajectory_id", "")):
                await self._carry_out(address, command)
        except grpc.aio.AioRpcError as error:
            log.info(
                "a command failed, which is allowed", command=str(command), error=_brief(error)
            )
            if isinstance(command, act.StartMigration):
                self._refuse_move(command)

    async def _carry_out(self, address: str, command: Command) -> None:
        match command:
            case act.StartMigration() | act.CancelMigration() if not address:
                if isinstance(command, act.StartMigration):
                    self._refuse_move(command)
            case act.StartMigration():
                migrator = MigratorServiceStub(self._connect(address, "migrator"))
                accepted = await migrator.StartMigration(
                    convert_engines.migration_request(command), timeout=COMMAND_TIMEOUT_S
                )
                self.handle(convert_engines.move_accepted(command, accepted))
            case act.CancelMigration(_, migration_id):
                migrator = MigratorServiceStub(self._connect(address, "migrator"))
                await migrator.CancelMigration(
                    convert_engines.cancel_request(migration_id), timeout=COMMAND_TIMEOUT_S
                )
            case act.AbortStep():
                engine = EngineServiceStub(self._connect(address, "sidecar"))
                abort = convert_engines.abort_request(command)
                await engine.Abort(abort, timeout=COMMAND_TIMEOUT_S)
            case act.AskStep(ticket):
                ask = convert_engines.reprioritize_request(
                    [(ticket.ticket_id, ticket.priority)], uuid.uuid4().hex
                )
                engine = EngineServiceStub(self._connect(address, "sidecar"))
                if (await engine.Reprioritize(ask, timeout=COMMAND_TIMEOUT_S)).unknown_ticket_ids:
                    self.handle(StepUnknown(ticket.trajectory_id, ticket.ticket_id))
            case act.ReleasePrefix():
                release = convert_engines.release_request(command, uuid.uuid4().hex)
                await EngineServiceStub(self._connect(address, "sidecar")).ReleasePrefix(
                    release, timeout=COMMAND_TIMEOUT_S
                )

    async def _load(self, address: str, loads: list[act.LoadWeights]) -> None:
        (load,) = loads
        try:
            await EngineServiceStub(self._connect(address, "sidecar")).UpdateWeights(
                convert_engines.update_request(load, uuid.uuid4().hex), timeout=LOAD_TIMEOUT_S
            )
            self.handle(WeightsUpdated(load.engine_id, load.weight_version))
        except grpc.aio.AioRpcError as error:
            log.warning("weights were not loaded", engine_id=load.engine_id, error=_brief(error))
            self.handle(convert_engines.load_failed(load, error))

    def _refuse_move(self, command: act.StartMigration) -> None:
        self.handle(MoveEnded(command.trajectory_id, move_id=command.move_id, reason="NOT_STARTED"))

    async def _announce(self, _: str, actions: list[convert.Announcement]) -> None:
        for action in actions:
            record = getattr(action, "record", None)
            with self._traces.within(record.trajectory_id if record is not None else ""):
                await self._bus.publish(convert.fact_of(action))
        closed = [action for action in actions if isinstance(action, act.AnnounceClosed)]
        if closed:
            await self._bus.flush()
            for closing in closed:
                if self._metrics is not None:
                    self._metrics.record_closing(closing)
                self._traces.close(closing.record)
                self.handle(ClosedAnnounced(closing.record.trajectory_id))


def _brief(error: Exception) -> str:
    return (
        f"{error.code().name}: {error.details()}"
        if isinstance(error, grpc.aio.AioRpcError)
        else repr(error)
    )
