"""Write logs, and send traces and metrics of a process.

Owns structlog's configuration (JSON lines on stderr, with service and, where a span is active, trace_id and span_id;
the standard library's loggers go the same way) and the OpenTelemetry tracer. Tracing is off, with no provider,
exporter or interceptor, until `otlp_endpoint` is set; nor is there a meter provider, and an instrument does nothing.
The collector must take traces and metrics. Anywhere: `log = structlog.get_logger()`.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.grpc import aio_client_interceptors, aio_server_interceptor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from treadle_runtime.config import Settings

FLUSH_TIMEOUT_S = 5.0  # a collector that is away must not hold up the end of the process
SPANS_EXPORT_INTERVAL_S = 1.0  # spans are seen soon, still many at a time
METRICS_EXPORT_INTERVAL_S = 10.0  # metrics are looked at over minutes
SCOPE = "treadle"
BOUNDS_S = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # of histograms of seconds


@dataclass(frozen=True)
class Tracing:
    """The tracer of a process; `provider` is None where nothing is exported."""

    provider: TracerProvider | None = None

    @property
    def tracer(self) -> trace.Tracer:
        """The process's tracer; its spans record nothing where tracing is off."""
        provider: trace.TracerProvider = self.provider or trace.NoOpTracerProvider()
        return provider.get_tracer(SCOPE)

    def server_interceptor(self) -> grpc.aio.ServerInterceptor | None:
        """What starts a span for each RPC served; None where tracing is off."""
        if self.provider is None:
            return None
        return aio_server_interceptor(tracer_provider=self.provider)  # type: ignore[no-untyped-call, no-any-return]

    def client_interceptors(self) -> Sequence[grpc.aio.ClientInterceptor]:
        """What starts a span for each RPC made and sends its context; none where tracing is off."""
        if self.provider is None:
            return ()
        return aio_client_interceptors(tracer_provider=self.provider)  # type: ignore[no-untyped-call, no-any-return]

    async def shutdown(self) -> None:
        """Send what is still buffered, for `FLUSH_TIMEOUT_S` at most."""
        if self.provider is None:
            return
        await asyncio.to_thread(self.provider.force_flush, int(FLUSH_TIMEOUT_S * 1000))
        await asyncio.to_thread(self.provider.shutdown)


def configure_tracing(settings: Settings) -> Tracing:
    """The tracer that `settings` ask for."""
    if not settings.otlp_endpoint:
        return Tracing()
    provider = TracerProvider(resource=_resource_of(settings))
    exporter = OTLPSpanExporter(**_collector(settings))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SPANS_EXPORT_INTERVAL_S * 1000))
    return Tracing(provider)


class Metrics:
    """The metrics of one process: counters, histograms, gauges."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._provider: MeterProvider | None = None

    def meter(self) -> metrics.Meter:
        """Make instruments; they are sent from now on, where metrics are exported."""
        if not self._settings.otlp_endpoint:
            return metrics.NoOpMeter(SCOPE)
        if self._provider is None:
            exporter = OTLPMetricExporter(**_collector(self._settings))
            reader = PeriodicExportingMetricReader(exporter, METRICS_EXPORT_INTERVAL_S * 1000, FLUSH_TIMEOUT_S * 1000)
            self._provider = MeterProvider([reader], _resource_of(self._settings), shutdown_on_exit=False)
        return self._provider.get_meter(SCOPE)

    def seconds(self, name: str, what: str) -> Callable[..., None]:
        """Make the histogram `treadle_<service>_<name>_seconds`; returns what records a value, with labels."""
        full = f"treadle_{self._settings.service}_{name}_seconds"
        return self.meter().create_histogram(full, "s", what, explicit_bucket_boundaries_advisory=BOUNDS_S).record

    def total(self, name: str, what: str) -> Callable[..., None]:
        """Make the counter `treadle_<service>_<name>_total`; returns what adds to it, with labels."""
        return self.meter().create_counter(f"treadle_{self._settings.service}_{name}_total", "1", what).add

    async def shutdown(self) -> None:
        """Send the last values, for `FLUSH_TIMEOUT_S` at most."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown, FLUSH_TIMEOUT_S * 1000)


def _collector(settings: Settings) -> dict[str, Any]:
    insecure = not settings.otlp_endpoint.startswith("https")
    return {"endpoint": settings.otlp_endpoint, "insecure": insecure, "timeout": FLUSH_TIMEOUT_S}


def _resource_of(settings: Settings) -> Resource:
    """The attributes that name this service in traces and metrics."""
    return Resource.create({"service.name": f"treadle-{settings.service}", "service.namespace": "treadle"})


def configure_logging(settings: Settings) -> None:
    """Point structlog and the standard library's loggers at stderr, in the format and from the level that is set."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[Callable[..., Any]] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda _, __, event: event | {"service": event.get("service", settings.service)},
        _with_trace_ids,
    ]
    if settings.log_format == "json":
        last: list[Callable[..., Any]] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
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
    root.setLevel(max(level, logging.WARNING))  # libraries speak up only when something is wrong


def _with_trace_ids(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event
