"""Run the controller in asyncio, and keep its state in a JetStream bucket.

Store holds one key for each trajectory, engine and job, and one for the policy: `put` notes what a
key should hold, `settle` returns once the bucket holds it. All that is noted is written as one
batch, and what is noted meanwhile goes into the next one, so that a slow write delays many requests
once instead of each in turn. Per key the newest value wins; a write that failed is made again with
the next batch. Driver answers nothing before its keys are settled, so that a SIGKILL loses nothing
that a client has received.

Records are JSON by pydantic's serializer, which encodes a trajectory in 16 us where json.dumps over
plain values took 110. Fields that hold their default are left out and unknown ones are ignored, so
that a newer scheduler reads what an older one stored and the other way round.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NewType, TypeVar, cast

import nats.errors
import structlog
from pydantic import ConfigDict, TypeAdapter, ValidationError
from treadle_core import actions as act
from treadle_core.controller import Controller
from treadle_core.events import Event, StepRequested, Tick
from treadle_core.model import (
    EngineRecord,
    JobRecord,
    Policy,
    TicketRecord,
    TrajectoryRecord,
    WeightsRecord,
)
from treadle_runtime.buckets import entries_of, purge_markers
from treadle_runtime.bus import kv_key

from treadle_scheduler.convert import event_of
from treadle_scheduler.lease import LEADER_KEY, Lease, NotLeader

log = structlog.get_logger()

POLICY_KEY = "policy"
# An expired lease is noticed at most this much late; a tick only checks what is due and the
# engines.
TICK_S = 0.5
# A tick that comes later than this carries its delay: this process did not run, as it was stopped
# or the machine was busy, and handled no renewals meanwhile.
LATE_S = 0.1
# ScheduleStep answers STEP_HELD after this long without a ticket, so that no call lasts for a whole
# rollout. Thousands may wait, and each repeated call costs as much as a step.
HOLD_S = 120.0
# Between the beginnings of two batches of writes. Fewer and larger ones save a busy scheduler a
# sixth of its work; one that is not busy does not wait.
BATCH_INTERVAL_S = 0.003
# At the end of the process, for predictions and the like that were not stored yet; losing them
# costs a repeated request.
LAST_SETTLE_S = 2.0
PURGE_S = 600  # deleted keys leave markers; they are purged this often, and nothing depends on it

R = TypeVar("R")


class StepHeld(Exception):  # noqa: N818 - a condition, not a fault
    """The trajectory waits for KV space or a slot on an engine, or for its KV to move; the client
    repeats the call."""

    def __init__(self, trajectory_id: str) -> None:
        super().__init__(f"{trajectory_id} waits for space on an engine; ask again")
        self.trajectory_id = trajectory_id


class CorruptRecord(Exception):  # noqa: N818 - named as what was found
    """The stored bytes are no record of the expected class."""


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """State of the whole mesh: the policy of new trajectories, when the mesh first started
    (`epoch_s`, Unix time), the weights that all engines are to serve, the key that seals tickets
    (`ticket_key`, in hex), and the ids of engines that are drained."""

    policy: Policy
    epoch_s: float
    weights: WeightsRecord | None = None
    ticket_key: str = field(default="", repr=False)
    drained: tuple[str, ...] = ()


Record = TrajectoryRecord | EngineRecord | JobRecord | MeshRecord


# pydantic takes no config beside a dataclass itself, only beside a new type. A lease that never
# ends is infinite.
_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    cls: TypeAdapter(
        cast(Any, NewType("Stored", cls)), config=ConfigDict(ser_json_inf_nan="constants")
    )
    for cls in (TrajectoryRecord, EngineRecord, JobRecord, MeshRecord)
}


def encode(record: Record) -> bytes:
    return _ADAPTERS[type(record)].dump_json(record, exclude_defaults=True)


def decode(cls: type[R], data: bytes) -> R:
    """Return the record that `data` encodes. Raises CorruptRecord."""
    try:
        record: R = _ADAPTERS[cls].validate_json(data)
    except ValidationError as error:
        # the input may hold the key of tickets
        wrong = error.errors(include_input=False, include_url=False)
        raise CorruptRecord(f"no {cls.__name__}: {wrong}") from None
    return record


@dataclass(slots=True, eq=False)
class _Batch:
    """Records that are written together; None removes a key. failed: keys whose write failed, once
    `ended`."""

    records: dict[str, Record | None] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)
    ended: bool = False


def trajectory_key(trajectory_id: str) -> str:
    return kv_key("trajectory", trajectory_id)


def engine_key(engine_id: str) -> str:
    return kv_key("engine", engine_id)


def job_key(job_id: str) -> str:
    return kv_key("job", job_id)


class Store:
    """Records in the bucket, which this process owns while it leads; the top of this module
    describes `put` and `settle`."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self._noted, self._writing = _Batch(), _Batch()
        self._next_batch_s = 0.0  # loop time

    async def load(
        self,
    ) -> tuple[list[TrajectoryRecord], list[EngineRecord], list[JobRecord], MeshRecord | None]:
        """Return what the bucket holds when this process begins to lead. Raises CorruptRecord."""
        values = {entry.key: entry.value or b"" for entry in await entries_of(self.lease.bucket)}
        return await asyncio.to_thread(self._decode, values)  # the lease is renewed meanwhile

    def _decode(
        self, values: dict[str, bytes]
    ) -> tuple[list[TrajectoryRecord], list[EngineRecord], list[JobRecord], MeshRecord | None]:
        values.pop(LEADER_KEY, None)
        mesh = values.pop(POLICY_KEY, None)
        trajectories = [values.pop(key) for key in list(values) if key.startswith("trajectory.")]
        jobs = [values.pop(key) for key in list(values) if key.startswith("job.")]
        return (
            [decode(TrajectoryRecord, value) for value in trajectories],
            [decode(EngineRecord, value) for value in values.values()],
            [decode(JobRecord, value) for value in jobs],
            None if mesh is None else decode(MeshRecord, mesh),
        )

    def put(self, key: str, record: Record | None) -> None:
        """Note that `key` is to hold the record, or is to be removed."""
        self._noted.records[key] = record

    async def settle(self, keys: Iterable[str]) -> None:
        """Wait until each key holds what was noted last, or newer. Raises NotLeader and
        nats.errors.Error; what failed stays noted."""
        wanted = set(keys)
        batch = self._noted if wanted & self._noted.records.keys() else self._writing
        if wanted.isdisjoint(batch.records):
            return
        while not batch.ended:
            async with self.lease.writing:
                if batch is self._noted:
                    await self._write_noted()
                elif (
                    not batch.ended
                ):  # the task that wrote the batch was cancelled, so its records are noted again
                    batch = self._noted
        for key in wanted & batch.failed.keys():
            raise batch.failed[key]

    async def settle_all(self) -> None:
        """Settle every key, and log while NATS does not answer."""
        try:
            await self.settle([*self._writing.records, *self._noted.records])
        except nats.errors.Error as error:
            log.warning("state is not stored yet; trying again", error=repr(error))

    async def hand_over(self) -> None:
        """Store what is not stored yet, and let another process lead."""
        try:
            async with asyncio.timeout(LAST_SETTLE_S):
                await self.settle_all()
                await self.lease.release()
        except NotLeader:
            pass  # another process leads already, and the log says so
        except (TimeoutError, nats.errors.Error, OSError):
            log.warning("NATS does not answer: what was not stored yet is lost with this process")

    async def purge_markers(self) -> None:
        """Delete the markers of removed keys regularly, which keeps the bucket small; a background
        task."""
        while True:
            await asyncio.sleep(PURGE_S)
            try:
                await purge_markers(self.lease.bucket)
            except nats.errors.Error as error:
                log.warning("markers of deleted keys were not purged", error=repr(error))

    async def _write_noted(self) -> None:
        clock = asyncio.get_running_loop().time
        if (wait_s := self._next_batch_s - clock()) > 0:
            await asyncio.sleep(wait_s)
        self._next_batch_s = clock() + BATCH_INTERVAL_S
        batch, self._noted = self._noted, _Batch()
        self._writing = batch
        values = {
            key: None if record is None else encode(record) for key, record in batch.records.items()
        }
        try:
            batch.failed = await self.lease.write(values)
            batch.ended = True
        finally:
            self._writing = _Batch()
            for key in batch.failed if batch.ended else batch.records:
                self._noted.records.setdefault(key, batch.records[key])


