"""The asyncio shell around the pure controller: events in, actions carried out.

Owns the controller and its clock. A request is answered once its state is stored and not before; questions and commands
to other services go to `Outbound`, which works in the background. Events are handled one at a time (the controller
never awaits); stores and calls overlap.
"""

import asyncio
import time
from collections.abc import Callable

import nats.errors
import structlog
from treadle_core.actions import (
    Action,
    ForgetTrajectory,
    HoldStep,
    IssueTicket,
    RemoveEngine,
    SaveEngine,
    SavePolicy,
    SaveTrajectory,
)
from treadle_core.controller import Controller
from treadle_core.events import Event, Tick
from treadle_core.model import TicketRecord

from treadle_scheduler.convert import StepHeld
from treadle_scheduler.store import POLICY_KEY, MeshRecord, Store, engine_key, trajectory_key

log = structlog.get_logger()

# Leases are noticed to have run out at most this much late; a tick looks at what is due and at the engines, no more.
TICK_S = 0.5
# A request for a ticket that the controller holds is answered "ask again" after this long: nobody's call hangs for a
# whole rollout, and a client that went away is noticed.
HOLD_S = 20.0
# At the end of the process: predictions and the like that were not stored yet. Losing them costs a repeated question.
LAST_SETTLE_S = 2.0
# Markers of removed keys are swept now and then; nothing depends on it.
SWEEP_S = 600.0

Send = Callable[[Action], None]


def steady_clock() -> Callable[[], float]:
    """Unix time that never goes back within this process."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


class Driver:
    """See the module. `send` takes the actions that go to other services; it must not block."""

    def __init__(self, controller: Controller, store: Store, epoch_s: float, clock: Callable[[], float], send: Send):
        self.controller = controller
        self._store = store
        self._epoch_s = epoch_s
        self._clock = clock
        self._send = send
        self._askers: dict[str, asyncio.Future[TicketRecord]] = {}

    async def request(self, event: Event, *keys: str) -> None:
        """Handles a request, or a fact of the bus, and returns once its state is stored; `keys` are settled too, so
        that a repeat of a request whose store failed is not answered before it succeeds. Raises Refusal and
        nats.errors.Error."""
        actions = self.controller.on_event(event, self._clock())
        await self._store.settle({*self._carry_out(actions), *keys})

    async def step(self, event: Event, trajectory_id: str, most_s: float | None) -> TicketRecord:
        """Handles a StepRequested: the ticket, once it is stored. Where the controller holds it, waits for at most
        `most_s` seconds (None: HOLD_S). Raises Refusal, StepHeld and nats.errors.Error."""
        issued: asyncio.Future[TicketRecord] = asyncio.get_running_loop().create_future()
        self._askers[trajectory_id] = issued  # a repeat of the request takes the place of the first
        try:
            touched = self._carry_out(self.controller.on_event(event, self._clock()))
            async with asyncio.timeout(HOLD_S if most_s is None else min(HOLD_S, most_s)):
                ticket = await issued
        except TimeoutError as error:
            raise StepHeld(trajectory_id) from error
        finally:
            if self._askers.get(trajectory_id) is issued:
                del self._askers[trajectory_id]
        await self._store.settle({*touched, trajectory_key(trajectory_id)})
        return ticket

    def _issued(self, ticket: TicketRecord) -> None:
        """Answers who waits for it; who asks later gets it as a repeat."""
        asker = self._askers.get(ticket.trajectory_id)
        if asker is not None and not asker.done():
            asker.set_result(ticket)

    def tell(self, event: Event) -> None:
        """Handles an answer of another service; what it changes is stored by the next tick."""
        self._carry_out(self.controller.on_event(event, self._clock()))

    def start(self, actions: list[Action]) -> None:
        """Carries out what restoring the controller asked for."""
        self._carry_out(actions)

    async def tick(self) -> None:
        """Background task: time passes; what is not stored yet gets stored, at the end of the process too."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self.tell(Tick())
                await self._settle_all()
        finally:
            try:
                async with asyncio.timeout(LAST_SETTLE_S):
                    await self._settle_all()
            except TimeoutError:
                log.warning("NATS is away: what was not stored yet is lost with this process")

    async def _settle_all(self) -> None:
        try:
            await self._store.settle_all()
        except nats.errors.Error as error:
            log.warning("state is not stored yet, trying again", error=repr(error))

    async def sweep(self) -> None:
        """Background task: the bucket stays small."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._store.sweep()
            except nats.errors.Error as error:
                log.warning("the bucket was not swept", error=repr(error))

    def _carry_out(self, actions: list[Action]) -> set[str]:
        """Notes state, sends the rest; the keys whose state was noted."""
        keys: set[str] = set()
        for action in actions:
            match action:
                case SaveTrajectory(record):
                    keys.add(key := trajectory_key(record.trajectory_id))
                    self._store.put(key, record)
                case ForgetTrajectory(trajectory_id):
                    self._store.remove(trajectory_key(trajectory_id))
                case SaveEngine(record):
                    keys.add(key := engine_key(record.spec.engine_id))
                    self._store.put(key, record)
                case RemoveEngine(engine_id):
                    keys.add(key := engine_key(engine_id))
                    self._store.remove(key)
                case SavePolicy(policy):
                    keys.add(POLICY_KEY)
                    self._store.put(POLICY_KEY, MeshRecord(policy, self._epoch_s))
                case IssueTicket(ticket):
                    self._issued(ticket)
                case HoldStep():
                    pass
                case _:
                    self._send(action)
        return keys
