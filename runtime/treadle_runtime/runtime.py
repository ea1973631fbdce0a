"""The nouns between a service and its shell: what it is given (Runtime) and what it gives back (Wiring)."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from treadle_runtime.bus import Bus
from treadle_runtime.channels import Channels
from treadle_runtime.config import Settings
from treadle_runtime.errors import ErrorTable
from treadle_runtime.idempotency import RequestRecords
from treadle_runtime.metering import Metering
from treadle_runtime.telemetry import Tracing


@dataclass(frozen=True)
class Runtime:
    """What a service is given to work with.

    stopping: set when the drain begins. listening: resolves to the address (host:port) that the server listens at.
    """

    settings: Settings
    bus: Bus
    records: RequestRecords
    stopping: asyncio.Event
    channels: Channels
    tracing: Tracing
    metering: Metering
    listening: asyncio.Future[str]

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` (host:port): one per address, closed at drain; deadline and trace go with it."""
        return self.channels.to(address)


@dataclass(frozen=True)
class Wiring:
    """What a service serves.

    services: full service name → adds its servicer to the server. tasks: run beside the server, cancelled at drain; one
    that fails ends the process. close: called after NATS is drained. errors: the service's core exceptions.
    """

    services: Mapping[str, Callable[[grpc.aio.Server], None]]
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    close: Callable[[], Awaitable[None]] | None = None
    errors: ErrorTable = field(default_factory=dict)


Wire = Callable[[Runtime], Awaitable[Wiring]]


@dataclass(frozen=True)
class Serving:
    """A server that listens at `address` (host:port)."""

    address: str
    runtime: Runtime
