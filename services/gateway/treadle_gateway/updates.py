"""Hand to the mesh the weights that a trainer brings over HTTP: pushed parts, loads from disk,
process groups.

SGLang takes each part of new weights as an update of its own, and its trainers mark no part as the
last. The mesh needs the last one: between the first part and the last an engine runs nothing, and
then serves the new version. So the push to an engine begins with the first part of a version and
ends when the trainer resumes the engine.

Invariants: a version is the desired one before an engine gets a part of it; after a part that an
engine did not take, no engine receives the end of the push.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from treadle.connection import Mesh
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2
from treadle.weights import Errors, call_together, set_weights, until_served
from treadle_core.model import INCOMPLETE

from treadle_gateway.mesh import KnownEngine, NoWeights
from treadle_gateway.order import Refused

if TYPE_CHECKING:
    from treadle.engine.v1.engine_pb2_grpc import EngineServiceAsyncStub

LOOK_S = 0.2  # between two looks at an engine that is held
Way = Literal["distributed", "tensor", "ipc"]


@dataclass
class _Push:
    """A push to one engine. parts: how many were sent. failed: why it cannot continue."""

    push_id: str
    weight_version: str
    parts: int = 0
    failed: str = ""

    def next_part(self, *, last: bool, **body: bytes) -> engine_pb2.PushWeightsRequest:
        """Return the request with the part after those that were sent."""
        self.parts += 1
        return engine_pb2.PushWeightsRequest(
            request_id=f"{self.push_id}-{self.parts}",
            weight_version=self.weight_version,
            push_id=self.push_id,
            part=self.parts - 1,
            last=last,
            **body,
        )


class Updates:
    """Updates under way, and other calls of trainers to sidecars. mesh: the connection for these
    calls."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._pushes: dict[str, _Push] = {}  # pushes by engine id
        self._loads: dict[tuple[str, str], asyncio.Task[Errors]] = {}  # loads by path and version
        # name, what it loads, engines that have begun
        self._unnamed: tuple[str, str, set[str]] = ("", "", set())

    async def close(self) -> None:
        """Leave what is under way to the sidecars."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        await self._mesh.close()

    async def call(
        self, engines: Collection[KnownEngine], name: str, request: Callable[[KnownEngine], Any]
    ) -> Errors:
        """Call an RPC of the sidecars of engines, all at once. Return errors by engine id."""
        timeout_s = self._mesh.timeouts.weights_s

        def call_of(engine: KnownEngine) -> "Callable[[EngineServiceAsyncStub], Awaitable[object]]":
            return lambda stub: getattr(stub, name)(request(engine), timeout=timeout_s)

        return await call_together(
            self._mesh, {each.engine_id: (each.address, call_of(each)) for each in engines}
        )

    async def load_of(self, engine: KnownEngine) -> engine_pb2.Load:
        """Return the load that an engine's sidecar reports at this moment. Raises Refused."""
        found: list[engine_pb2.Load] = []

        async def ask(stub: "EngineServiceAsyncStub") -> None:
            answer = await stub.GetLoad(
                engine_pb2.GetLoadRequest(), timeout=self._mesh.timeouts.cleanup_s
            )
            found.append(answer.load)

        errors = await call_together(self._mesh, {engine.engine_id: (engine.address, ask)})
        if errors:
            raise Refused(errors[engine.engine_id], 503)
        return found[0]

    async def versions_of(self, engines: Sequence[KnownEngine]) -> set[str]:
        """Return the versions that engines serve at this moment. Raises Refused."""
        return {load.weight_version for load in await asyncio.gather(*map(self.load_of, engines))}

    async def until_runs(
        self, engine: KnownEngine, problem: Callable[[], NoWeights | None]
    ) -> None:
        """Wait until an engine may run what its sidecar does not know of: it is not paused, has
        whole weights and all its memory. Return at once where its sidecar does not answer. problem:
        why it may never come to that. Raises Refused."""
        while True:
            try:
                load = await self.load_of(engine)
            except Refused:
                return
            incomplete = load.weight_version.startswith(INCOMPLETE)
            if not (load.paused or load.asleep_tags or incomplete):
                return
            why = problem()
            if incomplete and why is not None and why.is_overdue:
                raise Refused(why.reason, 503)
            await asyncio.sleep(LOOK_S)

    async def take(
        self, engines: Sequence[KnownEngine], way: Way, body: Mapping[str, Any]
    ) -> Errors:
        """Send a part to engines, all at once; return once each of them has it, with the errors of
        those that do not. The first one that fails ends it for all, since a broadcast needs all
        ranks, and the push has failed on all engines. Raises TreadleError, Refused."""
        version = self._version_of(engines, way, body.get("weight_version"))
        known = {engine.engine_id: self._pushes.get(engine.engine_id) for engine in engines}
        for engine_id, push in known.items():
            if push is not None and push.weight_version == version and push.failed:
                raise Refused(
                    f"the push of {version} to {engine_id} has failed: {push.failed}; pause and "
                    "push it anew"
                )
        fresh = [
            name for name, push in known.items() if push is None or push.weight_version != version
        ]
        if fresh:
            await set_weights(self._mesh, version, "")
            self._pushes |= {engine_id: _Push(uuid.uuid4().hex, version) for engine_id in fresh}
        pushes = {engine.engine_id: self._pushes[engine.engine_id] for engine in engines}
        part = {way: json.dumps(dict(body)).encode()}
        requests = {
            engine_id: push.next_part(last=False, **part) for engine_id, push in pushes.items()
        }
        calls = [
            asyncio.ensure_future(
                self.call([engine], "PushWeights", lambda each: requests[each.engine_id])
            )
            for engine in engines
        ]
        try:
            errors = await _until_one_fails(calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        if not errors:
            return errors
        [(first, said)] = errors.items()
        for push in self._pushes.values():
            if push.weight_version == version:
                push.failed = f"engine {first}: {said}"
        return {
            engine_id: errors.get(engine_id, f"engine {first} has failed: {said}")
            for engine_id in pushes
        }

    async def finish(self, engines: Sequence[KnownEngine]) -> Errors:
        """End the pushes to engines, which serve the new version from then on. Return the errors of
        those that do not. Does nothing where none is under way. Raises TreadleError."""
        pushes = {
            each.engine_id: self._pushes[each.engine_id]
            for each in engines
            if each.engine_id in self._pushes
        }
        for engine_id, push in pushes.items():
            if not push.failed:
                del self._pushes[engine_id]
        errors = {
            engine_id: f"the push of {push.weight_version} has failed: {push.failed}"
            for engine_id, push in pushes.items()
            if push.failed
        }
        due = [
            engine
            for engine in engines
            if engine.engine_id in pushes and engine.engine_id not in errors
        ]
        if not due:
            return errors
        errors |= await self.call(
            due, "PushWeights", lambda each: pushes[each.engine_id].next_part(last=True)
        )
        question, mesh = scheduler_pb2.GetWeightsRequest(), self._mesh
        weights = (
            await mesh.call(mesh.scheduler.GetWeights, question, mesh.timeouts.control_s)
        ).weights
        serving = {engine.engine_id for engine in due} - set(errors)
        await until_served(mesh, weights, mesh.timeouts.control_s, serving)
        return errors

    def forget_failed(self, engines: Sequence[KnownEngine]) -> None:
        """Forget pushes that failed, as the trainer begins anew and may repeat them under their
        version."""
        for engine in engines:
            push = self._pushes.get(engine.engine_id)
            if push is not None and push.failed:
                del self._pushes[engine.engine_id]

    def failed_pushes(self, weight_version: str) -> dict[str, str]:
        """Return why pushes of a version cannot continue, by engine id."""
        return {
            engine_id: push.failed
            for engine_id, push in self._pushes.items()
            if push.failed and push.weight_version == weight_version
        }

    async def load(
        self, engines: Sequence[KnownEngine], model_path: str, version: object
    ) -> tuple[str, Errors]:
        """Have all engines of the mesh load weights from disk; return their version, and the errors
        of these engines, once these have loaded. A caller of each engine in turn waits for the same
        load. Raises TreadleError."""
        name = self._name(model_path, engines) if version is None else str(version)
        load = self._loads.get((model_path, name))
        if load is None:
            self._loads[model_path, name] = load = asyncio.ensure_future(
                self._load(model_path, name)
            )
            load.add_done_callback(lambda _: self._loads.pop((model_path, name), None))
        errors = await asyncio.shield(load)
        ids = {engine.engine_id for engine in engines}
        return name, {engine_id: said for engine_id, said in errors.items() if engine_id in ids}

    async def join(self, engines: Sequence[KnownEngine], body: Mapping[str, Any]) -> Errors:
        """Join engines to a trainer's process group, by SGLang's request of
        /init_weights_update_group. Several have the ranks from `rank_offset` on, in the order of
        their ids. Raises Refused."""
        offset, world_size = body.get("rank_offset"), body.get("world_size")
        if type(offset) is not int or type(world_size) is not int:
            raise Refused("rank_offset, world_size: must be whole numbers")
        ranks = sum(engine.ranks for engine in engines)
        if offset + ranks > world_size:
            raise Refused(
                f"world_size: must be at least {offset + ranks}, since these {len(engines)} "
                f"engines have {ranks} processes after rank {offset}; is {world_size}"
            )
        offsets, at = dict[str, int](), offset
        for engine in sorted(engines, key=lambda each: each.engine_id):
            offsets[engine.engine_id], at = at, at + engine.ranks
        host = str(body.get("master_address") or "")
        master = f"{f'[{host}]' if ':' in host else host}:{body.get('master_port')}"

        def request(engine: KnownEngine) -> engine_pb2.JoinWeightsGroupRequest:
            return engine_pb2.JoinWeightsGroupRequest(
                request_id=uuid.uuid4().hex,
                group_name=str(body.get("group_name") or "weight_update_group"),
                master_address=master,
                rank_offset=offsets[engine.engine_id],
                world_size=world_size,
                backend=str(body.get("backend") or ""),
            )

        return await self.call(engines, "JoinWeightsGroup", request)

    async def _load(self, model_path: str, version: str) -> Errors:
        weights = await set_weights(self._mesh, version, model_path)
        return await until_served(self._mesh, weights, self._mesh.timeouts.weights_s)

    def _version_of(self, engines: Sequence[KnownEngine], way: Way, given: object) -> str:
        if given is not None:
            return str(given)
        open_ones = [self._pushes.get(engine.engine_id) for engine in engines]
        known = next(
            (push.weight_version for push in open_ones if push is not None and not push.failed),
            None,
        )
        return known or self._name(way, engines)

    def _name(self, what: str, engines: Sequence[KnownEngine]) -> str:
        """Return a name for weights that their trainer does not name: the same for all engines, to
        each of which it brings them once."""
        name, of, begun = self._unnamed
        ids = {engine.engine_id for engine in engines}
        if of != what or begun & ids:
            name, begun = f"update-{uuid.uuid4().hex[:12]}", set()
        self._unnamed = (name, what, begun | ids)
        return name


async def _until_one_fails(calls: Sequence["asyncio.Future[Errors]"]) -> Errors:
    """Return the errors of the first of the calls that fails; none once all are done."""
    for call in asyncio.as_completed(calls):
        if errors := await call:
            return errors
    return {}
