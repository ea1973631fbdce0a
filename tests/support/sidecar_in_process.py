"""A sidecar served in this process, over a real bus and a real channel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from support.conditions import until_said
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle_runtime.server import Serving, serving
from treadle_sidecar.config import SidecarSettings
from treadle_sidecar.wire import wire

CALL_S = 20.0


class Sidecar:
    """A stub, and where it is."""

    def __init__(self, served: Serving, stub: engine_pb2_grpc.EngineServiceAsyncStub) -> None:
        self.address = served.address
        self.runtime = served.runtime
        self.stub = stub

    async def load(self) -> engine_pb2.Load:
        """What it says of itself."""
        return (await self.stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=CALL_S)).load

    async def until_waiting(self, steps: int) -> None:
        """Returns once so many steps wait for a slot."""
        await until_said(self.load, lambda load: load.waiting_steps == steps)

    async def until_engine_is(self, healthy: bool, within_s: float = 30.0) -> None:
        """Waits for the sidecar's own view of its engine."""
        request = engine_pb2.WatchLoadRequest(interval=Duration(nanos=50_000_000))
        async for response in self.stub.WatchLoad(request, timeout=within_s):
            if response.load.engine_healthy is healthy:
                return


@asynccontextmanager
async def sidecar(
    nats_url: str, engine_url: str, engine_id: str = "e0", **options: Any
) -> AsyncIterator[Sidecar]:
    """Serves one engine for the time of the block; ready once the engine is healthy, with
    healthy=False at once. No probe of its curve unless options ask."""
    healthy = options.pop("healthy", True)
    given: dict[str, Any] = {"probe_s": 0.0, **options}
    settings = SidecarSettings(
        listen="127.0.0.1:0",
        nats_url=nats_url,
        engine_id=engine_id,
        engine_url=engine_url,
        drain_grace_s=1.0,
        **given,
    )
    async with (
        serving(settings, wire) as served,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        side = Sidecar(served, engine_pb2_grpc.EngineServiceStub(channel))
        await side.until_engine_is(healthy)
        yield side
