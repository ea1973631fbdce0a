"""Drives the scheduler's controller through a rollout under the virtual clock.

The controller is the one that the scheduler service drives (`treadle_core.controller`): the driver makes the events
that clients, sidecars, the predictor, the placement and the migrator would send, and carries its actions out on
simulated engines. It decides nothing. Owner of the trajectories' progress and of all times that are reported.

What happens to simulated engines: they register, fail, come back, and get other weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from treadle_core.actions import (
    Action,
    AnnounceClosed,
    AskPlan,
    AskPrediction,
    CancelMigration,
    IssueTicket,
    Reprioritize,
    StartMigration,
)
from treadle_core.controller import Controller
from treadle_core.events import (
    ClosedAnnounced,
    EngineDeregistered,
    EngineRegistered,
    Event,
    PredictionArrived,
    StepFinished,
    StepPreempted,
    StepRequested,
    Tick,
    ToolFinished,
    ToolStarted,
    TrajectoryClosed,
    TrajectoryOpened,
    WeightsUpdated,
)
from treadle_core.model import Outcome as Ending
from treadle_core.model import Policy, TicketRecord
from treadle_core.refusals import NoEngine
from treadle_core.tuning import Tuning

from treadle_sim.batch import EngineStep
from treadle_sim.cluster import Cluster, SimPlacement, engine_id, specs
from treadle_sim.engine import SimEngine
from treadle_sim.migrator import Migrator
from treadle_sim.outcome import Outcome, Progress, Span, Times
from treadle_sim.predictors import Predictor
from treadle_sim.timeline import Timeline
from treadle_sim.workloads.workload import Workload


class Mishaps:
    """Owner of who is dead. `tell` takes an event to the controller, `lost` the steps that an engine took with it."""

    def __init__(
        self,
        cluster: Cluster,
        engines: Sequence[SimEngine],
        timeline: Timeline,
        lease_ttl_s: float,
        tell: Callable[[Event], None],
        lost: Callable[[Sequence[EngineStep]], None],
    ) -> None:
        self._cluster = cluster
        self._engines = engines
        self._timeline = timeline
        self._lease_ttl_s = lease_ttl_s
        self._tell = tell
        self._lost = lost
        self._specs = specs(cluster.engines)
        self._dead: set[int] = set()
        self._lives = [0] * len(engines)
        self._weight_version = 0

    def begin(self) -> None:
        """All engines register; what is to happen to them is put on the timeline."""
        for index in range(len(self._engines)):
            self._register(index)
        for failure in self._cluster.failures:
            self._timeline.at(failure.at_s, self._fail, failure.engine)
            self._timeline.at(failure.back_s, self._back, failure.engine)
        for update in self._cluster.weight_updates:
            self._timeline.at(update.at_s, self._update_weights, update.pause_s)

    def dead(self, engine: int) -> bool:
        """Whether a call to the engine is refused."""
        return engine in self._dead

    def _register(self, index: int) -> None:
        life = self._lives[index]
        spec = replace(self._specs[index], weight_version=str(self._weight_version))  # it loads what is served now
        self._tell(EngineRegistered(f"r{index}.{life}", f"l{index}.{life}", spec))

    def _fail(self, index: int) -> None:
        self._dead.add(index)
        self._timeline.after(self._lease_ttl_s, self._lease_over, index, self._lives[index])
        self._lost(self._engines[index].fail())

    def _lease_over(self, index: int, life: int) -> None:
        if index in self._dead and life == self._lives[index]:
            self._tell(EngineDeregistered(f"l{index}.{life}", engine_id(index)))

    def _back(self, index: int) -> None:
        self._dead.discard(index)
        self._lives[index] += 1
        self._register(index)

    def _update_weights(self, pause_s: float) -> None:
        self._weight_version += 1
        for engine in self._engines:
            engine.pause(pause_s)
            self._tell(WeightsUpdated(engine.engine_id, str(self._weight_version)))


TICK_S = 0.5  # as the scheduler service ticks
RETRY_S = 0.1  # a client's pause before it asks again where it was refused
STUCK_S = 300.0  # nothing but ticks for so long, beyond every timeout of the controller: nothing will ever happen


class Driver:
    """One rollout. call_tokens: most tokens of one call, longer turns take several; 0 for no limit. `log`, where
    given, gets every (time, event, actions) of the controller."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        policy: Policy,
        tuning: Tuning,
        predictor: Predictor | None,
        *,
        call_tokens: int = 0,
        record: bool = False,
        log: Callable[[float, Event, Sequence[Action]], None] | None = None,
    ) -> None:
        self._workload = workload
        self._cluster = cluster
        self._predictor = predictor
        self._placement = SimPlacement()
        self._call_tokens = call_tokens
        self._record = record
        self._log = log
        self._timeline = Timeline()
        # No lease runs out by itself here: a failure deregisters its engine after the time that a lease takes.
        self._controller = Controller(policy, replace(tuning, lease_ttl_s=float("inf")))
        self._engines = [
            SimEngine(engine_id(index), model, self._timeline, self, preempt=policy.preempt)
            for index, model in enumerate(cluster.engines)
        ]
        self._engine_index = {engine.engine_id: index for index, engine in enumerate(self._engines)}
        self._all = [
            Progress(work, f"t{index}", Times(), context_tokens=work.prompt_tokens)
            for index, work in enumerate(workload.trajectories)
        ]
        self._index = {progress.trajectory_id: index for index, progress in enumerate(self._all)}
        self._mishaps = Mishaps(cluster, self._engines, self._timeline, tuning.lease_ttl_s, self._tell, self._lost)
        self._migrator = Migrator(
            cluster.link,
            self._timeline,
            {progress.trajectory_id: (index, progress) for index, progress in enumerate(self._all)},
            self._engines,
            self._tell,
            self._mishaps.dead,
        )
        self._left = len(self._all)
        self._events = 0
        self._idle_s = 0.0
        self._carriers: Mapping[type, Callable[..., None]] = {
            IssueTicket: self._issued,
            AskPrediction: self._asked_prediction,
            AskPlan: self._asked_plan,
            Reprioritize: self._reprioritized,
            StartMigration: self._migrator.start,
            CancelMigration: self._migrator.cancel,
            AnnounceClosed: self._announced,
        }
        if record:
            for engine in self._engines:
                engine.spans = []

    def run(self) -> Outcome:
        """Plays the rollout to its end."""
        self._mishaps.begin()
        for index, progress in enumerate(self._all):
            self._open(index, progress)
        self._timeline.after(TICK_S, self._tick)
        # Clients ask for their first steps once their trajectories are open; where lengths are predicted they wait for
        # the first plan, which is asked for at the first tick.
        latencies = self._cluster.latencies
        first_s = max(TICK_S, latencies.predict_s) + latencies.plan_s if self._predictor is not None else 0.0
        for index in range(len(self._all)):
            self._timeline.after(first_s + latencies.rpc_s, self._request, index)
        self._timeline.run(lambda: self._left > 0)
        if self._left:
            raise RuntimeError(f"{self._left} trajectories never ended: no engine takes them")
        return Outcome(
            times=tuple(progress.times for progress in self._all),
            engine_busy_s=tuple(engine.busy_s for engine in self._engines),
            gpus=self._cluster.gpus,
            events=self._events,
            engine_spans=tuple(tuple(engine.spans or ()) for engine in self._engines),
        )

    # The controller.

    def _tell(self, event: Event) -> None:
        self._events += 1
        now = self._timeline.now
        actions = self._controller.on_event(event, now)
        if self._log is not None:
            self._log(now, event, actions)
        carriers = self._carriers
        for action in actions:
            carrier = carriers.get(type(action))
            if carrier is not None:
                carrier(action)

    def _tick(self) -> None:
        self._tell(Tick())
        self._idle_s = self._idle_s + TICK_S if self._timeline.idle else 0.0
        if self._idle_s < STUCK_S:
            self._timeline.after(TICK_S, self._tick)

    def _announced(self, action: AnnounceClosed) -> None:
        """NATS has it."""
        self._timeline.after(0.0, self._tell, ClosedAnnounced(action.record.trajectory_id))

    def _asked_prediction(self, ask: AskPrediction) -> None:
        if self._predictor is None:
            return
        index = self._index[ask.trajectory_id]
        tokens, turns = self._predictor.predict(index, self._all[index].turn, ask.gen_tokens)
        answer = PredictionArrived(ask.trajectory_id, ask.turn, ask.gen_tokens, tokens, turns, "sim")
        self._timeline.after(self._cluster.latencies.predict_s, self._tell, answer)

    def _asked_plan(self, ask: AskPlan) -> None:
        self._timeline.after(self._cluster.latencies.plan_s, self._tell, self._placement.plan(ask))

    def _reprioritized(self, action: Reprioritize) -> None:
        engine = self._engines[self._engine_index[action.engine_id]]
        for ticket_id, priority in action.changes:
            engine.reprioritize(ticket_id, priority)

    # Trajectories.

    def _open(self, index: int, progress: Progress) -> None:
        work = progress.work
        self._tell(
            TrajectoryOpened(
                request_id=f"o{index}",
                trajectory_id=progress.trajectory_id,
                prompt_id=work.prompt_id,
                rollout_id=self._workload.name,
                sample=work.sample,
                prompt_tokens=work.prompt_tokens,
                max_total_tokens=self._workload.max_total_tokens,
                hardware_tags=work.hardware_tags,
            )
        )

    def _request(self, index: int, replaces: str = "", resumed_tokens: int = 0) -> None:
        progress = self._all[index]
        progress.requests += 1
        progress.resumed_tokens = resumed_tokens
        progress.asked_s = self._timeline.now
        request = StepRequested(
            request_id=f"s{index}.{progress.requests}",
            trajectory_id=progress.trajectory_id,
            turn=progress.calls,
            context_tokens=progress.context_tokens,
            max_new_tokens=progress.next_call_tokens(self._call_tokens),
            replaces_ticket_id=replaces,
            resumed_tokens=resumed_tokens,
            tool_s=progress.tool_s,
        )
        try:
            self._tell(request)
        except NoEngine:
            self._timeline.after(RETRY_S, self._request, index, replaces, resumed_tokens)

    def _issued(self, action: IssueTicket) -> None:
        ticket = action.ticket
        index = self._index[ticket.trajectory_id]
        self._all[index].engine = engine = self._engine_index[ticket.engine_id]
        self._all[index].waited(self._timeline.now, self._record)
        self._timeline.after(self._cluster.latencies.rpc_s, self._submit, index, engine, ticket)

    def _submit(self, index: int, engine: int, ticket: TicketRecord) -> None:
        if self._mishaps.dead(engine):  # the connection is refused
            self._timeline.after(RETRY_S, self._request, index, ticket.ticket_id, self._all[index].resumed_tokens)
            return
        progress = self._all[index]
        work = progress.work
        step = EngineStep(
            ticket.ticket_id,
            index,
            work.prompt_id,
            work.prompt_tokens,
            progress.context_tokens,
            progress.next_call_tokens(self._call_tokens),
            self._timeline.now,
            done=progress.resumed_tokens,
            spans=[] if self._record else None,
        )
        self._engines[engine].submit(step, ticket.priority, preemptible=ticket.preemptible)

    def step_preempted(self, step: EngineStep) -> None:
        """See engine_step.StepListener."""
        trajectory_id = self._all[step.index].trajectory_id
        self._timeline.after(0.0, self._tell, StepPreempted(trajectory_id, step.step_id, step.done))

    def step_finished(self, step: EngineStep) -> None:
        """See engine_step.StepListener."""
        self._timeline.after(0.0, self._finished, step)

    def _finished(self, step: EngineStep) -> None:
        progress = self._all[step.index]
        progress.book(step)
        call, context_tokens = progress.calls, progress.context_tokens
        turn_over = progress.called(step.gen_tokens)
        self._tell(StepFinished(progress.trajectory_id, step.step_id, call, context_tokens, step.gen_tokens))
        if not turn_over:  # the next chunk of the same turn: no tool in between
            self._timeline.after(self._cluster.latencies.rpc_s, self._request, step.index)
            return
        if self._record and progress.tool_s > 0.0:
            now = self._timeline.now
            progress.times.spans.append(Span("tool", now, now + progress.tool_s, progress.engine))
        if not progress.over:
            self._tell(ToolStarted(progress.trajectory_id))
        self._timeline.after(progress.tool_s, self._close if progress.over else self._tool_over, step.index)

    def _tool_over(self, index: int) -> None:
        self._tell(ToolFinished(self._all[index].trajectory_id))
        self._request(index)

    def _close(self, index: int) -> None:
        progress = self._all[index]
        progress.done = True
        progress.times.finished_s = self._timeline.now
        self._left -= 1
        if self._predictor is not None:
            self._predictor.finished(index)
        self._tell(TrajectoryClosed(f"c{index}", progress.trajectory_id, Ending.FINISHED, progress.work.reward))

    def _lost(self, steps: Sequence[EngineStep]) -> None:
        for step in steps:
            self._all[step.index].book(step)
            # The client's stream breaks; it goes on from the tokens that it has.
            self._timeline.after(self._cluster.latencies.rpc_s, self._request, step.index, step.step_id, step.done)
