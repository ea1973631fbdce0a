"""Let whoever has the key change the mesh from the page: pause and resume all engines, drain one
and use it again.

Without a key, control is off. The console makes the calls itself, with its certificate as an
operator.
"""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc.aio
import structlog
from treadle.engine.v1 import engine_pb2
from treadle.engine.v1.engine_pb2_grpc import EngineServiceStub
from treadle.scheduler.v1 import scheduler_pb2 as pb

from treadle_console.watch import Connect

if TYPE_CHECKING:
    from treadle.engine.v1.engine_pb2_grpc import EngineServiceAsyncStub
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = structlog.get_logger()

ASK_S = 5.0
# a sidecar answers once its engine has stopped, after the decode step or the prefill that it runs
ENGINE_S = 30.0
REFUSED_S = 0.5  # delay of a refusal, so that nobody tries many keys


class Control:
    """Actions that a page may request. key: what a request must present; empty: nobody may change
    anything."""

    def __init__(self, scheduler: SchedulerServiceAsyncStub, connect: Connect, key: str) -> None:
        self._scheduler, self._connect = scheduler, connect
        self._wanted = f"Bearer {key}".encode() if key else b""
        self._actions: dict[str, Callable[[str], Awaitable[dict[str, str]]]] = {
            "check": self._check,
            "pause": self._pause,
            "resume": self._resume,
            "drain": lambda engine: self._drain(engine, undo=False),
            "undrain": lambda engine: self._drain(engine, undo=True),
        }

    @property
    def offered(self) -> bool:
        """Return whether there is a key."""
        return bool(self._wanted)

    async def admits(self, authorization: str) -> bool:
        """Return whether a request presents the key; a wrong key is refused late."""
        right = self.offered and hmac.compare_digest(authorization.encode(), self._wanted)
        if not right:
            log.warning("a request to change the mesh has no right key")
            await asyncio.sleep(REFUSED_S)
        return right

    async def act(self, action: str, engine: str) -> dict[str, str]:
        """Run an action and return the errors of engines, by id. engine: for drain and undrain.
        Raises ValueError, and grpc.aio.AioRpcError where the scheduler refuses or is away."""
        if action not in self._actions:
            raise ValueError(f"action: must be one of {', '.join(self._actions)}")
        errors = await self._actions[action](engine)
        if action != "check":
            log.warning("changed from the page", action=action, engine=engine, errors=errors)
        return errors

    async def _check(self, _: str) -> dict[str, str]:
        return {}

    async def _pause(self, _: str) -> dict[str, str]:
        request = engine_pb2.PauseRequest(
            request_id=uuid.uuid4().hex, mode=engine_pb2.PAUSE_MODE_KEEP
        )
        return await self._call_engines(lambda engine: engine.Pause(request, timeout=ENGINE_S))

    async def _resume(self, _: str) -> dict[str, str]:
        request = engine_pb2.ResumeRequest(request_id=uuid.uuid4().hex)
        return await self._call_engines(lambda engine: engine.Resume(request, timeout=ENGINE_S))

    async def _drain(self, engine: str, *, undo: bool) -> dict[str, str]:
        request = pb.DrainEngineRequest(request_id=uuid.uuid4().hex, engine_id=engine, undo=undo)
        await self._scheduler.DrainEngine(request, timeout=ASK_S)
        return {}

    async def _call_engines(
        self, call: Callable[[EngineServiceAsyncStub], Awaitable[object]]
    ) -> dict[str, str]:
        """Call all engines at once and return their errors, by id."""
        listed = (await self._scheduler.ListEngines(pb.ListEnginesRequest(), timeout=ASK_S)).engines
        errors: dict[str, str] = {}

        async def one(info: engine_pb2.EngineInfo) -> None:
            try:
                await call(EngineServiceStub(self._connect(info.address, "sidecar")))
            except grpc.aio.AioRpcError as error:
                errors[info.engine_id] = error.details() or error.code().name

        async with asyncio.TaskGroup() as group:
            for each in listed:
                group.create_task(one(each.info))
        return errors