class Driver:
    """Runner of the pure controller in asyncio: it passes events in and carries the returned
    actions out.

    It owns the controller, its clock and the mesh's record. Events are handled one at a time,
    because the controller never awaits; writes and calls overlap. A request is answered once its
    state is stored and not before. `send` takes the actions that go to other services; it must not
    block. `note` gets the actions of each event, to count them.
    """

    def __init__(
        self,
        controller: Controller,
        store: Store,
        mesh: MeshRecord,
        clock: Callable[[], float],
        send: Callable[[act.Action], None],
        note: Callable[[Sequence[act.Action]], None] = lambda _: None,
    ) -> None:
        self.controller = controller
        self._store = store
        self.mesh = mesh
        self._clock = clock
        self._send = send
        self._note = note
        # ScheduleStep calls by trajectory
        self._waiting: dict[str, asyncio.Future[TicketRecord]] = {}
        self._holds = True  # whether ScheduleStep calls may wait

    async def request(self, event: Event, *keys: str) -> None:
        """Handle a request, or a fact of the bus, and return once its state is stored.

        `keys` are settled too, so that a repeat of a request whose write failed is not answered
        before the write succeeds. Raises Refusal, NotLeader and nats.errors.Error.
        """
        await self._store.settle({*self.handle(event), *keys})

    async def hear(self, fact: Any) -> None:
        """Handle the event that a fact of the bus becomes, if any, once this process is known to
        lead."""
        event = event_of(fact)
        if event is not None:
            await self._store.lease.until_held()
            await self.request(event)

    async def request_step(self, event: StepRequested, timeout_s: float | None) -> TicketRecord:
        """Handle a request for a ticket and return the ticket once it is stored.

        It waits at most `timeout_s` seconds for the ticket (None: HOLD_S). Raises Refusal,
        StepHeld, NotLeader and nats.errors.Error.
        """
        issued: asyncio.Future[TicketRecord] = asyncio.get_running_loop().create_future()
        self._waiting[event.trajectory_id] = (
            issued  # a repeat of the request takes the place of the first
        )
        try:
            touched = self.handle(event)
            if not self._holds:
                self.hold(False)
            async with asyncio.timeout(HOLD_S if timeout_s is None else min(HOLD_S, timeout_s)):
                ticket = await issued
        except TimeoutError as error:
            raise StepHeld(event.trajectory_id) from error
        finally:
            if self._waiting.get(event.trajectory_id) is issued:
                del self._waiting[event.trajectory_id]
        await self._store.settle({*touched, trajectory_key(event.trajectory_id)})
        return ticket

    def hold(self, holds: bool) -> None:
        """Set whether calls may wait for a ticket. While they may not, each is answered STEP_HELD
        at once, as another process leads or may lead."""
        self._holds = holds
        for trajectory_id, waiting in self._waiting.items():
            if not holds and not waiting.done():
                waiting.set_exception(StepHeld(trajectory_id))

    def handle(self, event: Event) -> set[str]:
        """Handle an event at once, and return the keys of changed state, which the next tick
        stores."""
        return self.carry_out(self.controller.on_event(event, self._clock()))

    @property
    def held_calls(self) -> int:
        """Return the number of calls that wait for a ticket."""
        return len(self._waiting)

    @property
    def now(self) -> float:
        """Return the time of the controller's clock."""
        return self._clock()

    async def tick(self) -> None:
        """Pass a Tick to the controller every TICK_S, while this process is known to lead; a
        background task."""
        while True:
            slept_since_s = self._clock()
            await asyncio.sleep(TICK_S)
            await self._store.lease.until_held()
            late_s = self._clock() - slept_since_s - TICK_S
            self.handle(Tick(late_s if late_s > LATE_S else 0.0))

    async def store(self) -> None:
        """Store state for which no call waits; a background task."""
        while True:
            await asyncio.sleep(TICK_S)
            await self._store.settle_all()

    def carry_out(self, actions: list[act.Action]) -> set[str]:
        """Note state to be stored, send the other actions, and return the keys whose state a
        request must wait for."""
        keys: set[str] = set()
        self._note(actions)
        for action in actions:
            match action:
                case act.SaveTrajectory(record):
                    keys.add(key := trajectory_key(record.trajectory_id))
                    self._store.put(key, record)
                case act.ForgetTrajectory(trajectory_id):
                    self._store.put(trajectory_key(trajectory_id), None)
                case act.SaveEngine(record):
                    keys.add(key := engine_key(record.spec.engine_id))
                    self._store.put(key, record)
                case act.RemoveEngine(engine_id):
                    keys.add(key := engine_key(engine_id))
                    self._store.put(key, None)
                case act.SaveJob(record):
                    keys.add(key := job_key(record.job_id))
                    self._store.put(key, record)
                case act.RemoveJob(job_id):
                    keys.add(key := job_key(job_id))
                    self._store.put(key, None)
                case act.SavePolicy() | act.SaveWeights() | act.SaveDrained():
                    keys.add(POLICY_KEY)
                    policy, weights = self.controller.policy, self.controller.desired_weights
                    self.mesh = replace(
                        self.mesh, policy=policy, weights=weights, drained=self.controller.drained
                    )
                    self._store.put(POLICY_KEY, self.mesh)
                case act.IssueTicket(ticket):
                    waiting = self._waiting.get(ticket.trajectory_id)
                    if waiting is not None and not waiting.done():
                        # a later repeat of the request gets the ticket from the record
                        waiting.set_result(ticket)
                case act.KeepWaiting():
                    pass
                case _:
                    self._send(action)
        return keys


def steady_clock() -> Callable[[], float]:
    """Return a clock of Unix time that never goes back within this process."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()
