"""Give each trajectory one trace: the W3C trace context of all calls that are made for it.

Where the caller has set up OpenTelemetry, a trajectory is a span of its provider, and a child of
the span that is active when the trajectory is opened; interceptors of OpenTelemetry continue it.
Otherwise the context is made here, and the scheduler, which finds that in the trace state, sends
the span when the trajectory is closed.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")

STATE = "treadle=root"  # the services read it in treadle_scheduler.metrics


class TrajectoryTrace:
    """The trace of one trajectory, from its opening to `end`."""

    def __init__(self) -> None:
        carrier: dict[str, str] = {}
        # A process that has not imported OpenTelemetry cannot have set it up, and this package does
        # not depend on it.
        self._otel: Any = sys.modules.get("opentelemetry.trace")
        if self._otel is not None:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            w3c = TraceContextTextMapPropagator()
            self._span = self._otel.get_tracer("treadle").start_span("trajectory")
            w3c.inject(carrier, self._otel.set_span_in_context(self._span))
        if not carrier:
            carrier = {
                "traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01",
                "tracestate": STATE,
            }
            if (
                self._otel is not None
            ):  # interceptors of OpenTelemetry find the context in the active span
                self._span = self._otel.get_current_span(w3c.extract(carrier))
        self._metadata = tuple(carrier.items())

    def bind(self, method: Callable[..., T]) -> Callable[..., T]:
        """Return the method with calls that belong to the trace."""

        def start(request: object, timeout: float) -> T:
            with self._active():
                return method(request, timeout=timeout, metadata=self._metadata)

        return start

    def name(self, **ids: str) -> None:
        """Add the ids of the trajectory to its trace, once they are known."""
        if self._otel is not None:
            self._span.set_attributes({f"treadle.{name}": value for name, value in ids.items()})

    def end(self, outcome: str) -> None:
        """End the trace with the outcome of the trajectory, which is closed."""
        if self._otel is not None:
            self.name(outcome=outcome)
            self._span.end()

    def _active(self) -> AbstractContextManager[object]:
        if self._otel is None:
            return nullcontext()
        active: AbstractContextManager[object] = self._otel.use_span(
            self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )
        return active
