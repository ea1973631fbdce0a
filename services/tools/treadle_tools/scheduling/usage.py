"""Export what is held and waited for, and the times of actions, to OpenTelemetry.

Names of instruments begin with `treadle.tools.`; the README has the table.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from opentelemetry.metrics import Meter
from treadle_core.tools.dispatcher import Dispatcher

from treadle_tools.tool import Result, Tool

# Seconds: a decision takes a hundredth of a millisecond to some milliseconds, an action up to an hour.
DECISION_BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2, 0.1)
ACTION_BOUNDS_S = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
WATCH_S = 5.0  # twice as often as figures are exported


class Meters:
    """Instruments; those of a meter that exports nothing do nothing."""

    def __init__(self, meter: Meter) -> None:
        def histogram(name: str, what: str, bounds_s: Sequence[float] = ACTION_BOUNDS_S) -> Callable[..., None]:
            return meter.create_histogram(
                f"treadle.tools.{name}", "s", what, explicit_bucket_boundaries_advisory=bounds_s
            ).record

        def counter(name: str, what: str) -> Callable[..., None]:
            return meter.create_counter(f"treadle.tools.{name}", "s", what).add

        self._queue = histogram("action.queue", "Waiting in the queue")
        self._overhead = histogram("action.overhead", "Neither queue nor execution")
        self._execution = histogram("action.execution", "The tool's own time")
        self.record_decision = histogram("decision", "What a scheduling decision took", DECISION_BOUNDS_S)
        self._cores_held = counter("cores.held", "Core seconds that actions held")
        self._cores_used = counter("cores.used", "CPU seconds that actions used of what they held")
        self._capacity = meter.create_gauge("treadle.tools.capacity", "1", "Units in all").set
        self._held = meter.create_gauge("treadle.tools.held", "1", "Units that actions and sessions hold").set
        self._waiting = meter.create_gauge("treadle.tools.waiting", "1", "Actions that wait and ask for it").set

    def record_action(self, tool: Tool, result: Result) -> None:
        labels = {"tool": tool.name, "status": result.status.value}
        self._queue(result.queue_s, labels)
        self._overhead(result.overhead_s, labels)
        self._execution(result.execution_s, labels)
        self._cores_held(result.cores * result.held_s, {"tool": tool.name})
        if result.cpu_s is not None:
            self._cores_used(result.cpu_s, {"tool": tool.name})

    async def watch(self, dispatcher: Dispatcher) -> None:
        """Set the gauges for ever, here and not during the export, which runs on another thread."""
        while True:
            waiting = dispatcher.waiting_for()
            for each in dispatcher.resources.usage(time.monotonic()):
                labels = {"dimension": each.dimension}
                self._capacity(each.capacity, labels)
                self._held(each.held, labels)
                self._waiting(waiting[each.dimension], labels)
            await asyncio.sleep(WATCH_S)
