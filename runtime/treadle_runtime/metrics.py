"""Send metrics of a process (counters, histograms, gauges) to an OTLP collector.

There is no OpenTelemetry meter provider, and an instrument does nothing, until `otlp_endpoint` is set and the service
asks for a meter: a collector that only takes traces gets nothing from a service without metrics.
"""

import asyncio

from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from treadle_runtime.config import Settings
from treadle_runtime.telemetry import FLUSH_TIMEOUT_S, resource_of

EXPORT_INTERVAL_S = 10.0  # metrics are looked at over minutes
SCOPE = "treadle"


class Metrics:
    """The metrics of one process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._provider: MeterProvider | None = None

    def meter(self) -> metrics.Meter:
        """Makes counters, histograms and gauges; they are sent from now on, where metrics are exported."""
        if not self._settings.otlp_endpoint:
            return metrics.NoOpMeter(SCOPE)
        if self._provider is None:
            exporter = OTLPMetricExporter(
                endpoint=self._settings.otlp_endpoint,
                insecure=not self._settings.otlp_endpoint.startswith("https"),
                timeout=FLUSH_TIMEOUT_S,
            )
            reader = PeriodicExportingMetricReader(exporter, EXPORT_INTERVAL_S * 1000, FLUSH_TIMEOUT_S * 1000)
            self._provider = MeterProvider([reader], resource_of(self._settings), shutdown_on_exit=False)
        return self._provider.get_meter(SCOPE)

    async def shutdown(self) -> None:
        """Send the last values, for `FLUSH_TIMEOUT_S` at most."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown, FLUSH_TIMEOUT_S * 1000)
