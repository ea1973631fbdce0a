"""Hold the engine's lease at the scheduler: register while the engine answers, renew with its load, and deregister when
it is lost or at drain.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import structlog
from treadle.engine.v1.engine_pb2 import EngineInfo, Load
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle_runtime.times import seconds

from treadle_sidecar.engine.watch import EngineWatch

log = structlog.get_logger()

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.5  # while the scheduler restarts
RENEWALS_PER_TTL = 3  # two may be lost before the lease runs out


class Registration:
    """`info` and `load` are called when they are sent; `stopping` is set when the drain begins."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        watch: EngineWatch,
        info: Callable[[], Awaitable[EngineInfo]],
        load: Callable[[], Load],
        stopping: asyncio.Event,
    ) -> None:
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._watch = watch
        self._info = info
        self._load = load
        self._stopping = stopping

    async def run(self) -> None:
        """Background task: until the drain; then the engine has been deregistered."""
        while not self._stopping.is_set():
            await self._first(self._watch.until_healthy(), self._stopping.wait())
            if self._stopping.is_set() or not self._watch.healthy:
                continue
            try:
                info = await self._info()
                lease = await self._register(info)
                log.info("engine registered", engine_id=info.engine_id, lease_id=lease.lease_id)
                await self._hold(info, lease)
            except grpc.aio.AioRpcError as error:
                log.warning("the scheduler does not accept the engine", code=error.code().name, details=error.details())
                await self._pause(RETRY_S)

    async def _register(self, info: EngineInfo) -> scheduler_pb2.RegisterEngineResponse:
        request = scheduler_pb2.RegisterEngineRequest(request_id=uuid.uuid4().hex, info=info)
        return await self._scheduler.RegisterEngine(request, timeout=CALL_TIMEOUT_S)

    async def _hold(self, info: EngineInfo, lease: scheduler_pb2.RegisterEngineResponse) -> None:
        interval_s = seconds(lease.lease_ttl) / RENEWALS_PER_TTL
        known = True
        try:
            while known:
                await self._pause(interval_s)
                if self._stopping.is_set() or not self._watch.healthy:
                    return
                known = await self._renew(info, lease)
        finally:
            if known:
                await _finish(self._deregister(info, lease))

    async def _renew(self, info: EngineInfo, lease: scheduler_pb2.RegisterEngineResponse) -> bool:
        """False where the scheduler does not know the lease."""
        request = scheduler_pb2.RenewEngineLeaseRequest(
            lease_id=lease.lease_id, engine_id=info.engine_id, load=self._load()
        )
        try:
            await self._scheduler.RenewEngineLease(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                log.warning("the lease expired; registering again", lease_id=lease.lease_id)
                return False
            log.warning("lease was not renewed", code=error.code().name, details=error.details())
        return True

    async def _deregister(self, info: EngineInfo, lease: scheduler_pb2.RegisterEngineResponse) -> None:
        request = scheduler_pb2.DeregisterEngineRequest(
            request_id=uuid.uuid4().hex, lease_id=lease.lease_id, engine_id=info.engine_id
        )
        try:
            await self._scheduler.DeregisterEngine(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:  # the lease then expires
            log.warning("engine was not deregistered", code=error.code().name, details=error.details())

    async def _pause(self, timeout_s: float) -> None:
        """Sleep, but not beyond the beginning of the drain or the loss of the engine."""
        waits = [self._stopping.wait(), asyncio.sleep(timeout_s)]
        if self._watch.healthy:
            waits.append(self._watch.until_lost())
        await self._first(*waits)

    @staticmethod
    async def _first(*waits: Awaitable[object]) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()


async def _finish(call: Coroutine[Any, Any, None]) -> None:
    """Await `call` even where the drain cancels the present task meanwhile. The call has a timeout of its own."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
