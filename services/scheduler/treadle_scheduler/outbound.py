"""Send the controller's wishes to other services in the background: predictions, plans, priorities, moves, facts.

Nothing waits for these and none may delay another: each kind has its own queue and workers, calls have deadlines, and a
failure is logged and becomes an event where the controller waits for an answer. A newer wish replaces an older one of
the same trajectory or ticket that still waits, so that a slow service gets the newest and no queue outgrows what is
open.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc.aio
import structlog
from treadle.engine.v1.engine_pb2_grpc import EngineServiceStub
from treadle.migrator.v1.migrator_pb2_grpc import MigratorServiceStub
from treadle.placement.v1.placement_pb2_grpc import PlacementServiceStub
from treadle.predictor.v1.predictor_pb2_grpc import PredictorServiceStub
from treadle_core import actions as act
from treadle_core.events import ClosedAnnounced, Event, MoveEnded, PlanArrived
from treadle_runtime.bus import Bus

from treadle_scheduler import convert_peers as convert
from treadle_scheduler.config import SchedulerSettings

T = TypeVar("T")
Command = act.StartMigration | act.CancelMigration | act.AbortStep | act.ReleasePrefix

log = structlog.get_logger()

# A prediction later than this is of no use: the step it would rank is over.
PREDICTION_TIMEOUT_S = 5.0
# Solvers answer in milliseconds; this is for one that is being restarted.
PLAN_TIMEOUT_S = 5.0
# Commands to sidecars and the migrator, which only note the wish.
COMMAND_TIMEOUT_S = 5.0
# Questions to the predictor are gathered for so long, since a call costs as much as answering ten of them. A tool runs
# meanwhile, or a step has just begun.
GATHER_QUERIES_S = 0.01
# Questions in one batch to the predictor; its limit is 4,096.
MOST_QUERIES = 512
# Commands under way at once.
MOST_COMMANDS = 16


class Waiting(Generic[T]):
    """Work that waits for a worker, by key. A key keeps its place in the queue when its work is replaced."""

    def __init__(self) -> None:
        self._items: dict[str, T] = {}
        self._filled = asyncio.Event()

    def put(self, key: str, item: T) -> None:
        """Add or replace; never blocks."""
        self._items[key] = item
        self._filled.set()

    async def take(self, most: int, gather_s: float = 0.0) -> list[T]:
        """The oldest items, at least one and at most `most`; waits while there is none, then `gather_s` for more."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        if gather_s:
            await asyncio.sleep(gather_s)
        return [self._items.pop(key) for key in list(self._items)[:most]]

    async def take_one(self) -> T:
        """The oldest item; waits while there is none."""
        (item,) = await self.take(1)
        return item


