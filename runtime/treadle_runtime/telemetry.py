"""Write logs, and send traces and metrics of a process.

This module owns structlog's configuration (JSON lines on stderr, with service and, where a span is
active, trace_id and span_id; the standard library's loggers write the same way) and the
OpenTelemetry tracer and meter. Tracing is off, with no provider, exporter or interceptor, until
`otlp_endpoint` is set; nor is there a meter provider, and an instrument does nothing. The collector
must take traces and metrics. Anywhere: `log = structlog.get_logger()`.

The SDK, the exporters and the interceptors of OpenTelemetry are imported only where `otlp_endpoint`
is set: they take a quarter of a second of processor time.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio
import structlog
from opentelemetry import metrics, trace
from opentelemetry.context import Context

from treadle_runtime.config import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

FLUSH_TIMEOUT_S = 5.0  # a collector that does not answer must not delay the end of the process
SPANS_EXPORT_INTERVAL_S = 1.0  # spans are visible soon, and are still sent many at a time
METRICS_EXPORT_INTERVAL_S = 10.0  # metrics are looked at over minutes
READ_GAUGES_S = 5.0  # twice as often as they are exported
SCOPE = "treadle"
# bounds of histograms of seconds
BOUNDS_S = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


_given_ids: contextvars.ContextVar[trace.SpanContext | None] = contextvars.ContextVar(
    "treadle_ids", default=None
)


@dataclass(frozen=True)
class Tracing:
    """Tracer of a process; `provider` is None where nothing is exported."""

    provider: TracerProvider | None = None

    @property
    def tracer(self) -> trace.Tracer:
        """Return the process's tracer; its spans record nothing where tracing is off."""
        provider: trace.TracerProvider = self.provider or trace.NoOpTracerProvider()
        return provider.get_tracer(SCOPE)

    def server_interceptor(self) -> grpc.aio.ServerInterceptor | None:
        """Return what starts a span for each RPC served, or None where tracing is off."""
        if self.provider is None:
            return None
        from opentelemetry.instrumentation.grpc import aio_server_interceptor

        make: Any = aio_server_interceptor
        made: grpc.aio.ServerInterceptor = make(tracer_provider=self.provider)
        return made

    def client_interceptors(self) -> Sequence[grpc.aio.ClientInterceptor]:
        """Return what starts a span for each RPC made and sends its context; none where tracing is
        off."""
        if self.provider is None:
            return ()
        from opentelemetry.instrumentation.grpc import aio_client_interceptors

        make: Any = aio_client_interceptors
        made: Sequence[grpc.aio.ClientInterceptor] = make(tracer_provider=self.provider)
        return made

    def record_span(
        self, span: trace.SpanContext, name: str, start_s: float, end_s: float, **attributes: Any
    ) -> None:
        """Send a span without parent that another process has begun and does not send, with Unix
        times."""
        if self.provider is None:
            return
        token = _given_ids.set(span)
        try:
            begun = self.tracer.start_span(
                name, Context(), start_time=round(start_s * 1e9), attributes=attributes
            )
        finally:
            _given_ids.reset(token)
        begun.end(round(end_s * 1e9))

    async def shutdown(self) -> None:
        """Send what is still buffered, for `FLUSH_TIMEOUT_S` at most."""
        if self.provider is None:
            return
        await asyncio.to_thread(self.provider.force_flush, int(FLUSH_TIMEOUT_S * 1000))
        await asyncio.to_thread(self.provider.shutdown)


