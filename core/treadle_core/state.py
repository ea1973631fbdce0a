"""State of the controller, which the handlers of all events share, and the books of what was
decided.

Handlers of events change the parts of `State`, each of which keeps its own invariants, and return
actions. `Books.enter` then goes once over the actions of an event and keeps all accounts from them:
decisions about each trajectory, waits of its requests, and counts for the planner. No handler
writes into an account. Nothing of it is stored: after a restart a history begins with the next
event, and a wait with the next request.

- Histories show people why a trajectory took so long, and for a replay of its rollout under other
  policies (ADR 0040); no decision reads them. They are bounded: the last MOST_DECISIONS and
  MOST_STEPS of a trajectory, of the MOST_HISTORIES that were opened last.
- A wait begins with the first request, also with one that is refused as no engine can run the step,
  and ends with the ticket or the closing: repeats of a request go on with it. What it waits for may
  change; each second counts for one cause. What the client waited before a restart is in the
  client's own measure.
- The planner counts openings, steps, predictions and closings, so that it knows when a plan is due.
"""

import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from treadle_core import actions as act
from treadle_core.model import Cause, Policy, TrajectoryRecord, copy_with
from treadle_core.planning import Planner
from treadle_core.ranking.priorities import GroupNeeds, Priorities, remaining_s, token_s
from treadle_core.tables.engines import EngineTable, Siting
from treadle_core.tables.jobs import JobTable, Shares
from treadle_core.tables.trajectories import TrajectoryTable
from treadle_core.tables.waiting import WaitingSteps
from treadle_core.transfers import MeasuredMoves
from treadle_core.tuning import Tuning

MOST_HISTORIES = 16_384  # trajectories: some KB each
MOST_DECISIONS = 64
MOST_STEPS = 4_096
_NUMBERS = 4  # of a step


class Step(NamedTuple):
    """Finished step: the tokens of its prompt and of its output, and the seconds of the tool call
    before it."""

    turn: int
    context_tokens: int
    output_tokens: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about a trajectory. now_s: when it was made. kind: placed, held, ticket, preempted,
    planned, moves, stays or moved. engine_id: the engine that it is about. reason: a sentence, kept
    as a pattern of str.format and its values."""

    now_s: float
    kind: str
    engine_id: str
    pattern: str
    values: tuple[object, ...]

    @property
    def reason(self) -> str:
        return self.pattern.format(*self.values)


class History:
    """Decisions and finished steps of one trajectory. `decisions`: oldest first."""

    __slots__ = ("_numbers", "decisions")

    def __init__(self) -> None:
        # fields of Decision, `values` flat
        self.decisions: deque[tuple[Any, ...]] = deque(maxlen=MOST_DECISIONS)
        # of each step in order: its turn, context, output (0 until it ends), and tool
        self._numbers = array("d")

    @property
    def steps(self) -> list[Step]:
        """Return the finished steps in order."""
        rows = (self._numbers[at : at + _NUMBERS] for at in range(0, len(self._numbers), _NUMBERS))
        return [
            Step(int(turn), int(context), int(output), tool_s)
            for turn, context, output, tool_s in rows
            if output
        ]

    def begin_step(self, turn: int, context_tokens: int, tool_s: float) -> None:
        """Note that a ticket was issued for a step; another attempt at the same turn changes
        nothing."""
        numbers = self._numbers
        if len(numbers) < _NUMBERS * MOST_STEPS and not (numbers and numbers[-_NUMBERS] == turn):
            numbers.extend((turn, context_tokens, 0.0, tool_s))

    def finish_step(self, turn: int, output_tokens: int) -> None:
        """Note that a step has ended, the last one or an earlier one."""
        for at in range(len(self._numbers) - _NUMBERS, -1, -_NUMBERS):
            if self._numbers[at] <= turn:
                if self._numbers[at] == turn:
                    self._numbers[at + 2] = output_tokens
                return


NO_HISTORY = History()  # never written


class Histories:
    """Histories by trajectory, in the order in which they began."""

    def __init__(self) -> None:
        self._histories: dict[str, History] = {}

    def get(self, trajectory_id: str) -> History:
        """Return the history of a trajectory; an empty one for an unknown trajectory."""
        return self._histories.get(trajectory_id, NO_HISTORY)

    def decide(
        self,
        trajectory_id: str,
        now: float,
        kind: str,
        engine_id: str,
        pattern: str,
        *values: object,
    ) -> None:
        """Note a decision with the fields of `Decision`."""
        self._history(trajectory_id).decisions.append((now, kind, engine_id, pattern, *values))

    def decide_again(
        self,
        trajectory_id: str,
        now: float,
        kind: str,
        engine_id: str,
        pattern: str,
        *values: object,
    ) -> None:
        """Note a decision that is made again and again, once as long as no other comes between."""
        decisions = self._history(trajectory_id).decisions
        if not decisions or decisions[-1][1:4] != (kind, engine_id, pattern):
            decisions.append((now, kind, engine_id, pattern, *values))

    def begin_step(self, trajectory_id: str, turn: int, context_tokens: int, tool_s: float) -> None:
        """Note that a ticket was issued for a step, as `History.begin_step`."""
        self._history(trajectory_id).begin_step(turn, context_tokens, tool_s)

    def finish_step(self, trajectory_id: str, turn: int, output_tokens: int) -> None:
        """Note that a step has ended, as `History.finish_step`."""
        self._history(trajectory_id).finish_step(turn, output_tokens)

    def decisions(self, trajectory_id: str) -> list[Decision]:
        """Return the decisions about a trajectory, oldest first."""
        return [
            Decision(now_s, kind, engine_id, pattern, tuple(values))
            for now_s, kind, engine_id, pattern, *values in self.get(trajectory_id).decisions
        ]

    def forget(self, trajectory_id: str) -> None:
        self._histories.pop(trajectory_id, None)

    def _history(self, trajectory_id: str) -> History:
        history = self._histories.get(trajectory_id)
        if history is None:
            history = self._histories[trajectory_id] = History()
            if len(self._histories) > MOST_HISTORIES:
                del self._histories[next(iter(self._histories))]
        return history


class _Wait(NamedTuple):
    """Open wait of a request. spent_s: seconds by cause until `since_s`, when the wait for `cause`
    began."""

    began_s: float
    since_s: float
    cause: Cause
    spent_s: dict[Cause, float]


class OpenWaits:
    """Open waits by trajectory."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self._loading: set[str] = set()  # engines whose queue waits for WEIGHTS

    def note(self, trajectory_id: str, cause: Cause, now: float) -> None:
        """Note that a request waits for `cause` from now on, if it did not before."""
        wait = self._waits.get(trajectory_id)
        if wait is None:
            self._waits[trajectory_id] = _Wait(now, now, cause, {})
        elif wait.cause is not cause:
            self._waits[trajectory_id] = _Wait(wait.began_s, now, cause, _spent_until(wait, now))

    def is_loading(self, engine_id: str) -> bool:
        """Return whether an engine's queue of first steps waits for weights."""
        return engine_id in self._loading

    def see_queue(
        self, engine_id: str, trajectory_ids: Iterable[str], loads: bool, now: float
    ) -> None:
        """Note whether an engine loads weights, for which its queue of first steps waits."""
        (self._loading.add if loads else self._loading.discard)(engine_id)
        for trajectory_id in trajectory_ids:
            self.note(trajectory_id, Cause.WEIGHTS if loads else Cause.HELD, now)

    def count(self, record: TrajectoryRecord, now: float) -> TrajectoryRecord:
        """Return the record with its open wait, if it has one, counted until now."""
        wait = self._waits.get(record.trajectory_id)
        if wait is None:
            return record
        spent = _spent_until(wait, now)
        return copy_with(
            record, **{cause.value: getattr(record, cause.value) + s for cause, s in spent.items()}
        )

    def waited_s(self, trajectory_id: str, now: float) -> float:
        """Return the seconds of the open wait so far; 0 without one."""
        wait = self._waits.get(trajectory_id)
        return now - wait.began_s if wait is not None else 0.0

    def end(self, trajectory_id: str) -> None:
        """Forget a wait, if there is one."""
        self._waits.pop(trajectory_id, None)


