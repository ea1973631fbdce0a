"""Keep what the mesh did and does: methods take in what happened, and return what a page needs.

`Mesh` owns all that the console knows, in memory and bounded. It has no clock and does no I/O: each
method receives the time of what happened, in milliseconds since the epoch, so that a replay of the
facts gives the same state. Invariants: a trajectory is a row with a number, ascending in the order
in which the console first received a fact of each, and rows below `floor` are forgotten; each
change has a revision, so that a page which knows the state of one revision receives what has
changed since, and no more (`delta`).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from treadle_console.records import (
    IDLE,
    NO_ENGINE,
    PREEMPTED,
    QUEUED,
    RUNNING,
    TOOL,
    Changes,
    Cursor,
    Rollout,
    Row,
    Spans,
    Step,
    Tool,
)

MOST_EVENTS = 400
MOST_ROLLOUTS = 200
MOST_PLANS = 120
MOST_TOOLS = 200
MOST_SPANS_A_DELTA = 40_000  # about 1 MB
BANDS = ("below_p10", "p10_to_p50", "p50_to_p90", "above_p90")


class Mesh:
    """State of the mesh, as the module describes. Methods named after a fact take it in."""

    def __init__(self, most_trajectories: int, most_spans: int) -> None:
        self._most = most_trajectories
        self.revision = 0
        self.floor = 0
        self.heard_ms = 0  # time of the newest fact
        self.spans = Spans(most_spans)
        self._rows: Changes[Row] = Changes()
        self._numbers: dict[str, int] = {}
        # rows of which no fact names the opening: it is older than the facts that are kept
        self._unopened: set[int] = set()
        self._next_row = 0
        self._steps: dict[str, Step] = {}  # the step of each trajectory that is at an engine
        self._tickets: dict[str, str] = {}  # id of the trajectory, by the ticket of its step
        self._first: dict[str, tuple[float, float, float]] = {}  # predictions before the first step
        self._rollouts: Changes[Rollout] = Changes(MOST_ROLLOUTS)
        self._tools: Changes[Tool] = Changes(MOST_TOOLS)
        self._sections: Changes[tuple[str, Any]] = Changes()
        self._engine_numbers: dict[str, int] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._next_event = 0
        self._plans: deque[dict[str, Any]] = deque(maxlen=MOST_PLANS)
        self._bands = dict.fromkeys(BANDS, 0)
        self._version = ""

    # Take in facts.

    def trajectory_opened(
        self, now_ms: int, id: str, prompt: str, sample: int, rollout: str
    ) -> None:
        row = self._row(id, now_ms)
        if row.n not in self._unopened:  # the fact came twice
            return
        self._unopened.discard(row.n)
        row.prompt, row.sample, row.rollout, row.opened_ms = prompt, sample, rollout, now_ms
        group = self._rollout(rollout, now_ms)
        group.trajectories += 1
        self._touch(row, now_ms)

    def trajectory_predicted(
        self, now_ms: int, id: str, turn: int, predicted: tuple[float, float, float]
    ) -> None:
        row = self._row(id, now_ms)
        row.predicted = predicted
        if turn == 0:
            self._first.setdefault(id, predicted)
        self._touch(row, now_ms)

    def trajectory_closed(
        self,
        now_ms: int,
        id: str,
        names: tuple[str, int, str],
        outcome: str,
        tokens: int,
        turns: int,
        ledger_s: Mapping[str, float],
    ) -> None:
        """Close a trajectory. names: its prompt, sample and rollout."""
        row = self._row(id, now_ms)
        if row.closed_ms:  # the fact came twice
            return
        if row.n in self._unopened:
            self.trajectory_opened(row.opened_ms, id, *names)
        self._end_live(row, now_ms)
        row.tokens, row.turns = max(row.tokens, tokens), turns
        row.tool = ""
        self._enter(row, outcome, now_ms)
        row.closed_ms = now_ms
        self._end_step(id)
        first = self._first.pop(id, None)
        if (
            first is not None and outcome == "finished"
        ):  # an end by a cap or a client does not test the prediction
            self._bands[BANDS[sum(tokens > quantile for quantile in first)]] += 1
            self.set_section("calibration", dict(self._bands))
        group = self._rollout(row.rollout, now_ms)
        group.closed += 1
        group.outcomes[outcome] = group.outcomes.get(outcome, 0) + 1
        group.tokens += tokens
        group.turns += turns
        group.ends_ms.append(now_ms)
        for part, seconds in ledger_s.items():
            group.ledger_s[part] = group.ledger_s.get(part, 0.0) + seconds

    def step_queued(self, now_ms: int, id: str, ticket: str, engine: str, priority: float) -> None:
        row = self._begin_step(now_ms, id, ticket, engine)
        row.priority = priority
        self._enter(row, QUEUED, now_ms)

    def step_started(self, now_ms: int, id: str, ticket: str, engine: str, queue_ms: int) -> None:
        step = self._steps.get(id)
        if step is None or step.ticket != ticket:
            self._begin_step(now_ms, id, ticket, engine)
            step = self._steps[id]
        row = self._row(id, now_ms)
        if row.state == PREEMPTED:
            self.spans.add(row.n, "preempted", step.engine, row.since_ms, now_ms)
        else:
            self.spans.add(row.n, "queue", step.engine, now_ms - queue_ms, now_ms)
        step.ran_ms, step.attempts = now_ms, step.attempts + 1
        row.engine = step.engine
        self._enter(row, RUNNING, now_ms)

    def step_preempted(self, now_ms: int, id: str, tokens: int, by: str) -> None:
        """Record that a step lost its slot. by: the ticket of the step that took the slot."""
        row, step = self._row(id, now_ms), self._steps.get(id)
        if step is not None and row.state == RUNNING:
            self.spans.add(row.n, "decode", step.engine, step.ran_ms, now_ms)
        row.preemptions += 1
        if row.n not in self._unopened:
            self._rollout(row.rollout, now_ms).preemptions += 1
        self._enter(row, PREEMPTED, now_ms)
        other = self._rows.get(self._numbers.get(self._tickets.get(by, "")))
        taker = by if other is None else self._name(other)
        self._tell(
            now_ms,
            "preempted",
            row,
            f"after {tokens} tokens{f', for {taker}' if taker else ''}",
            self._name(row),
        )

    def step_finished(self, now_ms: int, id: str, turn: int, tokens: int, prefill_ms: int) -> None:
        """Record the end of a step. now_ms: when the engine had ended it. prefill_ms: of all
        attempts."""
        row, step = self._row(id, now_ms), self._end_step(id)
        if step is not None and row.state == RUNNING:
            read_ms = min(prefill_ms, max(now_ms - step.ran_ms, 0)) if step.attempts == 1 else 0
            self.spans.add(row.n, "prefill", step.engine, step.ran_ms, step.ran_ms + read_ms)
            self.spans.add(row.n, "decode", step.engine, step.ran_ms + read_ms, now_ms)
        row.tokens += tokens
        row.turns = max(row.turns, turn + 1)
        self._enter(row, IDLE, now_ms)

    def tool_started(self, now_ms: int, id: str, tool: str) -> None:
        known = self._tools.get(tool) or Tool(tool)
        known.running += 1
        self._tools.put(tool, known, self._next())
        if id:
            row = self._row(id, now_ms)
            row.tool = tool
            self._enter(row, TOOL, now_ms)

    def tool_finished(
        self,
        now_ms: int,
        id: str,
        tool: str,
        ok: bool,
        queue_s: float,
        overhead_s: float,
        execution_s: float,
    ) -> None:
        known = self._tools.get(tool) or Tool(tool)
        known.calls += 1
        known.running = max(known.running - 1, 0)
        known.failed += not ok
        known.queue_s += queue_s
        known.overhead_s += overhead_s
        known.execution_s += execution_s
        self._tools.put(tool, known, self._next())
        if id:
            row = self._row(id, now_ms)
            if row.state == TOOL:
                self._end_live(row, now_ms)
                row.tool = ""
                self._enter(row, IDLE, now_ms)

    def migration_ended(
        self,
        now_ms: int,
        id: str,
        source: str,
        target: str,
        moved: bool,
        reason: str,
        tokens: int,
        began_ms: int,
    ) -> None:
        """Record a move, or why there was none. began_ms: 0 where it never began."""
        row = self._row(id, now_ms)
        if moved:
            row.moves += 1
            row.engine = self.engine_number(target)
            if row.n not in self._unopened:
                self._rollout(row.rollout, now_ms).moves += 1
            self._tell(
                now_ms,
                "moved",
                row,
                f"{tokens} tokens of KV from {source} to {target}",
                self._name(row),
            )
        else:
            self._tell(
                now_ms, "stays", row, f"on {source}, not to {target}: {reason}", self._name(row)
            )
        if began_ms:
            self.spans.add(row.n, "move", self.engine_number(target), began_ms, now_ms)
        self._touch(row, now_ms)

    def engine_joined(self, now_ms: int, engine: str, model: str) -> None:
        self.engine_number(engine)
        self._tell(now_ms, "joined", None, model, engine)

    def engine_lost(self, now_ms: int, engine: str, reason: str) -> None:
        self._tell(now_ms, "lost", None, reason.lower().replace("_", " "), engine)

    def weights_updated(self, now_ms: int, engine: str, version: str) -> None:
        self._version = version
        self._tell(now_ms, "weights", None, f"serves {version}", engine)

    def group_settled(self, now_ms: int, rollout: str, prompt: str) -> None:
        self._tell(now_ms, "settled", None, f"enough samples are in, of {rollout}", prompt)

    def plan_made(self, now_ms: int, plan: Mapping[str, Any]) -> None:
        """Record a plan: makespan_s, bound_s, solve_s, trajectories, and `engines` with what each
        gets."""
        self._plans.append({"at_ms": now_ms, **plan})
        history = [
            {name: each[name] for name in ("at_ms", "makespan_s", "bound_s")}
            for each in self._plans
        ]
        self.set_section("plan", {**self._plans[-1], "history": history})

    # Take in the answers of other services.

    def set_section(self, name: str, value: Any) -> None:
        """Set a part of the page that is sent as a whole, such as `engines`; an equal value is no
        change."""
        known = self._sections.get(name)
        if known is None or known[1] != value:
            self._sections.put(name, (name, value), self._next())

    def set_engines(self, now_ms: int, engines: list[dict[str, Any]]) -> None:
        """Set the table of engines. No fact reports that an engine is paused or drained, so it
        becomes an event here."""
        known = self._sections.get("engines")
        before = {each["id"]: each for each in known[1]} if known is not None else {}
        for each in engines:
            was, name = before.get(each["id"], each), each["id"]
            if each["paused"] != was["paused"]:
                paused = (
                    "generates nothing until it is resumed" if each["paused"] else "generates again"
                )
                self._tell(now_ms, "paused" if each["paused"] else "resumed", None, paused, name)
            if each["draining"] and not was["draining"]:
                self._tell(
                    now_ms,
                    "drains",
                    None,
                    f"gets no more steps; {each['trajectories']} are to leave",
                    name,
                )
            elif was["draining"] and not each["draining"]:
                self._tell(now_ms, "in use", None, "takes steps again", name)
            if each["draining"] and each["empty"] and not (was["draining"] and was["empty"]):
                self._tell(now_ms, "empty", None, "is drained: it may be stopped", name)
        self.set_section("engines", engines)

    def set_standing(
        self, id: str, priority: float, predicted: tuple[float, float, float] | None
    ) -> None:
        """Set the priority and prediction that the scheduler reports of an open trajectory. One
        that the console does not know is left to the facts."""
        number = self._numbers.get(id)
        row = self._rows.get(number) if number is not None else None
        if (
            row is None
            or row.closed_ms
            or (row.priority, row.predicted) == (priority, predicted or row.predicted)
        ):
            return
        row.priority, row.predicted = priority, predicted or row.predicted
        self._rows.put(row.n, row, self._next())

    def set_shaping(self, rollout: str, shaping: dict[str, Any]) -> None:
        known = self._rollouts.get(rollout)
        if known is not None and known.shaping != shaping:
            known.shaping = shaping
            self._rollouts.put(rollout, known, self._next())

    def engine_number(self, engine: str) -> int:
        """Return the number by which rows and spans name an engine."""
        if engine not in self._engine_numbers:
            self._engine_numbers[engine] = len(self._engine_numbers)
            self.set_section("engine_names", list(self._engine_numbers))
        return self._engine_numbers[engine]

    # Return what a page shows.

    def rollouts(self) -> list[Rollout]:
        """Return all rollouts that are known, the one that changed first first."""
        return list(self._rollouts)

    def delta(self, since: Cursor) -> tuple[dict[str, Any], Cursor]:
        """Return what has changed since a cursor, and the cursor after it. A page that is far
        behind gets MOST_SPANS_A_DELTA spans at a time, and everything else at once."""
        rows = self._rows.since(since.revision)
        spans, next_span = self.spans.since(since.span, MOST_SPANS_A_DELTA)
        events = [event for event in self._events if event["number"] >= since.event]
        found = {
            "heard_ms": self.heard_ms,
            "floor": self.floor,
            "rows": _columns(rows),
            "spans": spans,
            "events": events,
            "rollouts": [each.view() for each in self._rollouts.since(since.revision)],
            "tools": [asdict(each) for each in self._tools.since(since.revision)],
            "sections": dict(self._sections.since(since.revision)),
        }
        return found, Cursor(self.revision, next_span, self._next_event)

    # Helpers of this class.

    def _next(self) -> int:
        self.revision += 1
        return self.revision

    def _row(self, id: str, now_ms: int) -> Row:
        self.heard_ms = max(self.heard_ms, now_ms)
        number = self._numbers.get(id)
        if number is not None:
            row = self._rows.get(number)
            assert row is not None, "numbers and rows are forgotten together"
            return row
        row = Row(self._next_row, id, "", 0, "", IDLE, now_ms, now_ms)
        self._next_row += 1
        self._numbers[id] = row.n
        self._unopened.add(row.n)
        self._rows.put(row.n, row, self._next())
        while len(self._rows) > self._most:
            gone = self._rows.get(self.floor)
            if gone is not None:
                self._rows.pop(gone.n)
                self._end_step(gone.id)
                self._numbers.pop(gone.id)
                self._unopened.discard(gone.n)
                self._first.pop(gone.id, None)
            self.floor += 1
        return row

    def _rollout(self, id: str, now_ms: int) -> Rollout:
        """Return a rollout, new where it is not known, and note that it has changed."""
        known = self._rollouts.get(id) or Rollout(id, now_ms, now_ms, self._version)
        known.last_ms = max(known.last_ms, now_ms)
        return self._rollouts.put(id, known, self._next())

    def _touch(self, row: Row, now_ms: int) -> None:
        self.heard_ms = max(self.heard_ms, now_ms)
        self._rows.put(row.n, row, self._next())

    def _enter(self, row: Row, state: str, now_ms: int) -> None:
        if (
            not row.closed_ms
        ):  # facts of different services may come in another order than they happened
            row.state, row.since_ms = state, now_ms
        self._touch(row, now_ms)

    def _begin_step(self, now_ms: int, id: str, ticket: str, engine: str) -> Row:
        row = self._row(id, now_ms)
        self._end_live(row, now_ms)
        self._end_step(id)
        self._steps[id] = Step(ticket, self.engine_number(engine))
        self._tickets[ticket] = id
        row.engine = self._steps[id].engine
        row.tool = ""
        return row

    def _end_step(self, id: str) -> Step | None:
        step = self._steps.pop(id, None)
        if step is not None:
            self._tickets.pop(step.ticket, None)
        return step

    def _end_live(self, row: Row, now_ms: int) -> None:
        """Draw what a trajectory did until now as a bar: its tool, or a step whose end no fact
        reports."""
        step = self._steps.get(row.id)
        if row.state == TOOL:
            self.spans.add(row.n, "tool", NO_ENGINE, row.since_ms, now_ms)
        elif step is not None and row.state in (RUNNING, QUEUED, PREEMPTED):
            kind = {RUNNING: "decode", QUEUED: "queue", PREEMPTED: "preempted"}[row.state]
            self.spans.add(row.n, kind, step.engine, row.since_ms, now_ms)

    def _name(self, row: Row) -> str:
        return f"{row.prompt or row.id} #{row.sample}"

    def _tell(self, now_ms: int, kind: str, row: Row | None, words: str, about: str) -> None:
        number, self._next_event = self._next_event, self._next_event + 1
        event = {"number": number, "at_ms": now_ms, "kind": kind, "about": about, "words": words}
        self._events.append(event | {"row": -1 if row is None else row.n})
        self.heard_ms = max(self.heard_ms, now_ms)
        self._next()


def _columns(rows: list[Row]) -> dict[str, list[Any]]:
    return {name: [getattr(row, name) for row in rows] for name in Row.__slots__}
