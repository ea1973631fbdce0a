"""Remember the trace of each trajectory, so that what is done about it in the background belongs to it.

The client sends the context with each call about a trajectory, so that a scheduler that has just begun to lead knows it
again after the next one.
"""

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext

from opentelemetry import propagate, trace
from treadle_core.ledger import LEDGER_PARTS
from treadle_core.model import TrajectoryRecord
from treadle_runtime.telemetry import Tracing

MOST = 65_536  # contexts, about 30 MB; more trajectories than one scheduler has open
# Of the W3C trace state: the client has begun the trajectory's span and sends no spans, so the scheduler sends it.
STATE_KEY, SENT_BY_SCHEDULER = "treadle", "root"


class Traces:
    """Contexts by trajectory; none where nothing is traced."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._contexts: OrderedDict[str, trace.SpanContext] = OrderedDict()

    def note(self, trajectory_id: str) -> None:
        """The RPC that is served now is about this trajectory."""
        caller: trace.SpanContext | None = getattr(trace.get_current_span(), "parent", None)
        if caller is not None:
            self._contexts[trajectory_id] = caller
            self._contexts.move_to_end(trajectory_id)
            if len(self._contexts) > MOST:
                self._contexts.popitem(last=False)

    def within(self, trajectory_id: str) -> AbstractContextManager[object]:
        """Calls that are made and facts that are published in the block belong to the trajectory's trace."""
        context = self._contexts.get(trajectory_id)
        if context is None:
            return nullcontext()
        return trace.use_span(trace.NonRecordingSpan(context), record_exception=False, set_status_on_exception=False)

    def traceparent(self, trajectory_id: str) -> str:
        """The W3C header; empty where the trace is not known."""
        carrier: dict[str, str] = {}
        if trajectory_id in self._contexts:
            with self.within(trajectory_id):
                propagate.inject(carrier)
        return carrier.get("traceparent", "")

    def close(self, record: TrajectoryRecord) -> None:
        """Send the span of a trajectory that has ended, with its ledger, where its client does not; then forget it."""
        context = self._contexts.pop(record.trajectory_id, None)
        if context is None or context.trace_state.get(STATE_KEY) != SENT_BY_SCHEDULER or record.closed_s is None:
            return
        ids = {f"treadle.{name}": getattr(record, name) for name in ("trajectory_id", "rollout_id", "prompt_id")}
        ledger = {f"treadle.ledger.{part}": getattr(record.ledger, part) for part in LEDGER_PARTS}
        outcome = record.outcome.value if record.outcome is not None else record.state.value
        said = {**ids, **ledger, "treadle.outcome": outcome, "treadle.turns": record.next_turn}
        self._tracing.record_span(context, "trajectory", record.opened_s, record.closed_s, **said)
