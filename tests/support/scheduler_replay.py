"""The scheduler service's own path without its RPCs: driver, controller and store as `wire.py` puts
them together.

The clock is the test's, and what would go to other services is noted instead of sent.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.controller import Controller
from treadle_core.model import Policy, TicketRecord
from treadle_core.planning import Planner
from treadle_core.tuning import Tuning
from treadle_runtime.bus import Bus
from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.driver import (
    POLICY_KEY,
    Driver,
    MeshRecord,
    Record,
    Store,
    engine_key,
    trajectory_key,
)
from treadle_scheduler.lease import Lease
from treadle_scheduler.wire import tuning_of

# The one threshold that the simulator sets itself: its leases never run out, it takes dead engines
# away by an event.
NO_LEASE_ENDS_S = float("inf")
# What the service's own workers tell the driver: answers of other services, and time. The rest are
# RPCs and facts.
TOLD = (ev.PredictionArrived, ev.PlanArrived, ev.MoveAccepted, ev.ClosedAnnounced, ev.Tick)
SENT = ""  # in place of a key, of what goes to another service
LEASE_S = 3600.0  # longer than any replay: nobody renews it
ANSWER_S = 10.0  # a ticket is on its way already when it is waited for


def service_tuning() -> Tuning:
    """What the service starts its controller with, by its defaults."""
    return replace(
        tuning_of(SchedulerSettings(nats_url="nats://unused")), lease_ttl_s=NO_LEASE_ENDS_S
    )


class NotedStore(Store):
    """The service's own store, which also notes what it is told to hold."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease)
        self.log: list[tuple[str, object]] = []

    def put(self, key: str, record: Record | None) -> None:
        self.log.append((key, record))
        super().put(key, record)


class Service:
    """The scheduler's driver, controller and store, put together as `wire.py` does."""

    def __init__(self, store: NotedStore, mesh: MeshRecord, controller: Controller) -> None:
        self.store = store
        self.controller = controller
        self._now_s = 0.0  # what time it was in the recording
        self._steps: dict[str, asyncio.Task[TicketRecord]] = {}
        self._driver = Driver(controller, store, mesh, lambda: self._now_s, self._sent)

    @classmethod
    async def start(cls, bus: Bus, now_s: float, planner: type[Planner] = Planner) -> "Service":
        """Goes on from what an earlier one stored."""
        lease = await Lease.open(bus, LEASE_S)
        await lease.take("replay:0")
        store = NotedStore(lease)
        trajectories, engines, jobs, mesh = await store.load()
        if mesh is None:
            mesh = MeshRecord(Policy(), epoch_s=now_s)
            store.put(POLICY_KEY, mesh)
            await store.settle([POLICY_KEY])
        controller = Controller(mesh.policy, service_tuning(), mesh.epoch_s, planner)
        restored = controller.restore(trajectories, engines, now_s, jobs)
        service = cls(store, mesh, controller)
        service._driver.carry_out(restored)
        return service

    async def hear(self, now_s: float, event: ev.Event) -> list[tuple[str, object]]:
        """Takes an event on the way that the service takes it; what was done, but for tickets
        (`ticket`)."""
        self._now_s = now_s
        self.store.log.clear()
        if isinstance(event, ev.StepRequested):
            step = self._driver.request_step(event, None)
            self._steps[event.trajectory_id] = asyncio.create_task(step)
            # as far as the controller's answer; the ticket may come much later
            await asyncio.sleep(0)
        elif isinstance(event, TOLD):
            self._driver.handle(event)
        else:
            await self._driver.request(event)
        return list(self.store.log)

    async def ticket(self, trajectory_id: str) -> TicketRecord:
        """What the client that asks for a step is answered now."""
        async with asyncio.timeout(ANSWER_S):
            return await self._steps.pop(trajectory_id)

    @property
    def unanswered(self) -> list[str]:
        """Trajectories whose clients wait for a ticket."""
        return sorted(name for name, step in self._steps.items() if not step.done())

    def _sent(self, action: act.Action) -> None:
        self.store.log.append((SENT, action))


def as_done(actions: Iterable[act.Action]) -> list[tuple[str, object]]:
    """The simulator's actions as a service does them: records under their keys, the rest sent;
    tickets are answers."""
    done: list[tuple[str, object]] = []
    for action in actions:
        match action:
            case act.SaveTrajectory(record):
                done.append((trajectory_key(record.trajectory_id), record))
            case act.ForgetTrajectory(trajectory_id):
                done.append((trajectory_key(trajectory_id), None))
            case act.SaveEngine(record):
                done.append((engine_key(record.spec.engine_id), record))
            case act.RemoveEngine(engine_id):
                done.append((engine_key(engine_id), None))
            case act.SavePolicy(policy):
                done.append((POLICY_KEY, MeshRecord(policy, 0.0)))
            case act.IssueTicket() | act.KeepWaiting():
                pass
            case _:
                done.append((SENT, action))
    return done