def _spent_until(wait: _Wait, now: float) -> dict[Cause, float]:
    return {**wait.spent_s, wait.cause: wait.spent_s.get(wait.cause, 0.0) + now - wait.since_s}


class Books:
    """All accounts of the controller. Others only read `histories` and `waits`."""

    def __init__(self, planner: Planner, waiting: WaitingSteps) -> None:
        self.histories = Histories()
        self.waits = OpenWaits()
        self._planner = planner
        self._waiting = waiting
        self._keepers: Mapping[type[act.Action], Callable[[Any, float], None]] = {
            act.IssueTicket: self._keep_ticket,
            act.StepCounted: self._keep_step,
            act.AnnounceOpened: self._keep_opening,
            act.AnnouncePredicted: self._keep_prediction,
            act.TrajectoryEnded: self._keep_end,
            act.ForgetTrajectory: self._keep_nothing_of,
            act.Decided: self._keep_decision,
            act.StepWaits: self._keep_wait,
            act.QueueSeen: self._keep_queue,
            act.EnginesChanged: self._keep_engines,
        }

    def enter(self, actions: list[act.Action], now: float) -> list[act.Action]:
        """Keep the accounts of one event's actions, in their order. Returns the actions for the
        driver."""
        if not actions:
            return actions
        keepers = self._keepers
        left: list[act.Action] = []
        for action in actions:
            keep = keepers.get(type(action))
            if keep is not None:
                keep(action, now)
                if isinstance(action, act.Note):
                    continue
            left.append(action)
        return left

    def _keep_ticket(self, issued: act.IssueTicket, now: float) -> None:
        if issued.repeats:
            return
        ticket, histories = issued.ticket, self.histories
        trajectory_id = ticket.trajectory_id
        self.waits.end(trajectory_id)
        if ticket.attempt == 0:
            histories.begin_step(trajectory_id, ticket.turn, ticket.context_tokens, issued.tool_s)
        histories.decide(
            trajectory_id,
            now,
            "ticket",
            ticket.engine_id,
            "turn {} at priority {:.2f}, after {:.2f} s",
            ticket.turn,
            ticket.priority,
            ticket.waited_s,
        )

    def _keep_step(self, counted: act.StepCounted, _now: float) -> None:
        record = counted.record
        self.histories.finish_step(record.trajectory_id, counted.turn, counted.output_tokens)
        self._planner.note_step()

    def _keep_opening(self, opened: act.AnnounceOpened, _now: float) -> None:
        self._planner.note_opening(opened.record)

    def _keep_prediction(self, predicted: act.AnnouncePredicted, _now: float) -> None:
        if predicted.first:
            self._planner.note_first_prediction()

    def _keep_end(self, ended: act.TrajectoryEnded, _now: float) -> None:
        self.waits.end(ended.record.trajectory_id)
        self._planner.note_closing(ended.record)

    def _keep_nothing_of(self, forgotten: act.ForgetTrajectory, _now: float) -> None:
        self.histories.forget(forgotten.trajectory_id)

    def _keep_decision(self, made: act.Decided, now: float) -> None:
        decide = self.histories.decide_again if made.again else self.histories.decide
        decide(made.trajectory_id, now, made.kind, made.engine_id, made.pattern, *made.values)

    def _keep_wait(self, waits: act.StepWaits, now: float) -> None:
        if waits.cause is None:
            self.waits.end(waits.trajectory_id)
        else:
            self.waits.note(waits.trajectory_id, waits.cause, now)

    def _keep_queue(self, seen: act.QueueSeen, now: float) -> None:
        self.waits.see_queue(
            seen.engine_id, self._waiting.waiting_for(seen.engine_id), seen.loads, now
        )

    def _keep_engines(self, _changed: act.EnginesChanged, _now: float) -> None:
        self._planner.note_engines()


