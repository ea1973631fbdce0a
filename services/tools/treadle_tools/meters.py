"""Figures of actions for OpenTelemetry: times by tool, what is held and what is used of it, and the queue.

Names begin with `treadle.tools.`; the README has the table. Where nothing is exported an instrument does nothing.
"""

from collections.abc import Callable, Iterable, Sequence

from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeter, Observation
from treadle_core.managers.grants import Usage

from treadle_tools.tool import Result, Tool

# Seconds: a decision takes a hundredth of a millisecond to some milliseconds, an action up to an hour.
DECISION_BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2, 0.1)
ACTION_BOUNDS_S = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)


class Meters:
    """See the module."""

    def __init__(self, meter: Meter) -> None:
        def histogram(name: str, what: str, bounds_s: Sequence[float] = ACTION_BOUNDS_S) -> Callable[..., None]:
            return meter.create_histogram(
                f"treadle.tools.{name}", "s", what, explicit_bucket_boundaries_advisory=bounds_s
            ).record

        def counter(name: str, what: str) -> Callable[..., None]:
            return meter.create_counter(f"treadle.tools.{name}", "s", what).add

        self._meter = meter
        self._queue = histogram("action.queue", "Waiting for its turn")
        self._overhead = histogram("action.overhead", "Neither queue nor execution")
        self._execution = histogram("action.execution", "The tool's own time")
        self._decision = histogram("decision", "What a scheduling decision took", DECISION_BOUNDS_S)
        self._cores_held = counter("cores.held", "Core seconds that actions held")
        self._cores_used = counter("cores.used", "CPU seconds that actions used of what they held")

    def ended(self, tool: Tool, result: Result) -> None:
        """An action has ended."""
        labels = {"tool": tool.name, "status": result.status.value}
        self._queue(result.queue_s, labels)
        self._overhead(result.overhead_s, labels)
        self._execution(result.execution_s, labels)
        self._cores_held(result.cores * result.held_s, {"tool": tool.name})
        if result.cpu_s is not None:
            self._cores_used(result.cpu_s, {"tool": tool.name})

    def decided(self, seconds: float) -> None:
        """A decision has been made."""
        self._decision(seconds)

    def watch(self, usage: Callable[[], Sequence[Usage]], waiting: Callable[[], dict[str, int]]) -> None:
        """Have these read whenever figures are exported: units by dimension, and how many wait for each."""

        def gauge(name: str, what: str, read: Callable[[], dict[str, int]]) -> None:
            def observe(_: CallbackOptions) -> Iterable[Observation]:
                return [Observation(value, {"dimension": dimension}) for dimension, value in read().items()]

            self._meter.create_observable_gauge(f"treadle.tools.{name}", [observe], "1", what)

        gauge("capacity", "Units in all", lambda: {each.dimension: each.capacity for each in usage()})
        gauge("held", "Units that actions and sessions hold", lambda: {each.dimension: each.held for each in usage()})
        gauge("waiting", "Actions that wait and ask for it", waiting)


NO_METERS = Meters(NoOpMeter("treadle"))
