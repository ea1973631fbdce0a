"""Drive the scheduler's controller through one rollout under the virtual clock.

The controller is the one that the scheduler service drives (`treadle_core.controller`). The driver
makes the events that clients, sidecars, the predictor, the placement service and the migrator would
send, and executes the controller's actions on simulated engines. It decides nothing. It owns the
trajectories' progress and all times that are reported.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from treadle_core import actions, events
from treadle_core.controller import Controller
from treadle_core.model import Outcome as Ending
from treadle_core.model import Policy, Prediction, TicketRecord
from treadle_core.planning import Planner
from treadle_core.ranking import priorities
from treadle_core.refusals import NoEngine
from treadle_core.tuning import Tuning

from treadle_sim.batch import EngineStep
from treadle_sim.cluster import Cluster, SimPlacement, Timeline, declare, engine_id, engine_index
from treadle_sim.engine import SimEngine
from treadle_sim.engine_model import EngineModel
from treadle_sim.migrator import Migrator
from treadle_sim.outcome import Outcome, Progress, Span
from treadle_sim.predictors import Predictor
from treadle_sim.training import Training, TrainingPlan
from treadle_sim.workloads.workload import Workload

TICK_S = 0.5  # as the scheduler service ticks
RETRY_S = 0.1  # a client's pause before it repeats a request that was refused
# of nothing but ticks, longer than every timeout of the controller: the rollout will never end
STUCK_S = 300.0


class Driver:
    """Driver of one rollout. call_tokens: most tokens of one call, longer turns take several; 0 for
    no limit. paced: of the engines, see SimEngine. training: groups begin as it says, instead of
    all at once (`Training`). tells_groups: the controller learns how many samples a group keeps.
    `log`, where given, receives every (time, event, actions) of the controller."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        policy: Policy,
        tuning: Tuning,
        predictor: Predictor | None,
        *,
        call_tokens: int = 0,
        paced: bool = True,
        planner: type[Planner] = Planner,
        record: bool = False,
        training: TrainingPlan | None = None,
        tells_groups: bool = True,
        log: Callable[[float, events.Event, Sequence[actions.Action]], None] | None = None,
    ) -> None:
        self._workload = workload
        self._told_keep = workload.group_keep if tells_groups else 0
        self._cluster = cluster
        self._latencies = cluster.latencies
        self._predictor = predictor
        self._placement = SimPlacement()
        self._call_tokens = call_tokens
        self._record = record
        self._log = log
        self._timeline = Timeline()
        # Leases never expire by themselves here: `Disruptions` deregisters a failed engine after
        # its lease's time.
        self.controller = Controller(
            policy, replace(tuning, lease_ttl_s=float("inf")), planner=planner
        )
        self._tuning = tuning
        self._preempt, self._paced = policy.preempt, paced
        self._finished: Counter[str] = Counter()  # samples that have all their tokens, by prompt
        self._engines = [
            self._make_engine(index, model) for index, model in enumerate(cluster.engines)
        ]
        self._all = [
            Progress(index, work, context_tokens=work.prompt_tokens)
            for index, work in enumerate(workload.trajectories)
        ]
        self._by_id = {progress.trajectory_id: progress for progress in self._all}
        self._samples_of: dict[str, list[Progress]] = {}
        for progress in self._all:
            self._samples_of.setdefault(progress.work.prompt_id, []).append(progress)
        self._disruptions = Disruptions(
            cluster,
            self._engines,
            self._timeline,
            tuning.lease_ttl_s,
            self._send,
            self._resume_elsewhere,
        )
        self._migrator = Migrator(
            cluster.link,
            self._timeline,
            self._by_id,
            self._engines,
            self._send,
            self._disruptions.is_down,
        )
        self.training = None if training is None else Training(training, workload, self._all, self)
        # seconds of steps, and the tokens that they sampled
        self._measured = (0.0, 0.0)
        self._left = len(self._all)
        self._events = 0
        self._idle_s = 0.0
        self._executors: Mapping[type, Callable[..., None]] = {
            actions.IssueTicket: self._issue_ticket,
            actions.AskPrediction: self._predict,
            actions.AskPlan: self._plan,
            actions.Reprioritize: self._reprioritize,
            actions.StartMigration: self._migrator.start,
            actions.CancelMigration: self._migrator.cancel,
            actions.AnnounceClosed: self._announce_closed,
            actions.AbortStep: self._abort_step,
        }

    def run(self) -> Outcome:
        """Simulate the rollout to its end. Raises RuntimeError if no engine ever takes some of the
        trajectories."""
        self._disruptions.schedule()
        if self.training is not None:
            return self._train(self.training)
        for progress in self._all:
            self._open(progress)
        self._timeline.after(TICK_S, self._tick)
        # Clients request their first steps once their trajectories are open. With predictions they
        # wait for the first plan, which the controller requests at the first tick.
        latencies = self._latencies
        first_s = (
            max(TICK_S, latencies.predict_s) + latencies.plan_s
            if self._predictor is not None
            else 0.0
        )
        for progress in self._all:
            self._timeline.after(first_s + latencies.rpc_s, self._request, progress)
        self._timeline.run(lambda: self._left > 0)
        if self._left:
            raise RuntimeError(f"{self._left} trajectories never ended: no engine takes them")
        return self._outcome()

    def _train(self, training: Training) -> Outcome:
        self._timeline.after(TICK_S, self._tick)
        training.begin()
        self._timeline.run(lambda: not training.over)
        return self._outcome()

    def _outcome(self) -> Outcome:
        return Outcome(
            times=tuple(progress.times for progress in self._all),
            engine_busy_s=tuple(engine.busy_s for engine in self._engines),
            gpus=self._cluster.gpus,
            events=self._events,
            engine_spans=tuple(tuple(engine.spans or ()) for engine in self._engines),
            ledgers=tuple(progress.ledger for progress in self._all if progress.ledger is not None),
        )

    def _make_engine(self, index: int, model: EngineModel) -> SimEngine:
        return SimEngine(
            engine_id(index),
            model,
            self._timeline,
            self,
            preempt=self._preempt,
            paced=self._paced,
            record=self._record,
            finished=self._finished,
        )

    # Events to the controller, and its actions.

    def _send(self, event: events.Event) -> None:
        self._events += 1
        now = self._timeline.now
        wanted = self.controller.on_event(event, now)
        if self._log is not None:
            self._log(now, event, wanted)
        executors = self._executors
        for action in wanted:
            execute = executors.get(type(action))
            if execute is not None:
                execute(action)

    def _tick(self) -> None:
        self._send(events.Tick())
        self._idle_s = self._idle_s + TICK_S if self._timeline.idle else 0.0
        if self._idle_s < STUCK_S:
            self._timeline.after(TICK_S, self._tick)

    def _announce_closed(self, action: actions.AnnounceClosed) -> None:
        self._timeline.after(0.0, self._send, events.ClosedAnnounced(action.record.trajectory_id))

    def _predict(self, ask: actions.AskPrediction) -> None:
        if self._predictor is None:
            return
        record = ask.record
        progress = self._by_id[record.trajectory_id]
        left = self._predictor.predict(progress.index, progress.turn, record.gen_tokens)
        prediction = Prediction(record.next_turn, record.gen_tokens, *left, model_version="sim")
        answer = events.PredictionArrived(record.trajectory_id, prediction)
        self._timeline.after(self._latencies.predict_s, self._take_prediction, progress, answer)

    def _take_prediction(self, progress: Progress, answer: events.PredictionArrived) -> None:
        self._send(answer)
        if self.training is not None and not progress.is_closed:
            self.training.note_prediction(progress)

    def _plan(self, ask: actions.AskPlan) -> None:
        self._timeline.after(self._latencies.plan_s, self._send, self._placement.plan(ask))

    def _reprioritize(self, action: actions.Reprioritize) -> None:
        engine = self._engines[engine_index(action.engine_id)]
        for ticket_id, priority in action.changes:
            engine.reprioritize(ticket_id, priority)

    def _issue_ticket(self, action: actions.IssueTicket) -> None:
        ticket = action.ticket
        progress = self._by_id[ticket.trajectory_id]
        progress.engine = engine = engine_index(ticket.engine_id)
        progress.mark(self._timeline.now, ticket.waited_s)
        progress.asks = False
        progress.book_wait(self._timeline.now, self._record)
        self._timeline.after(self._latencies.rpc_s, self._submit, progress, engine, ticket)

    def _abort_step(self, action: actions.AbortStep) -> None:
        for step in self._engines[engine_index(action.address)].cancel([action.ticket_id]):
            progress = self._all[step.index]
            progress.book_step(step)
            progress.times.gen_tokens += step.done

    # What the clients do; a training asks for the public ones.

    @property
    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._timeline.now

    def after(self, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Make a call later."""
        self._timeline.after(delay_s, call, *arguments)

    def begin(self, progress: Progress) -> None:
        """Open a trajectory, and request its first step once its prediction can be there."""
        self._open(progress)
        wait_s = self._latencies.predict_s if self._predictor is not None else 0.0
        self._timeline.after(wait_s + self._latencies.rpc_s, self._request, progress)

    def abandon(self, progress: Progress) -> None:
        """Close a trajectory that has not ended."""
        progress.is_closed = True
        progress.mark(self._timeline.now)
        closing = (f"c{progress.index}", progress.trajectory_id, Ending.CANCELLED, None)
        self._send(events.TrajectoryClosed(*closing, progress.client_times))

    def rest(self, progress: Progress) -> tuple[float, float]:
        """Return the median seconds that a trajectory still takes, by its prediction and the
        measured seconds of a token, and the standard deviation of their logarithm; 0 without a
        prediction."""
        record = self.controller.trajectory(progress.trajectory_id)
        seconds, tokens = self._measured
        if record.prediction is None or not tokens:
            return 0.0, 0.0
        rest_s = priorities.remaining_s(record, seconds / tokens, self._tuning)
        return rest_s, priorities.log_sigma(record)

    def update_weights(self, pause_s: float) -> None:
        """Give all engines new weights."""
        self._disruptions.update_weights(pause_s)
        seconds, tokens = self._measured
        self._measured = 0.5 * seconds, 0.5 * tokens

    def _open(self, progress: Progress) -> None:
        work = progress.work
        progress.marked_s = self._timeline.now
        self._send(
            events.TrajectoryOpened(
                request_id=f"o{progress.index}",
                trajectory_id=progress.trajectory_id,
                prompt_id=work.prompt_id,
                rollout_id=self._workload.name,
                sample=work.sample,
                prompt_tokens=work.prompt_tokens,
                max_total_tokens=self._workload.max_total_tokens,
                hardware_tags=work.hardware_tags,
                group_keep=self._told_keep,
            )
        )

    def _request(self, progress: Progress, replaces: str = "", resumed_tokens: int = 0) -> None:
        if progress.is_closed:
            return
        progress.requests += 1
        progress.resumed_tokens = resumed_tokens
        progress.requested_s = self._timeline.now
        if not progress.asks:
            progress.mark(self._timeline.now)
            progress.asks = True
        request = events.StepRequested(
            request_id=f"s{progress.index}.{progress.requests}",
            trajectory_id=progress.trajectory_id,
            turn=progress.calls,
            context_tokens=progress.context_tokens,
            max_new_tokens=progress.next_call_tokens(self._call_tokens),
            replaces_ticket_id=replaces,
            resumed_tokens=resumed_tokens,
            tool_s=progress.tool_s,
            client_times=progress.client_times,
        )
        try:
            self._send(request)
        except NoEngine:
            self._timeline.after(RETRY_S, self._request, progress, replaces, resumed_tokens)

    def _submit(self, progress: Progress, engine: int, ticket: TicketRecord) -> None:
        if progress.is_closed:
            return
        if self._disruptions.is_down(engine):  # the connection is refused
            self._timeline.after(
                RETRY_S, self._request, progress, ticket.ticket_id, progress.resumed_tokens
            )
            return
        step = EngineStep(
            ticket.ticket_id,
            progress.index,
            progress.work.prompt_id,
            progress.work.prompt_tokens,
            progress.context_tokens,
            progress.next_call_tokens(self._call_tokens),
            self._timeline.now,
            done=progress.resumed_tokens,
            spans=[] if self._record else None,
        )
        self._engines[engine].submit(
            step,
            ticket.priority,
            preemptible=ticket.preemptible,
            job=ticket.job,
            weight=ticket.weight,
        )

    def step_preempted(self, step: EngineStep) -> None:
        """Report to the controller that the step was evicted."""
        trajectory_id = self._all[step.index].trajectory_id
        preempted = events.StepPreempted(trajectory_id, step.step_id, step.done, step.evicted_by)
        self._timeline.after(0.0, self._send, preempted)

    def prefill_started(self, step: EngineStep) -> None:
        """Note that the engine reads the context of a step."""
        if self.training is not None:
            self.training.note_prefill(self._all[step.index])

    def step_finished(self, step: EngineStep) -> None:
        """Finish the step after all its tokens are sampled."""
        self._timeline.after(0.0, self._finish_step, step)

    def _finish_step(self, step: EngineStep) -> None:
        progress = self._all[step.index]
        if progress.is_closed:  # abandoned a moment ago
            progress.times.gen_tokens += step.gen_tokens
            return
        progress.book_step(step)
        times = step.times
        seconds, tokens = self._measured
        self._measured = seconds + times.total_s, tokens + step.gen_tokens
        progress.mark(self._timeline.now, times.total_s)
        call, context_tokens = progress.calls, progress.context_tokens
        turn_ends = progress.finish_call(step.gen_tokens)
        self._send(
            events.StepFinished(
                progress.trajectory_id, step.step_id, call, context_tokens, step.gen_tokens, times
            )
        )
        if not turn_ends:  # the next call of the same turn: no tool in between
            self._timeline.after(self._latencies.rpc_s, self._request, progress)
            return
        if self._record and progress.tool_s > 0.0:
            now = self._timeline.now
            progress.times.spans.append(Span("tool", now, now + progress.tool_s, progress.engine))
        if progress.is_over:
            self._note_finished(progress.work.prompt_id)
        else:
            self._send(events.ToolStarted(progress.trajectory_id))
        self._timeline.after(
            progress.tool_s, self._close if progress.is_over else self._finish_tool, progress
        )

    def _note_finished(self, prompt_id: str) -> None:
        self._finished[prompt_id] += 1
        for engine in self._engines:
            engine.note_finished(prompt_id)

    def _finish_tool(self, progress: Progress) -> None:
        if progress.is_closed:
            return
        progress.end_tool(self._timeline.now)
        self._send(events.ToolFinished(progress.trajectory_id))
        self._request(progress)

    def _close(self, progress: Progress) -> None:
        if progress.is_closed:
            return
        progress.is_closed = True
        progress.times.finished_s = self._timeline.now
        progress.end_tool(self._timeline.now)
        self._left -= 1
        if self._predictor is not None:
            self._predictor.finish(progress.index)
        closing = (
            f"c{progress.index}",
            progress.trajectory_id,
            Ending.FINISHED,
            progress.work.reward,
        )
        self._send(events.TrajectoryClosed(*closing, progress.client_times))
        # Kept here, since the controller forgets a closed trajectory after a while.
        progress.ledger = self.controller.trajectory(progress.trajectory_id).ledger
        if self.training is not None:
            self.training.note_end(progress)
        if self._workload.group_keep:
            self._settle(progress.work.prompt_id)

    def _settle(self, prompt_id: str) -> None:
        """End the samples that a prompt does not need any more, if it has what it needs."""
        members = self._samples_of[prompt_id]
        running = [each for each in members if not each.is_closed]
        if len(members) - len(running) == self._workload.group_keep:
            for each in running:
                each.times.finished_s = self._timeline.now
                self.abandon(each)
                self._left -= 1

    def _resume_elsewhere(self, steps: Sequence[EngineStep]) -> None:
        """Resume the steps of a failed engine: their clients' streams break, and they go on from
        the tokens they have."""
        for step in steps:
            progress = self._all[step.index]
            progress.book_step(step)
            progress.lost = progress.lost.plus(step.times)
            progress.mark(self._timeline.now, step.times.total_s)
            self._timeline.after(
                self._latencies.rpc_s, self._request, progress, step.step_id, step.done
            )


class Disruptions:
    """Disruptions of engines, which register, fail, return and get new weights at the times of the
    cluster. It knows which engines are down.

    `send` sends an event to the controller; `resume` receives the steps that a failed engine has
    lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        engines: Sequence[SimEngine],
        timeline: Timeline,
        lease_ttl_s: float,
        send: Callable[[events.Event], None],
        resume: Callable[[Sequence[EngineStep]], None],
    ) -> None:
        self._cluster = cluster
        self._engines = engines
        self._timeline = timeline
        self._lease_ttl_s = lease_ttl_s
        self._send = send
        self._resume = resume
        self._down: set[int] = set()
        self._lives = [0] * len(cluster.engines)
        self._weight_version = 0

    def schedule(self) -> None:
        """Register all engines, and put failures and updates of the weights on the timeline."""
        for index in range(len(self._engines)):
            self._register(index)
        for failure in self._cluster.failures:
            self._timeline.at(failure.at_s, self._fail, failure.engine)
            self._timeline.at(failure.back_s, self._return, failure.engine)
        for update in self._cluster.weight_updates:
            self._timeline.at(update.at_s, self.update_weights, update.pause_s)

    def is_down(self, engine: int) -> bool:
        """Return whether the engine refuses calls."""
        return engine in self._down

    def _register(self, index: int) -> None:
        """Register an engine with the weights that are served now."""
        life = self._lives[index]
        spec = declare(index, self._cluster.engines[index], str(self._weight_version))
        self._send(events.EngineRegistered(f"r{index}.{life}", f"l{index}.{life}", spec))

    def _fail(self, index: int) -> None:
        self._down.add(index)
        self._timeline.after(self._lease_ttl_s, self._expire_lease, index, self._lives[index])
        self._resume(self._engines[index].fail())

    def _expire_lease(self, index: int, life: int) -> None:
        if index in self._down and life == self._lives[index]:
            self._send(events.EngineDeregistered(f"l{index}.{life}", engine_id(index)))

    def _return(self, index: int) -> None:
        self._down.discard(index)
        self._lives[index] += 1
        self._register(index)

    def update_weights(self, pause_s: float) -> None:
        """Stop all engines for new weights."""
        self._weight_version += 1
        for engine in self._engines:
            engine.pause(pause_s)
            self._send(events.WeightsUpdated(engine.engine_id, str(self._weight_version)))
