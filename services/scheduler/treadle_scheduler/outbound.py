"""What the controller wants of others, in the background: predictions, plans, priorities, moves, announcements.

Nothing waits for these and none may hold up another: each kind has its own bounded worker, calls have deadlines, a
failure is logged and becomes an event where the controller waits for an answer. Newer wishes replace older ones of the
same trajectory or ticket while those still wait, so that a slow peer gets the newest and a queue never grows beyond
what is open.

Work that waits for a worker, by key: newer work of a key takes the place of older that still waits."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc.aio
import structlog
from treadle.engine.v1 import engine_pb2_grpc
from treadle.migrator.v1 import migrator_pb2_grpc
from treadle.placement.v1 import placement_pb2_grpc
from treadle.predictor.v1 import predictor_pb2_grpc
from treadle_core.actions import (
    AbortStep,
    Action,
    AnnounceClosed,
    AnnounceEngineJoined,
    AnnounceEngineLost,
    AnnounceOpened,
    AnnouncePredicted,
    AskPlan,
    AskPrediction,
    CancelMigration,
    ReleasePrefix,
    Reprioritize,
    StartMigration,
)
from treadle_core.events import ClosedAnnounced, Event, MoveEnded, PlanArrived
from treadle_runtime.bus import Bus

from treadle_scheduler import convert_mesh as convert_calls
from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.convert_mesh import fact_of

T = TypeVar("T")


class Waiting(Generic[T]):
    """First come, first served; several workers may take. A key keeps its place when its work is replaced."""

    def __init__(self) -> None:
        self._items: dict[str, T] = {}
        self._filled = asyncio.Event()

    def put(self, key: str, item: T) -> None:
        """Adds or replaces; never blocks."""
        self._items[key] = item
        self._filled.set()

    async def take(self, most: int) -> list[T]:
        """The oldest items, at least one and at most `most`; waits while there is none."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        keys = list(self._items)[:most] if most > 1 else [next(iter(self._items))]
        return [self._items.pop(key) for key in keys]


log = structlog.get_logger()

# A prediction later than this is of no use: the step it would rank is over.
PREDICTION_TIMEOUT_S = 5.0
# Solvers answer in milliseconds; this is for one that is being restarted.
PLAN_TIMEOUT_S = 5.0
# Commands to sidecars and the migrator: they only note the wish.
COMMAND_TIMEOUT_S = 5.0
# Questions in one batch to the predictor; its limit is 4,096.
MOST_QUERIES = 512
# Calls under way to sidecars and the migrator, each kind by itself.
MOST_COMMANDS = 16

Tell = Callable[[Event], None]


