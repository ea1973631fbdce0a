"""One recorded event stream through the simulator's controller and through the scheduler service's
own path: the same actions, in the same order, and the same state in JetStream. What a restart in
the middle changes is held too.

The service's path is `treadle_scheduler.driver.Driver` around a controller started as `wire.py`
starts it, on a real nats-server; only the clock is the recording's, and what would go to other
services is noted instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from support.scheduler_replay import NO_LEASE_ENDS_S, SENT, Service, as_done, service_tuning
from treadle_core import events as ev
from treadle_core.actions import (
    Action,
    AnnounceClosed,
    AskPlan,
    IssueTicket,
    KeepWaiting,
    StartMigration,
)
from treadle_core.controller import Controller
from treadle_core.model import TrajectoryRecord, copy_with
from treadle_runtime.bus import open_bus
from treadle_scheduler.driver import engine_key, trajectory_key
from treadle_sim.cluster import Cluster, Failure, WeightUpdate
from treadle_sim.driver import Driver as SimDriver
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.predictors import make_predictor
from treadle_sim.systems import SYSTEMS
from treadle_sim.workloads.parametric import make
from treadle_sim.workloads.workload import Workload

# Two degrees, so that plans differ from the first placement and trajectories move.
SLOW = EngineModel(
    "toy",
    "toy",
    1,
    4,
    60_000,
    100_000,
    StepCurve((1.0, 8.0), (0.010, 0.014), 1e-7, 0.005, 2e-5, 1e-9),
)
FAST = EngineModel(
    "toy",
    "toy",
    4,
    4,
    240_000,
    100_000,
    StepCurve((1.0, 8.0), (0.005, 0.007), 5e-8, 0.005, 5e-6, 3e-10),
)
# Systems that decide by what is stored alone; see the last test.
WITHOUT_PLANS = ("verl", "verl*", "slime", "affinity-las")
# Before the engine dies, and after it is back. Not while it is dead and its lease runs: that
# clients lost streams there is not stored, so a restarted scheduler sends some there once more.
RESTARTS_AT_S = (10.0, 60.0)


@dataclass(frozen=True)
class Heard:
    """One event of the recording, and what the simulator's controller wanted done."""

    now_s: float
    event: ev.Event
    actions: Sequence[Action]


def workload() -> Workload:
    """24 coding trajectories; their tools take long enough for moves."""
    made = make("coding", prompts=6, samples=4, seed=5, max_gen_tokens=12_000)
    slower = [
        replace(work, steps=tuple(replace(step, tool_s=4.0 * step.tool_s) for step in work.steps))
        for work in made.trajectories
    ]
    return replace(made, trajectories=tuple(slower))


@cache
def recorded(name: str) -> Sequence[Heard]:
    """A system's rollout in which an engine dies and comes back, and the weights change."""
    system = SYSTEMS[name]
    work = workload()
    heard: list[Heard] = []
    cluster = Cluster(
        (FAST, SLOW, SLOW, SLOW),
        failures=(Failure(engine=1, at_s=30.0, back_s=50.0),),
        weight_updates=(WeightUpdate(at_s=70.0, pause_s=2.0),),
    )
    predictor = (
        None if system.predictor == "none" else make_predictor(system.predictor or "noisy", work, 5)
    )

    def log(now_s: float, event: ev.Event, actions: Sequence[Action]) -> None:
        heard.append(Heard(now_s, event, tuple(actions)))

    SimDriver(
        work,
        cluster,
        system.policy,
        system.tuning,
        predictor,
        call_tokens=system.call_tokens,
        planner=system.planner,
        log=log,
    ).run()
    return heard


async def check_same(
    service: Service, stream: Sequence[Heard], *, aside: type[Action] | None = None
) -> None:
    """Feeds a stream to the service and holds each event's actions, one kind `aside`, against the
    recorded ones."""
    waiting: set[str] = set()
    for number, heard in enumerate(stream):
        what = f"event {number} at {heard.now_s} s: {heard.event}"
        done, wanted = await service.hear(heard.now_s, heard.event), as_done(heard.actions)
        if aside is not None:
            done, wanted = (
                [one for one in each if not isinstance(one[1], aside)] for each in (done, wanted)
            )
        assert done == wanted, what
        for action in heard.actions:
            if isinstance(action, KeepWaiting):
                waiting.add(action.trajectory_id)
            elif isinstance(action, IssueTicket):
                waiting.discard(action.ticket.trajectory_id)
                assert await service.ticket(action.ticket.trajectory_id) == action.ticket, what
        assert service.unanswered == sorted(waiting), what


