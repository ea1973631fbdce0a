"""Several jobs on the simulator's engines under its clock: the real controller, the real queues,
clients in a loop."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from support.simulated import engine
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.controller import Controller
from treadle_core.model import TREADLE_POLICY, Estimate, Outcome, Policy, Prediction, TicketRecord
from treadle_core.tuning import Tuning
from treadle_sim.batch import EngineStep
from treadle_sim.cluster import SimPlacement, Timeline, declare, engine_id, engine_index
from treadle_sim.engine import SimEngine

TICK_S = 0.5
NEVER_S = 1e9
PROMPT_TOKENS = 200
TURN_TOKENS = 10  # that a tool's answer adds to the context

Turns = Sequence[tuple[int, float]]  # (tokens to sample, seconds of the tool after it)


@dataclass(eq=False)
class Trajectory:
    """asked_s: when its present step was requested. step: the one that is out; steps: those that
    have ended. waits_s: seconds that each of these waited, for its ticket and in the queue of its
    engine."""

    name: str
    job: str
    turns: Turns
    closed: Callable[[], None]
    turn: int = 0
    context_tokens: int = PROMPT_TOKENS
    asked_s: float = 0.0
    step: EngineStep | None = None
    steps: list[EngineStep] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)


class SharedMesh:
    """trajectories: all that were opened, in order. evictions: of steps."""

    def __init__(
        self, engines: int, slots: int, kv_tokens: int, policy: Policy = TREADLE_POLICY
    ) -> None:
        self.timeline = Timeline()
        self.controller = Controller(policy, Tuning(lease_ttl_s=NEVER_S, job_lease_s=NEVER_S))
        self.evictions = 0
        self._samples: list[tuple[float, Counter[str]]] = []  # of reserved KV tokens, by time
        self._placement = SimPlacement()
        self._by_name: dict[str, Trajectory] = {}
        self.trajectories: list[Trajectory] = []
        self._names: dict[str, int] = {}
        model = engine(1, slots, kv_tokens)
        self._engines = [
            SimEngine(
                engine_id(index), model, self.timeline, self, preempt=True, paced=True, record=True
            )
            for index in range(engines)
        ]
        for index in range(engines):
            self._send(ev.EngineRegistered(f"r{index}", f"l{index}", declare(index, model, "0")))
        self.timeline.after(TICK_S, self._tick)

    def job(self, name: str, weight: float, policy: Policy | None = None) -> None:
        """A client opens a job, whose id is its name."""
        self._send(ev.JobOpened(f"o-{name}", name, name, weight=weight, policy=policy))

    def open(self, job: str, turns: Turns, closed: Callable[[], None] = lambda: None) -> None:
        """Open a trajectory now and run it to its end, then call `closed`."""
        made = Trajectory(f"{job}.{len(self.trajectories)}", job, turns, closed)
        self._by_name[made.name] = made
        self._names[made.name] = len(self.trajectories)
        self.trajectories.append(made)
        self._send(
            ev.TrajectoryOpened(
                f"o-{made.name}", made.name, made.name, prompt_tokens=PROMPT_TOKENS, job_id=job
            )
        )
        self._request(made)

    def flood(self, job: str, count: int, turns: Callable[[int], Turns]) -> None:
        """Keep so many trajectories of a job open for ever."""
        opened = 0

        def open_next() -> None:
            nonlocal opened
            opened += 1
            self.open(job, turns(opened), open_next)

        for _ in range(count):
            open_next()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.timeline.now + seconds
        self.timeline.run(lambda: self.timeline.now < until_s)

    def slot_seconds(self, since_s: float, until_s: float) -> dict[str, float]:
        """Seconds for which steps of each job held a slot."""
        found: defaultdict[str, float] = defaultdict(float)
        for trajectory in self.trajectories:
            for step in [
                *trajectory.steps,
                *([trajectory.step] if trajectory.step is not None else []),
            ]:
                spans = list(step.spans or ())
                if step.step_id in self._running_steps():
                    spans.append(("decode", step.since_s, self.timeline.now))
                for what, begin_s, end_s in spans:
                    if what != "queue":
                        found[trajectory.job] += max(
                            0.0, min(end_s, until_s) - max(begin_s, since_s)
                        )
        return found

    def kv_token_seconds(self, since_s: float, until_s: float) -> dict[str, float]:
        """Reserved KV of each job over time."""
        found: defaultdict[str, float] = defaultdict(float)
        for (begin_s, tokens), (end_s, _) in pairwise(self._samples):
            for job, count in tokens.items():
                found[job] += count * max(0.0, min(end_s, until_s) - max(begin_s, since_s))
        return found

    def prefill_started(self, step: EngineStep) -> None:
        """Ignore the event, which nothing here needs."""

    def step_preempted(self, step: EngineStep) -> None:
        self.evictions += 1

    def step_finished(self, step: EngineStep) -> None:
        self.timeline.after(0.0, self._finish, self.trajectories[step.index], step)

    def _running_steps(self) -> set[str]:
        return {step_id for each in self._engines for step_id in each._batch.steps}

    def _send(self, event: ev.Event) -> None:
        for action in self.controller.on_event(event, self.timeline.now):
            match action:
                case act.IssueTicket(ticket):
                    self._submit(self._by_name[ticket.trajectory_id], ticket)
                case act.AskPrediction(record):
                    self._predict(self._by_name[record.trajectory_id], record.gen_tokens)
                case act.AskPlan():
                    self.timeline.after(0.01, self._send, self._placement.plan(action))
                case act.Reprioritize(where, _, changes):
                    for ticket_id, priority in changes:
                        self._engines[engine_index(where)].reprioritize(ticket_id, priority)
                case act.StartMigration():
                    failed = ev.MoveEnded(action.trajectory_id, move_id=action.move_id)
                    self.timeline.after(0.01, self._send, failed)
                case act.AnnounceClosed(record, _):
                    self.timeline.after(0.0, self._send, ev.ClosedAnnounced(record.trajectory_id))

    def _tick(self) -> None:
        tokens: Counter[str] = Counter()
        for record in self.controller.trajectories():
            if record.is_open and record.ticket is not None:
                tokens[record.job] += record.ticket.kv_reserve_tokens
        self._samples.append((self.timeline.now, tokens))
        self._send(ev.Tick())
        self.timeline.after(TICK_S, self._tick)

    def _predict(self, of: Trajectory, gen_tokens: int) -> None:
        """All that is left, exactly."""
        left = float(sum(tokens for tokens, _ in of.turns[of.turn :]))
        prediction = Prediction(of.turn, gen_tokens, Estimate(left, left, left))
        self.timeline.after(0.01, self._send, ev.PredictionArrived(of.name, prediction))

    def _request(self, of: Trajectory) -> None:
        of.asked_s = self.timeline.now
        tokens = of.turns[of.turn][0]
        self._send(
            ev.StepRequested(f"s-{of.name}-{of.turn}", of.name, of.turn, of.context_tokens, tokens)
        )

    def _submit(self, of: Trajectory, ticket: TicketRecord) -> None:
        of.step = EngineStep(
            ticket.ticket_id,
            self._names[of.name],
            of.name,
            PROMPT_TOKENS,
            of.context_tokens,
            of.turns[of.turn][0],
            self.timeline.now,
            spans=[],
        )
        self._engines[engine_index(ticket.engine_id)].submit(
            of.step,
            ticket.priority,
            preemptible=ticket.preemptible,
            job=ticket.job,
            weight=ticket.weight,
        )

    def _finish(self, of: Trajectory, step: EngineStep) -> None:
        of.steps.append(step)
        of.step = None
        of.waits_s.append(self.timeline.now - of.asked_s - step.prefill_s - step.decode_s)
        tokens, tool_s = of.turns[of.turn]
        self._send(ev.StepFinished(of.name, step.step_id, of.turn, of.context_tokens, tokens))
        of.turn += 1
        of.context_tokens += tokens + TURN_TOKENS
        self.timeline.after(tool_s, self._request if of.turn < len(of.turns) else self._close, of)

    def _close(self, of: Trajectory) -> None:
        self._send(ev.TrajectoryClosed(f"c-{of.name}", of.name, Outcome.FINISHED))
        of.closed()