class Outbound:
    """See the module. `connect` opens channels; `tell` takes the events that answers become."""

    def __init__(self, settings: SchedulerSettings, bus: Bus, connect: Callable[[str], grpc.aio.Channel]) -> None:
        self._settings = settings
        self._bus = bus
        self._connect = connect
        self._tell: Tell = lambda event: None
        self._predictions: Waiting[AskPrediction] = Waiting()
        self._plans: Waiting[AskPlan] = Waiting()
        self._priorities: Waiting[Reprioritize] = Waiting()
        self._commands: Waiting[StartMigration | CancelMigration | AbortStep | ReleasePrefix] = Waiting()
        self._announcements: Waiting[
            AnnounceOpened | AnnounceClosed | AnnouncePredicted | AnnounceEngineJoined | AnnounceEngineLost
        ] = Waiting()

    def answer_to(self, tell: Tell) -> None:
        """Where events go; set once, before the workers run."""
        self._tell = tell

    def send(self, action: Action) -> None:
        """Takes an action to be done in the background; never blocks. What a part that is off would do is dropped."""
        match action:
            case AskPrediction(trajectory_id):
                if self._settings.predictor:
                    self._predictions.put(trajectory_id, action)
            case AskPlan():
                self._plans.put("plan", action)
            case Reprioritize(_, _, changes):
                for ticket_id, priority in changes:
                    one = Reprioritize(action.engine_id, action.address, ((ticket_id, priority),))
                    self._priorities.put(ticket_id, one)
            case StartMigration():
                self._commands.put(action.move_id, action)
            case CancelMigration(_, migration_id):
                self._commands.put(f"cancel {migration_id}", action)
            case AbortStep(_, ticket_id):
                self._commands.put(f"abort {ticket_id}", action)
            case ReleasePrefix(address, trajectory_id):
                self._commands.put(f"release {address} {trajectory_id}", action)
            case (
                AnnounceOpened()
                | AnnounceClosed()
                | AnnouncePredicted()
                | AnnounceEngineJoined()
                | AnnounceEngineLost()
            ):
                self._announcements.put(uuid.uuid4().hex, action)
            case _:
                raise TypeError(f"{action} is not for others")

    @property
    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """The workers, to be run beside the server."""
        return [self._predict, self._plan, self._prioritize, *[self._command] * MOST_COMMANDS, self._announce]

    async def _predict(self) -> None:
        stub = (
            predictor_pb2_grpc.PredictorServiceStub(self._connect(self._settings.predictor))
            if self._settings.predictor
            else None
        )
        while True:
            asks = await self._predictions.take(MOST_QUERIES)
            if stub is None:
                continue
            try:
                response = await stub.BatchPredictRemaining(
                    convert_calls.predictions_request(asks), timeout=PREDICTION_TIMEOUT_S
                )
                events = convert_calls.predictions_arrived(asks, response)
            except (grpc.aio.AioRpcError, ValueError) as error:
                log.warning("no predictions", queries=len(asks), error=_brief(error))
                continue
            for event in events:
                self._tell(event)

    async def _plan(self) -> None:
        while True:
            (ask,) = await self._plans.take(1)
            event = PlanArrived(ask.plan_id)
            if self._settings.placement:
                stub = placement_pb2_grpc.PlacementServiceStub(self._connect(self._settings.placement))
                try:
                    response = await stub.PlanPlacement(convert_calls.plan_request(ask), timeout=PLAN_TIMEOUT_S)
                    event = convert_calls.plan_arrived(ask, response)
                except grpc.aio.AioRpcError as error:
                    log.warning("no plan", trajectories=len(ask.work), error=_brief(error))
            self._tell(event)

    async def _prioritize(self) -> None:
        while True:
            changes: dict[str, list[tuple[str, float]]] = {}
            for action in await self._priorities.take(MOST_QUERIES):
                changes.setdefault(action.address, []).extend(action.changes)
            async with asyncio.TaskGroup() as group:
                for address, of_address in changes.items():
                    group.create_task(self._reprioritize(address, of_address))

    async def _reprioritize(self, address: str, changes: list[tuple[str, float]]) -> None:
        stub = engine_pb2_grpc.EngineServiceStub(self._connect(address))
        request = convert_calls.reprioritize_request(changes, uuid.uuid4().hex)
        await self._call("reprioritize", stub.Reprioritize(request, timeout=COMMAND_TIMEOUT_S))

    async def _command(self) -> None:
        while True:
            (action,) = await self._commands.take(1)
            match action:
                case StartMigration():
                    await self._start(action)
                case CancelMigration(_, migration_id):
                    if self._settings.migrator:
                        migrator = migrator_pb2_grpc.MigratorServiceStub(self._connect(self._settings.migrator))
                        cancel = convert_calls.cancel_request(migration_id)
                        await self._call(
                            "cancel migration", migrator.CancelMigration(cancel, timeout=COMMAND_TIMEOUT_S)
                        )
                case AbortStep():
                    engine = engine_pb2_grpc.EngineServiceStub(self._connect(action.address))
                    abort = convert_calls.abort_request(action)
                    await self._call("abort step", engine.Abort(abort, timeout=COMMAND_TIMEOUT_S))
                case ReleasePrefix():
                    engine = engine_pb2_grpc.EngineServiceStub(self._connect(action.address))
                    release = convert_calls.release_request(action, uuid.uuid4().hex)
                    await self._call("release prefix", engine.ReleasePrefix(release, timeout=COMMAND_TIMEOUT_S))

    async def _start(self, action: StartMigration) -> None:
        ended = MoveEnded(action.trajectory_id, move_id=action.move_id, reason="NOT_STARTED")
        if not self._settings.migrator:
            self._tell(ended)
            return
        stub = migrator_pb2_grpc.MigratorServiceStub(self._connect(self._settings.migrator))
        try:
            response = await stub.StartMigration(convert_calls.migration_request(action), timeout=COMMAND_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("migration was not started", trajectory_id=action.trajectory_id, error=_brief(error))
            self._tell(ended)
            return
        self._tell(convert_calls.move_accepted(action, response))

    async def _announce(self) -> None:
        while True:
            actions = await self._announcements.take(MOST_QUERIES)
            for action in actions:
                await self._bus.publish(fact_of(action))
            closed = [action.record.trajectory_id for action in actions if isinstance(action, AnnounceClosed)]
            if closed:
                await self._bus.flush()
                for trajectory_id in closed:
                    self._tell(ClosedAnnounced(trajectory_id))

    async def _call(self, what: str, call: Awaitable[Any]) -> None:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            log.info(f"{what} failed, which is allowed", error=_brief(error))


def _brief(error: Exception) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else repr(error)
