"""Export the resources that are held and waited for, and the times of actions (docs/metrics.md)."""

import time
from collections.abc import Callable

from treadle_core.tools.dispatcher import Dispatcher
from treadle_runtime.telemetry import Metrics, Readings

from treadle_tools.tool import Result, Tool

# Seconds: a decision takes a hundredth of a millisecond to some milliseconds, an action up to an
# hour.
DECISION_BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2, 0.1)
ACTION_BOUNDS_S = (
    1e-3,
    2e-3,
    5e-3,
    1e-2,
    2e-2,
    5e-2,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    3600.0,
)


class Meters:
    """All instruments of the tools service."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._queue_s = metrics.seconds(
            "action.queue", "Actions waiting in the queue", ACTION_BOUNDS_S
        )
        self._overhead_s = metrics.seconds(
            "action.overhead", "Neither queue nor execution", ACTION_BOUNDS_S
        )
        self._execution_s = metrics.seconds(
            "action.execution", "The tool's own time", ACTION_BOUNDS_S
        )
        self.record_decision = metrics.seconds(
            "decision", "What a scheduling decision took", DECISION_BOUNDS_S
        )
        self._cores_held = metrics.total("cores.held", "s", "Core seconds that actions held")
        self._cores_used = metrics.total(
            "cores.used", "s", "CPU seconds that actions used, with control groups"
        )

    def record_action(self, tool: Tool, result: Result) -> None:
        """Record an action that has ended."""
        labels = {"tool": tool.name, "status": result.status.value}
        self._queue_s(result.queue_s, labels)
        self._overhead_s(result.overhead_s, labels)
        self._execution_s(result.execution_s, labels)
        self._cores_held(result.cores * result.held_s, {"tool": tool.name})
        self._cores_used(result.cpu_s or 0.0, {"tool": tool.name})

    def watch(self, dispatcher: Dispatcher) -> None:
        """Report the dispatcher's resources from now on."""

        def usage(name: str) -> Callable[[], Readings]:
            now = time.monotonic
            return lambda: [
                (getattr(each, name), {"dimension": each.dimension})
                for each in dispatcher.resources.usage(now())
            ]

        def waiting() -> Readings:
            counts = dispatcher.waiting_for()
            return [
                (counts[each.dimension], {"dimension": each.dimension})
                for each in dispatcher.resources.usage(time.monotonic())
            ]

        self._metrics.gauge(
            "capacity", "unit", "Units in all, by dimension of the resources", usage("capacity")
        )
        self._metrics.gauge("held", "unit", "Units that actions and sessions hold", usage("held"))
        self._metrics.gauge(
            "waiting", "action", "Actions that wait and ask for some of a dimension", waiting
        )