class Outbound:
    """`connect` opens channels; `handle` is set once, before the workers run, and takes the events that answers
    become."""

    handle: Callable[[Event], object]

    def __init__(self, settings: SchedulerSettings, bus: Bus, connect: Callable[[str], grpc.aio.Channel]) -> None:
        self._settings = settings
        self._bus = bus
        self._connect = connect
        self._predictions: Waiting[act.AskPrediction] = Waiting()
        self._plans: Waiting[act.AskPlan] = Waiting()
        self._priorities: Waiting[act.Reprioritize] = Waiting()
        self._commands: Waiting[Command] = Waiting()
        self._announcements: Waiting[convert.Announcement] = Waiting()

    def send(self, action: act.Action) -> None:
        """Take an action to be carried out in the background; never blocks."""
        match action:
            case act.AskPrediction(record):
                if self._settings.predictor:
                    self._predictions.put(record.trajectory_id, action)
            case act.AskPlan():
                self._plans.put("plan", action)
            case act.Reprioritize(engine_id, address, changes):
                for ticket_id, priority in changes:
                    self._priorities.put(ticket_id, act.Reprioritize(engine_id, address, ((ticket_id, priority),)))
            case act.StartMigration(move_id):
                self._commands.put(move_id, action)
            case act.CancelMigration(_, migration_id):
                self._commands.put(f"cancel {migration_id}", action)
            case act.AbortStep(_, ticket_id):
                self._commands.put(f"abort {ticket_id}", action)
            case act.ReleasePrefix(address, trajectory_id):
                self._commands.put(f"release {address} {trajectory_id}", action)
            case _ if isinstance(action, convert.Announcement):
                self._announcements.put(uuid.uuid4().hex, action)
            case _:
                raise TypeError(f"{action} is not for another service")

    @property
    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """The workers, to be run beside the server."""
        return [self._predict, self._plan, self._prioritize, *[self._command] * MOST_COMMANDS, self._announce]

    async def _predict(self) -> None:
        while True:
            asks = await self._predictions.take(MOST_QUERIES, GATHER_QUERIES_S)
            predictor = PredictorServiceStub(self._connect(self._settings.predictor))
            request = convert.predictions_request(asks)
            try:
                response = await predictor.BatchPredictRemaining(request, timeout=PREDICTION_TIMEOUT_S)
                events = convert.predictions_arrived(asks, response)
            except (grpc.aio.AioRpcError, ValueError) as error:
                log.warning("no predictions", queries=len(asks), error=_brief(error))
                continue
            for event in events:
                self.handle(event)

    async def _plan(self) -> None:
        while True:
            ask = await self._plans.take_one()
            event = PlanArrived(ask.plan_id)  # without engines, the core plans by itself
            if self._settings.placement:
                placement = PlacementServiceStub(self._connect(self._settings.placement))
                try:
                    response = await placement.PlanPlacement(convert.plan_request(ask), timeout=PLAN_TIMEOUT_S)
                    event = convert.plan_arrived(ask, response)
                except grpc.aio.AioRpcError as error:
                    log.warning("no plan", trajectories=len(ask.work), error=_brief(error))
            self.handle(event)

    async def _prioritize(self) -> None:
        while True:
            changes: dict[str, list[tuple[str, float]]] = {}
            for action in await self._priorities.take(MOST_QUERIES):
                changes.setdefault(action.address, []).extend(action.changes)
            async with asyncio.TaskGroup() as group:
                for address, of_address in changes.items():
                    group.create_task(self._reprioritize(address, of_address))

    async def _reprioritize(self, address: str, changes: list[tuple[str, float]]) -> None:
        request = convert.reprioritize_request(changes, uuid.uuid4().hex)
        try:
            await EngineServiceStub(self._connect(address)).Reprioritize(request, timeout=COMMAND_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("priorities were not changed", address=address, error=_brief(error))

    async def _command(self) -> None:
        while True:
            command = await self._commands.take_one()
            try:
                await self._carry_out(command)
            except grpc.aio.AioRpcError as error:
                log.info("a command failed, which is allowed", command=str(command), error=_brief(error))
                if isinstance(command, act.StartMigration):
                    self._refuse_move(command)

    async def _carry_out(self, command: Command) -> None:
        match command:
            case act.StartMigration() | act.CancelMigration() if not self._settings.migrator:
                if isinstance(command, act.StartMigration):
                    self._refuse_move(command)
            case act.StartMigration():
                migrator = MigratorServiceStub(self._connect(self._settings.migrator))
                accepted = await migrator.StartMigration(convert.migration_request(command), timeout=COMMAND_TIMEOUT_S)
                self.handle(convert.move_accepted(command, accepted))
            case act.CancelMigration(_, migration_id):
                migrator = MigratorServiceStub(self._connect(self._settings.migrator))
                await migrator.CancelMigration(convert.cancel_request(migration_id), timeout=COMMAND_TIMEOUT_S)
            case act.AbortStep(address):
                await EngineServiceStub(self._connect(address)).Abort(
                    convert.abort_request(command), timeout=COMMAND_TIMEOUT_S
                )
            case act.ReleasePrefix(address):
                release = convert.release_request(command, uuid.uuid4().hex)
                await EngineServiceStub(self._connect(address)).ReleasePrefix(release, timeout=COMMAND_TIMEOUT_S)

    def _refuse_move(self, command: act.StartMigration) -> None:
        self.handle(MoveEnded(command.trajectory_id, move_id=command.move_id, reason="NOT_STARTED"))

    async def _announce(self) -> None:
        while True:
            actions = await self._announcements.take(MOST_QUERIES)
            for action in actions:
                await self._bus.publish(convert.fact_of(action))
            closed = [action.record.trajectory_id for action in actions if isinstance(action, act.AnnounceClosed)]
            if closed:
                await self._bus.flush()
                for trajectory_id in closed:
                    self.handle(ClosedAnnounced(trajectory_id))


def _brief(error: Exception) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else repr(error)