def configure_tracing(settings: Settings) -> Tracing:
    """Return the tracer that `settings` configure."""
    if not settings.otlp_endpoint:
        return Tracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Generator of random ids, except for a span that has ids already."""

        def generate_trace_id(self) -> int:
            given = _given_ids.get()
            return super().generate_trace_id() if given is None else given.trace_id

        def generate_span_id(self) -> int:
            given = _given_ids.get()
            return super().generate_span_id() if given is None else given.span_id

    provider = TracerProvider(resource=_resource_of(settings), id_generator=Ids())
    exporter = OTLPSpanExporter(**_collector(settings))
    provider.add_span_processor(
        BatchSpanProcessor(exporter, schedule_delay_millis=SPANS_EXPORT_INTERVAL_S * 1000)
    )
    return Tracing(provider)


Readings = Iterable[tuple[float, Mapping[str, str]]]


class Metrics:
    """Metrics of one process. Names are `treadle.<service>.<noun>`; docs/metrics.md lists them all.

    Labels must have few values each: ids of trajectories, steps and rollouts belong on spans and in
    logs.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._prefix = f"treadle.{settings.service}."
        self._provider: MeterProvider | None = None
        self._gauges: list[tuple[metrics._Gauge, Callable[[], Readings]]] = []

    def seconds(
        self, noun: str, what: str, bounds_s: Sequence[float] = BOUNDS_S
    ) -> Callable[..., None]:
        """Make a histogram of seconds; return what records a value, with labels."""
        return self.histogram(self._prefix + noun, "s", what, bounds_s)

    def histogram(
        self, name: str, unit: str, what: str, bounds: Sequence[float]
    ) -> Callable[..., None]:
        """Make a histogram of any name and unit; return what records a value, with labels."""
        return (
            self._meter()
            .create_histogram(name, unit, what, explicit_bucket_boundaries_advisory=bounds)
            .record
        )

    def total(self, noun: str, unit: str, what: str) -> Callable[..., None]:
        """Make a counter of `{unit}`, or of seconds (`s`); return what adds to it, with labels."""
        return self._meter().create_counter(self._prefix + noun, _annotated(unit), what).add

    def gauge(
        self,
        noun: str,
        unit: str,
        what: str,
        read: Callable[[], float] | Callable[[], Readings],
        *,
        of: str = "",
    ) -> None:
        """Make a gauge of `{unit}`, or of seconds (`s`). read: returns its value now, or its values
        with their labels; `watch` calls it on the event loop. of: used in place of the service's
        name, where several services have the gauge."""
        gauge = self._meter().create_gauge(
            f"treadle.{of}.{noun}" if of else self._prefix + noun, _annotated(unit), what
        )

        def readings() -> Readings:
            value = read()
            return ((value, {}),) if isinstance(value, int | float) else value

        self._gauges.append((gauge, readings))

    async def watch(self) -> None:
        """Read the gauges regularly; a background task. The exporter does not, since it runs on
        another thread."""
        if not self._settings.otlp_endpoint:
            return
        try:
            while True:
                self._read_gauges()
                await asyncio.sleep(READ_GAUGES_S)
        finally:
            self._read_gauges()

    async def shutdown(self) -> None:
        """Send the last values, for `FLUSH_TIMEOUT_S` at most."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown, FLUSH_TIMEOUT_S * 1000)

    def _read_gauges(self) -> None:
        for gauge, readings in self._gauges:
            for value, labels in readings():
                gauge.set(value, labels)

    def _meter(self) -> metrics.Meter:
        if not self._settings.otlp_endpoint:
            return metrics.NoOpMeter(SCOPE)
        if self._provider is None:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

            exporter = OTLPMetricExporter(**_collector(self._settings))
            reader = PeriodicExportingMetricReader(
                exporter, METRICS_EXPORT_INTERVAL_S * 1000, FLUSH_TIMEOUT_S * 1000
            )
            self._provider = MeterProvider(
                [reader], _resource_of(self._settings), shutdown_on_exit=False
            )
        return self._provider.get_meter(SCOPE)


def _annotated(unit: str) -> str:
    """Return the unit as UCUM writes it: what is counted stands in braces."""
    return unit if unit == "s" else f"{{{unit}}}"


def _collector(settings: Settings) -> dict[str, Any]:
    insecure = not settings.otlp_endpoint.startswith("https")
    return {"endpoint": settings.otlp_endpoint, "insecure": insecure, "timeout": FLUSH_TIMEOUT_S}


def _resource_of(settings: Settings) -> Resource:
    """Return the attributes that name this process in traces and metrics."""
    from opentelemetry.sdk.resources import Resource

    port = settings.listen.rpartition(":")[2]
    # A process that is started again at its port continues the series of the one before it.
    instance = f"{socket.gethostname()}:{port if port != '0' else f'pid-{os.getpid()}'}"
    names = {"service.name": f"treadle-{settings.service}", "service.namespace": "treadle"}
    return Resource.create({**names, "service.instance.id": instance})


def configure_logging(settings: Settings) -> None:
    """Point structlog and the standard library's loggers at stderr, in the format and from the
    level that is set."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[Callable[..., Any]] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda _, __, event: event | {"service": event.get("service", settings.service)},
        _with_trace_ids,
    ]
    if settings.log_format == "json":
        last: list[Callable[..., Any]] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        last = [
            structlog.processors.format_exc_info,
            _escape_codes,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), repr_native_str=True),
        ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))  # libraries log only when something is wrong


def _escape_codes(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape what would change a terminal, or begin a line that looks like another event; the
    renderer does so for all other values."""
    for name, kept in (("event", ""), ("exception", "\n")):
        if isinstance(text := event.get(name), str):
            shown = (
                each if each.isprintable() or each in kept else repr(each)[1:-1] for each in text
            )
            event[name] = "".join(shown).replace("\n", "\n    ")
    return event


def _with_trace_ids(
    _: Any, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event
