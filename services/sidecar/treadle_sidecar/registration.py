"""Hold the engine's lease at the scheduler: register while the engine answers, renew with its load
and its decode curve, and deregister when it is lost or at drain. Each renewal, of which the first
follows the registration at once, is answered with the scheduler's time, which this sidecar's
tickets and reports follow.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from google.protobuf.timestamp_pb2 import Timestamp
from treadle.connection import finish
from treadle.engine.v1.engine_pb2 import DecodeCurve, EngineInfo, Load
from treadle.scheduler.v1 import scheduler_pb2
from treadle_runtime.fields import seconds
from treadle_runtime.identity import SealCheck

from treadle_sidecar.engine.watch import EngineWatch

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = structlog.get_logger()

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.5  # while the scheduler restarts
RENEWALS_PER_TTL = 3  # two may be lost before the lease runs out
APART_S = 2.0  # clocks that differ by more are reported; by less differ answers that are late


class SchedulerClock:
    """The scheduler's clock, as it was told last; this machine's own until then.

    Tickets expire by it, so that neither this machine's clock nor a scheduler that starts with
    another one makes good tickets look old.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()
        self._reported_s = 0.0

    def now(self) -> float:
        """Return Unix seconds."""
        return self._offset_s + time.monotonic()

    @property
    def ahead_s(self) -> float:
        """Return the seconds by which this machine's clock is ahead; below 0, it is behind."""
        return time.time() - self.now()

    def set(self, told: Timestamp) -> None:
        """Take over a time that the scheduler has just told. One that comes late makes tickets
        live longer, never shorter."""
        self._offset_s = seconds(told) - time.monotonic()
        ahead_s = self.ahead_s
        if abs(ahead_s - self._reported_s) > APART_S:
            self._reported_s = ahead_s
            log.warning(
                "this machine's clock is not the scheduler's, which tickets and reports follow",
                ahead_s=round(ahead_s, 1),
            )


@dataclass(eq=False)
class Registration:
    """The engine's registration at the scheduler, from the first lease to the deregistration.

    The callables are called when a message is sent. stopping: set when the drain begins. measured:
    set once the engine need not wait for its decode curve any more. seals: what checks seals with
    the engine's key; None in plaintext. clock: of the scheduler, which is set here.
    """

    scheduler: "SchedulerServiceAsyncStub"
    watch: EngineWatch
    info: Callable[[], Awaitable[EngineInfo]]
    load: Callable[[], Load]
    curve: Callable[[], DecodeCurve | None]
    measured: asyncio.Event
    stopping: asyncio.Event
    seals: SealCheck | None
    clock: SchedulerClock

    async def run(self) -> None:
        """Register the engine and renew its lease until the drain; deregister it at the end."""
        while not self.stopping.is_set():
            await _first(self._until_ready(), self.stopping.wait())
            if self.stopping.is_set() or not self.watch.healthy:
                continue
            try:
                info = await self.info()
                request = scheduler_pb2.RegisterEngineRequest(
                    request_id=uuid.uuid4().hex, info=info
                )
                lease = await self.scheduler.RegisterEngine(request, timeout=CALL_TIMEOUT_S)
                if self.seals is not None:
                    self.seals.key = lease.ticket_key
                log.info("engine registered", engine_id=info.engine_id, lease_id=lease.lease_id)
                await self._hold(info.engine_id, lease)
            except grpc.aio.AioRpcError as error:
                log.warning("the scheduler does not accept the engine", **_brief(error))
                await self._pause(RETRY_S)

    async def _until_ready(self) -> None:
        await self.measured.wait()
        await self.watch.until_healthy()

    async def _hold(self, engine_id: str, lease: scheduler_pb2.RegisterEngineResponse) -> None:
        interval_s = seconds(lease.lease_ttl) / RENEWALS_PER_TTL
        known = True
        try:
            while known := await self._renew(engine_id, lease.lease_id):
                await self._pause(interval_s)
                if self.stopping.is_set() or not self.watch.healthy:
                    return
        finally:
            if known:  # the drain cancels this task; the call has a timeout of its own
                await finish(self._deregister(engine_id, lease.lease_id))

    async def _renew(self, engine_id: str, lease_id: str) -> bool:
        """Renew the lease; return False where the scheduler does not know it."""
        request = scheduler_pb2.RenewEngineLeaseRequest(
            lease_id=lease_id, engine_id=engine_id, load=self.load(), decode_curve=self.curve()
        )
        try:
            answer = await self.scheduler.RenewEngineLease(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("lease was not renewed", lease_id=lease_id, **_brief(error))
            return error.code() is not grpc.StatusCode.NOT_FOUND
        if answer.HasField("now"):  # an older scheduler does not tell it
            self.clock.set(answer.now)
        return True

    async def _deregister(self, engine_id: str, lease_id: str) -> None:
        request = scheduler_pb2.DeregisterEngineRequest(
            request_id=uuid.uuid4().hex, lease_id=lease_id, engine_id=engine_id
        )
        try:
            await self.scheduler.DeregisterEngine(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:  # the lease then expires
            log.warning("engine was not deregistered", **_brief(error))

    async def _pause(self, timeout_s: float) -> None:
        """Sleep until the time is over, the drain begins or the engine is lost."""
        lost = [self.watch.until_lost()] if self.watch.healthy else []
        await _first(self.stopping.wait(), asyncio.sleep(timeout_s), *lost)


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when the first of `waits` has ended, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _brief(error: grpc.aio.AioRpcError) -> dict[str, object]:
    return {"code": error.code().name, "details": error.details()}
