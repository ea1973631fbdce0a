"""Count and time what the scheduler decides, and keep the trace of each trajectory.

`Metrics` are its instruments (docs/metrics.md). `Traces` keeps the trace context of each
trajectory, so that background work on the trajectory belongs to its trace. The client sends the
context with each call about a trajectory, so that a scheduler that has just begun to lead knows it
again after the next one.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from opentelemetry import propagate, trace
from treadle_core import actions as act
from treadle_core.controller import Controller
from treadle_core.model import LEDGER_PARTS, TrajectoryRecord
from treadle_runtime import telemetry

MOST_TRACES = 65_536  # contexts, about 30 MB; more trajectories than one scheduler has open
# Key of the W3C trace state: the client has begun the trajectory's span and sends no spans, so the
# scheduler sends it.
STATE_KEY, SENT_BY_SCHEDULER = "treadle", "root"


class Metrics:
    """Instruments of the scheduler."""

    def __init__(self, metrics: telemetry.Metrics) -> None:
        self._metrics = metrics
        self._held_s = metrics.seconds("held", "From a request for a ticket to its ticket")
        self._tickets = metrics.total("tickets", "ticket", "Tickets that were issued")
        self._ledger_s = metrics.seconds(
            "trajectory", "Where the time of closed trajectories went, by part"
        )
        self._closed = metrics.total(
            "closed_trajectories", "trajectory", "Closed trajectories, by outcome"
        )
        self._moves = metrics.total("moves", "move", "Moves that were asked for")
        self._moves(0)  # the counter is visible before the first move
        self.record_plan = metrics.seconds("plan", "From the question for a plan to its answer")

    def watch(self, controller: Controller, held_calls: Callable[[], int]) -> None:
        """Read the state of the controller for the gauges from now on."""
        gauge = self._metrics.gauge
        gauge("waiting", "step", "Steps that wait in the scheduler for a ticket", held_calls)
        gauge("engines", "engine", "Engines that hold a lease", lambda: len(controller.engines()))

        def sum_of(name: str) -> Callable[[], float]:
            return lambda: sum(getattr(use, name) for use in controller.jobs())

        gauge(
            "live_tickets", "ticket", "Tickets whose steps have not ended", sum_of("live_tickets")
        )
        gauge("open_trajectories", "trajectory", "Open trajectories", sum_of("open_trajectories"))
        gauge(
            "reserved_kv",
            "token",
            "KV that is reserved for started trajectories",
            sum_of("kv_tokens"),
        )

    def record(self, actions: Sequence[act.Action]) -> None:
        """Count the actions that the controller returns for one event."""
        for action in actions:
            match action:
                case act.IssueTicket(ticket, repeats=False):
                    self._held_s(ticket.waited_s)
                    self._tickets(1)
                case act.StartMigration():
                    self._moves(1)

    def record_closing(self, closing: act.AnnounceClosed) -> None:
        """Count a trajectory whose closing was published."""
        self._closed(1, {"outcome": closing.outcome.value})
        for part in LEDGER_PARTS:
            self._ledger_s(getattr(closing.record.ledger, part), {"part": part.removesuffix("_s")})


class Traces:
    """Trace contexts by trajectory; none where nothing is traced."""

    def __init__(self, tracing: telemetry.Tracing) -> None:
        self._tracing = tracing
        self._contexts: OrderedDict[str, trace.SpanContext] = OrderedDict()

    def note(self, trajectory_id: str) -> None:
        """Note that the RPC that is served now is about this trajectory."""
        caller: trace.SpanContext | None = getattr(trace.get_current_span(), "parent", None)
        if caller is not None:
            self._contexts[trajectory_id] = caller
            self._contexts.move_to_end(trajectory_id)
            if len(self._contexts) > MOST_TRACES:
                self._contexts.popitem(last=False)

    def within(self, trajectory_id: str) -> AbstractContextManager[object]:
        """Put calls that are made and facts that are published in the block into the trajectory's
        trace."""
        context = self._contexts.get(trajectory_id)
        if context is None:
            return nullcontext()
        return trace.use_span(
            trace.NonRecordingSpan(context), record_exception=False, set_status_on_exception=False
        )

    def traceparent(self, trajectory_id: str) -> str:
        """Return the W3C header of the trajectory's trace; empty where that is not known."""
        carrier: dict[str, str] = {}
        if trajectory_id in self._contexts:
            with self.within(trajectory_id):
                propagate.inject(carrier)
        return carrier.get("traceparent", "")

    def close(self, record: TrajectoryRecord) -> None:
        """Send the span of a trajectory that has ended, with its ledger, where its client does not;
        then forget it."""
        context = self._contexts.pop(record.trajectory_id, None)
        if (
            context is None
            or context.trace_state.get(STATE_KEY) != SENT_BY_SCHEDULER
            or record.closed_s is None
        ):
            return
        ids = {
            f"treadle.{name}": getattr(record, name)
            for name in ("trajectory_id", "rollout_id", "prompt_id")
        }
        ledger = {f"treadle.ledger.{part}": getattr(record.ledger, part) for part in LEDGER_PARTS}
        outcome = record.outcome.value if record.outcome is not None else record.state.value
        said = {**ids, **ledger, "treadle.outcome": outcome, "treadle.turns": record.next_turn}
        self._tracing.record_span(context, "trajectory", record.opened_s, record.closed_s, **said)
