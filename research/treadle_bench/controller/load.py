"""The events of a rollout without engines, for `bench controller` and `bench replan`.

A model without queues: steps take the time of their tokens, and answers of the predictor, the
placement and the migrator arrive after fixed latencies. Only the order and the mix of events matter
here, not the rollout's makespan. It owns the virtual time; everything is drawn from one seed.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from treadle_core import events as ev
from treadle_core.actions import (
    Action,
    AnnounceClosed,
    AskPlan,
    AskPrediction,
    IssueTicket,
    StartMigration,
)
from treadle_core.controller import Controller
from treadle_core.model import (
    DecodeCurve,
    EngineLoad,
    EngineSpec,
    Estimate,
    Outcome,
    Policy,
    Prediction,
    TicketRecord,
)
from treadle_core.planning import Planner
from treadle_core.refusals import Refusal
from treadle_core.tuning import Tuning
from treadle_sim.cluster import SimPlacement

GROUP = 16  # samples of a prompt
SLOTS = 100  # of an engine
KV_TOKENS = 1_500_000
MEAN_STEPS = 10
MEDIAN_STEP_TOKENS = 400.0
SIGMA = 0.9  # of the natural log of a trajectory's tokens a step
PROMPT_TOKENS = 1_000
OBSERVATION_TOKENS = 200
MEAN_TOOL_S = 1.4
TOKEN_S = 0.02
PREDICTOR_S = 0.1
PLACEMENT_S = 0.02
MOVE_S = 0.3
TICK_S = 0.5  # as the scheduler service ticks
RENEWAL_S = 10.0 / 3
PREDICTION_SIGMA = 0.5
DOUBT = 2.0

CURVE = DecodeCurve(
    base_s=0.008, per_sequence_s=0.00012, per_kv_token_s=6e-9, prefill_tokens_per_s=20_000.0
)


class World:
    """Plays a rollout of `trajectories` on `engines` against a controller, and records its events
    with their times. doubt: the factor by which p10 and p90 of a prediction differ from its median;
    1: a predictor without doubt."""

    def __init__(
        self,
        trajectories: int,
        engines: int,
        seed: int,
        policy: Policy,
        tuning: Tuning,
        doubt: float = DOUBT,
        planner: type[Planner] = Planner,
    ) -> None:
        self.controller = Controller(policy, tuning, planner=planner)
        self.events: list[tuple[ev.Event, float]] = []
        self.now = 0.0
        self.open = 0
        self._doubt = doubt
        self._placement = SimPlacement()
        self._rng = np.random.default_rng(seed)
        self._steps = 1 + self._rng.geometric(1.0 / (MEAN_STEPS - 1), trajectories)
        self._step_tokens = (
            np.exp(self._rng.normal(np.log(MEDIAN_STEP_TOKENS), SIGMA, trajectories)).astype(int)
            + 1
        )
        self._context = np.full(trajectories, PROMPT_TOKENS)
        self._turn = np.zeros(trajectories, int)
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._came = 0
        for number in range(engines):
            name = f"e{number:03}"
            spec = EngineSpec(
                name,
                f"{name}:7410",
                slot_limit=SLOTS,
                kv_tokens_capacity=KV_TOKENS,
                decode_curve=CURVE,
            )
            self._tell(ev.EngineRegistered(f"r{number}", f"l{number}", spec))
            self._after(RENEWAL_S * (1 + number / engines), partial(self._renew, number))
        self._after(TICK_S, self._tick)
        for number in range(trajectories):
            self._tell(
                ev.TrajectoryOpened(
                    f"o{number}", f"t{number}", f"p{number // GROUP}", sample=number % GROUP
                )
            )
            self.open += 1
            self._after(2 * PREDICTOR_S, partial(self._request, number, 0.0))

    def run(self, until: Callable[["World"], bool] | None = None) -> None:
        """Play until all trajectories are closed, or `until` is true."""
        while self.open and not (until is not None and until(self)):
            self.now, _, happens = heapq.heappop(self._waiting)
            happens()

    def handle(self, event: ev.Event) -> Sequence[Action]:
        """The actions of the controller."""
        return self.controller.on_event(event, self.now)

    def solve(self, ask: AskPlan) -> ev.PlanArrived:
        """The answer of the placement service."""
        return self._placement.plan(ask)

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        self._came += 1
        heapq.heappush(self._waiting, (self.now + seconds, self._came, happens))

    def _tell(self, event: ev.Event) -> None:
        self.events.append((event, self.now))
        for action in self.handle(event):
            match action:
                case IssueTicket(ticket):
                    self._step(ticket)
                case AskPrediction():
                    self._after(PREDICTOR_S, partial(self._predict, action))
                case AskPlan():
                    self._after(PLACEMENT_S, partial(self._tell, self.solve(action)))
                case StartMigration():
                    self._move(action)
                case AnnounceClosed(record):
                    self._after(0.0, partial(self._tell, ev.ClosedAnnounced(record.trajectory_id)))

    def _tick(self) -> None:
        self._tell(ev.Tick())
        self._after(TICK_S, self._tick)

    def _renew(self, number: int) -> None:
        self._tell(
            ev.LeaseRenewed(
                f"l{number}", f"e{number:03}", EngineLoad(running_steps=SLOTS, slot_limit=SLOTS)
            )
        )
        self._after(RENEWAL_S, partial(self._renew, number))

    def _request(self, number: int, tool_s: float) -> None:
        turn, context = int(self._turn[number]), int(self._context[number])
        self._tell(
            ev.StepRequested(f"s{number}.{turn}", f"t{number}", turn, context, 8_192, tool_s=tool_s)
        )

    def _step(self, ticket: TicketRecord) -> None:
        number = int(ticket.trajectory_id[1:])
        tokens = int(self._step_tokens[number])
        self._after(tokens * TOKEN_S, partial(self._finish_step, number, ticket, tokens))

    def _finish_step(self, number: int, ticket: TicketRecord, tokens: int) -> None:
        self._turn[number] += 1
        self._context[number] += tokens + OBSERVATION_TOKENS
        name = ticket.trajectory_id
        self._tell(
            ev.StepFinished(name, ticket.ticket_id, ticket.turn, ticket.context_tokens, tokens)
        )
        if self._turn[number] == self._steps[number]:
            self._tell(ev.TrajectoryClosed(f"c{number}", name, Outcome.FINISHED, 1.0))
            self.open -= 1
            return
        tool_s = float(self._rng.exponential(MEAN_TOOL_S))
        self._tell(ev.ToolStarted(name, MEAN_TOOL_S))
        self._after(tool_s, partial(self._finish_tool, number, tool_s))

    def _finish_tool(self, number: int, tool_s: float) -> None:
        self._tell(ev.ToolFinished(f"t{number}"))
        self._request(number, tool_s)

    def _predict(self, ask: AskPrediction) -> None:
        record = ask.record
        number, turn = int(record.trajectory_id[1:]), record.next_turn
        turns = float(self._steps[number] - turn)
        error = float(np.exp(self._rng.normal(0.0, PREDICTION_SIGMA / (1 + turn))))
        tokens = turns * float(self._step_tokens[number]) * error
        estimate = Estimate(tokens / self._doubt, tokens, tokens * self._doubt)
        prediction = Prediction(turn, record.gen_tokens, estimate, Estimate(turns, turns, turns))
        self._tell(ev.PredictionArrived(record.trajectory_id, prediction))

    def _move(self, move: StartMigration) -> None:
        migration_id = f"m.{move.move_id}"
        self._tell(ev.MoveAccepted(move.trajectory_id, move.move_id, migration_id))
        self._after(MOVE_S, partial(self._finish_move, move, migration_id))

    def _finish_move(self, move: StartMigration, migration_id: str) -> None:
        try:
            self._tell(
                ev.SwitchRequested(
                    migration_id, move.trajectory_id, move.expected_revision, move.target.engine_id
                )
            )
        except Refusal:  # the tool came back first
            self.events.pop()
            self._tell(ev.MoveEnded(move.trajectory_id, migration_id, move.move_id))
            return
        self._tell(ev.MoveEnded(move.trajectory_id, migration_id, move.move_id, moved=True))