def events_before(stream: Sequence[Heard], at_s: float) -> int:
    """How many, some but not all."""
    count = sum(heard.now_s <= at_s for heard in stream)
    assert 0 < count < len(stream)
    return count


async def check_stored(service: Service, stream: Sequence[Heard]) -> None:
    """JetStream holds what the recorded actions came to."""
    wanted: dict[str, object] = {}
    for heard in stream:
        wanted |= {key: value for key, value in as_done(heard.actions) if key != SENT}
    await service.store.settle_all()
    trajectories, engines, *_ = await service.store.load()
    held: dict[str, object] = {
        trajectory_key(record.trajectory_id): record for record in trajectories
    }
    held |= {engine_key(record.spec.engine_id): record for record in engines}
    assert held == {key: value for key, value in wanted.items() if value is not None}


def known(controller: Controller) -> dict[str, TrajectoryRecord]:
    """The records by id, but for what is not worth a write: whether a tool runs, what it is
    expected to take, when a client asked for a step that waits, and where a trajectory stands that
    has not begun (each plan says so anew)."""
    records: dict[str, TrajectoryRecord] = {}
    for record in controller.trajectories():
        record = copy_with(record, tool_over=False, tool_expected_s=0.0, touched_s=0.0)
        if record.ticket is None:
            record = copy_with(record, engine_id="", revision=0, priority=0.0)
        records[record.trajectory_id] = record
    return records


def test_the_simulators_thresholds_are_those_that_the_service_starts_with() -> None:
    for system in SYSTEMS.values():
        assert replace(system.tuning, lease_ttl_s=NO_LEASE_ENDS_S) == service_tuning(), system.name


@pytest.mark.parametrize("name", SYSTEMS)
async def test_the_service_does_what_the_simulators_controller_does(
    nats_url: str, name: str
) -> None:
    """A whole rollout of each system, an engine's death and an update of the weights in it."""
    system = SYSTEMS[name]
    stream = recorded(name)
    async with open_bus(nats_url, "test") as bus:
        service = await Service.start(bus, 0.0, system.planner)
        await service.hear(0.0, ev.PolicySet(system.policy))

        await check_same(service, stream)
        await check_stored(service, stream)


def test_the_recordings_hold_what_matters() -> None:
    """Else the comparison would prove nothing."""
    events = {type(heard.event) for name in SYSTEMS for heard in recorded(name)}
    actions = {type(action) for heard in recorded("treadle") for action in heard.actions}

    assert {
        ev.EngineDeregistered,
        ev.WeightsUpdated,
        ev.PlanArrived,
        ev.PredictionArrived,
        ev.StepPreempted,
        ev.SwitchRequested,
    } <= events
    assert {AskPlan, KeepWaiting, StartMigration} <= actions


@pytest.mark.parametrize("at_s", RESTARTS_AT_S)
@pytest.mark.parametrize("name", [*WITHOUT_PLANS, "treadle"])
async def test_after_a_restart_the_scheduler_goes_on_with_what_is_stored(
    nats_url: str, name: str, at_s: float
) -> None:
    """Every trajectory and engine is known as before. Systems without plans decide by nothing else
    (tickets, places, lengths, loads) and go on as if nothing had happened; closings alone are
    announced again, since nobody knows which announcements went out. With plans, later actions may
    differ: the plan in force, running means over all trajectories and held requests are not stored.
    A new plan is asked for at once, means are learned again, and clients whose requests were held
    ask again."""
    system = SYSTEMS[name]
    stream = recorded(name)
    cut = events_before(stream, at_s)
    async with open_bus(nats_url, "test") as bus:
        first = await Service.start(bus, 0.0)
        await first.hear(0.0, ev.PolicySet(system.policy))
        await check_same(first, stream[:cut])
        await first.store.settle_all()

        second = await Service.start(bus, at_s)

        assert second.controller.policy == system.policy
        assert second.controller.engines() == first.controller.engines()
        assert known(second.controller) == known(first.controller)
        if name in WITHOUT_PLANS:
            await check_same(second, stream[cut:], aside=AnnounceClosed)
            await check_stored(second, stream)