class Deadlines:
    """Deadlines by id, in a heap, so that a tick looks only at ids whose time has come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_s: dict[str, float] = {}

    def set(self, name: str, due_s: float) -> None:
        """Set the time of an id, in place of an earlier one."""
        self._due_s[name] = due_s
        heapq.heappush(self._heap, (due_s, name))

    def take_due(self, now: float) -> list[str]:
        """Remove and return the ids whose time has come, earliest first."""
        names: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due_s, name = heapq.heappop(self._heap)
            if self._due_s.get(name) == due_s:  # otherwise it was set again later
                del self._due_s[name]
                names.append(name)
        return names


@dataclass
class State:
    """Parts of the controller's state. announcements: closed trajectories whose closing is to be
    published, and when. sweeps: when each trajectory is looked at: its ticket may have expired, it
    may be abandoned, or be forgotten. loads: when an engine that is behind gets another request to
    load. mean_tool_s: over all tool calls. mean_observed_tokens: tokens that tools add to a context
    in a turn. measured_moves: how long moves took. needs: samples that groups need. restored_s:
    when this controller took over from an earlier one; until then, clients could not reach it.
    books: accounts that handlers may read and only the controller writes."""

    tuning: Tuning
    policy: Policy
    jobs: JobTable
    engines: EngineTable
    table: TrajectoryTable
    siting: Siting
    planner: Planner
    shares: Shares
    priorities: Priorities
    waiting: WaitingSteps
    books: Books
    mean_observed_tokens: float
    measured_moves: MeasuredMoves
    needs: GroupNeeds
    mean_tool_s: float = 0.0
    restored_s: float = -math.inf
    announcements: dict[str, float] = field(default_factory=dict)
    sweeps: Deadlines = field(default_factory=Deadlines)
    loads: Deadlines = field(default_factory=Deadlines)

    @classmethod
    def new(
        cls, policy: Policy, tuning: Tuning, epoch_s: float, planner_type: type[Planner]
    ) -> "State":
        engines = EngineTable(tuning)
        table = TrajectoryTable(tuning)
        jobs = JobTable(tuning.job_lease_s, tuning.job_resume_s)
        planner = planner_type(engines, table, tuning)
        waiting = WaitingSteps()
        return cls(
            tuning=tuning,
            policy=policy,
            jobs=jobs,
            engines=engines,
            table=table,
            siting=Siting(engines, table, tuning),
            planner=planner,
            shares=Shares(engines, table, jobs),
            priorities=Priorities(tuning, epoch_s),
            waiting=waiting,
            books=Books(planner, waiting),
            mean_observed_tokens=tuning.expected_observed_tokens,
            measured_moves=MeasuredMoves(tuning.move_newest_weight),
            needs=GroupNeeds(tuning),
        )

    def priority(self, record: TrajectoryRecord) -> float:
        """Return the priority of a trajectory's step on its present engine."""
        speed_s = token_s(self.engines.spec(record.engine_id))
        return self.priorities.priority(record, speed_s, self.needs.lower(record))

    def note_work(self, record: TrajectoryRecord) -> None:
        """Note how much work an open trajectory has left, among the samples of its group."""
        if record.group_keep:
            speed_s = token_s(self.engines.spec(record.engine_id))
            self.needs.note(record, remaining_s(record, speed_s, self.tuning))
