"""Call all engines of a mesh at once for a trainer: load or push weights, give memory away, pause.

`treadle.Client` has these calls (`FleetCalls`); they are a class of their own since they are about
engines, not about trajectories. The scheduler holds which version is desired; parts go from the
trainer to each engine's sidecar, so weights never pass through the scheduler. A call to an engine
is made once: a caller that tries again begins the push anew, as a broadcast cannot be repeated for
one engine alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
)
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import grpc
from google.protobuf.message import Message

from treadle.connection import Mesh, request_id
from treadle.engine.v1 import engine_pb2
from treadle.errors import TreadleError, error_from
from treadle.scheduler.v1 import scheduler_pb2

if TYPE_CHECKING:
    from treadle.engine.v1.engine_pb2_grpc import EngineServiceAsyncStub


Call = Callable[["EngineServiceAsyncStub"], Awaitable[object]]
Errors = dict[str, str]  # by engine id


@dataclass(frozen=True)
class WeightPush:
    """One part of pushed weights. how: SGLang's way. body: SGLang's request of
    /update_weights_from_<how>, as JSON."""

    how: Literal["distributed", "tensor", "ipc"]
    body: Mapping[str, Any]


async def list_engines(
    mesh: Mesh, engine_ids: Collection[str] | None
) -> list[engine_pb2.EngineInfo]:
    """Return the registered engines, or those named, in the order of their ids."""
    request = scheduler_pb2.ListEnginesRequest()
    listed = (await mesh.call(mesh.scheduler.ListEngines, request, mesh.timeouts.control_s)).engines
    found = [
        engine.info
        for engine in listed
        if engine_ids is None or engine.info.engine_id in engine_ids
    ]
    return sorted(found, key=lambda info: info.engine_id)


async def call_all(mesh: Mesh, engines: Iterable[engine_pb2.EngineInfo], call: Call) -> Errors:
    """Call all engines at once. Return the errors of those that failed."""
    return await call_together(
        mesh, {engine.engine_id: (engine.address, call) for engine in engines}
    )


async def call_together(
    mesh: Mesh,
    calls: Mapping[str, tuple[str, Call]],
    trainer: Coroutine[Any, Any, object] | None = None,
) -> Errors:
    """Call engines (id → address and call) at once. Return the errors of those that failed.

    trainer: work that runs at the same time, where neither the engines nor the trainer are done
    without the others. The first engine that fails then ends it for all: `trainer` is cancelled.
    Raises what `trainer` raises.
    """
    tasks = {
        engine_id: asyncio.ensure_future(_call(call(mesh.engine(address))))
        for engine_id, (address, call) in calls.items()
    }
    own = asyncio.ensure_future(trainer) if trainer is not None else None
    everything = {*tasks.values(), *([own] if own is not None else [])}
    until = asyncio.FIRST_EXCEPTION if own is not None else asyncio.ALL_COMPLETED
    try:
        if everything:
            await asyncio.wait(everything, return_when=until)
    finally:
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
    errors = {
        engine_id: str(error)
        for engine_id, task in tasks.items()
        if not task.cancelled() and (error := task.exception()) is not None
    }
    if own is not None and not own.cancelled() and (failure := own.exception()) is not None:
        for engine_id, said in errors.items():
            failure.add_note(f"engine {engine_id}: {said}")
        raise failure
    if own is not None and errors:
        first, said = next(iter(errors.items()))
        return {
            engine_id: errors.get(engine_id, f"engine {first} has failed: {said}")
            for engine_id in calls
        }
    return errors


async def _call(answer: Awaitable[object]) -> None:
    try:
        await answer
    except grpc.aio.AioRpcError as error:
        raise error_from(error) from error


async def set_weights(mesh: Mesh, weight_version: str, model_path: str) -> scheduler_pb2.Weights:
    """Make a version the desired one. model_path: empty where it is pushed."""
    request = scheduler_pb2.SetWeightsRequest(
        request_id=request_id(), weight_version=weight_version, model_path=model_path
    )
    return (await mesh.call(mesh.scheduler.SetWeights, request, mesh.timeouts.control_s)).weights


async def until_served(
    mesh: Mesh,
    weights: scheduler_pb2.Weights,
    timeout_s: float,
    engine_ids: Collection[str] | None = None,
) -> Errors:
    """Wait until no engine, or none of those named, is behind. Return the errors of all engines
    that have one."""
    backoff = mesh.backoff(timeout_s)
    while behind := [
        engine.engine_id
        for engine in weights.engines
        if engine.state == scheduler_pb2.WEIGHTS_STATE_BEHIND
        and (engine_ids is None or engine.engine_id in engine_ids)
    ]:
        message = f"these engines do not serve {weights.weight_version} yet: {', '.join(behind)}"
        await backoff.wait(TreadleError(grpc.StatusCode.DEADLINE_EXCEEDED, message), None)
        question = scheduler_pb2.GetWeightsRequest()
        weights = (
            await mesh.call(mesh.scheduler.GetWeights, question, mesh.timeouts.control_s)
        ).weights
    return {engine.engine_id: engine.error for engine in weights.engines if engine.error}


async def push_weights(
    mesh: Mesh,
    weight_version: str,
    pushes: AsyncIterable[WeightPush] | Iterable[WeightPush],
    model_path: str,
    timeout_s: float,
) -> Errors:
    """Push weights to engines; see Client.push_weights."""
    parts, push_id, errors, index = _iterate(pushes), request_id(), Errors(), 0
    part: WeightPush | None = None

    async def advance() -> None:
        nonlocal part
        part = await anext(parts, None)

    def call_of(part: WeightPush | None) -> Call:
        request = engine_pb2.PushWeightsRequest(
            request_id=f"{push_id}-{index}",
            weight_version=weight_version,
            push_id=push_id,
            part=index,
            last=part is None,
        )
        if part is not None:
            setattr(request, part.how, json.dumps(part.body).encode())
        return lambda stub: stub.PushWeights(request, timeout=timeout_s)

    async with aclosing(parts):
        await advance()
        if part is None:
            raise ValueError("pushes must have at least one WeightPush")
        weights = await set_weights(mesh, weight_version, "")
        current = scheduler_pb2.WEIGHTS_STATE_CURRENT
        due = {engine.engine_id for engine in weights.engines if engine.state != current}
        engines = {engine.engine_id: engine for engine in await list_engines(mesh, due)}
        left, pushing = dict(engines), True
        while left and pushing:
            pushing = part is not None
            call = call_of(part)
            calls = {engine_id: (engine.address, call) for engine_id, engine in left.items()}
            if part is not None and part.how == "distributed":
                errors |= await call_together(mesh, calls, advance())
            else:
                errors |= await call_together(mesh, calls)
                await advance()
            left = {
                engine_id: engine for engine_id, engine in left.items() if engine_id not in errors
            }
            index += 1
    if model_path:
        weights = await set_weights(mesh, weight_version, model_path)
    await until_served(mesh, weights, timeout_s, left)
    return errors


async def join_group(
    mesh: Mesh,
    master_address: str,
    trainer: Callable[[int], Awaitable[object]],
    group_name: str,
    backend: str,
    trainer_ranks: int,
    engine_ids: Collection[str] | None,
    timeout_s: float,
) -> Errors:
    """Join engines and trainer to a process group; see Client.join_weights_group."""
    engines = await list_engines(mesh, engine_ids)
    ranks = [max(1, engine.tensor_parallel) for engine in engines]
    world_size = trainer_ranks + sum(ranks)

    def call_of(offset: int) -> Call:
        request = engine_pb2.JoinWeightsGroupRequest(
            request_id=request_id(),
            group_name=group_name,
            master_address=master_address,
            rank_offset=offset,
            world_size=world_size,
            backend=backend,
        )
        return lambda stub: stub.JoinWeightsGroup(request, timeout=timeout_s)

    async def join() -> None:
        await trainer(world_size)

    offsets = accumulate(ranks, initial=trainer_ranks)
    calls = {
        engine.engine_id: (engine.address, call_of(offset))
        for engine, offset in zip(engines, offsets, strict=False)
    }
    return await call_together(mesh, calls, join())


async def _iterate(
    pushes: AsyncIterable[WeightPush] | Iterable[WeightPush],
) -> AsyncGenerator[WeightPush, None]:
    if isinstance(pushes, AsyncIterable):
        async for push in pushes:
            yield push
    else:
        for push in pushes:
            yield push


class FleetCalls:
    """Calls to all engines, of a client that is connected."""

    def _reach(self) -> Mesh:
        """Return the mesh. Raises RuntimeError before `async with`."""
        raise NotImplementedError

    async def update_weights(
        self, model_path: str, weight_version: str, timeout_s: float | None = None
    ) -> dict[str, str]:
        """Have all engines load weights; return once each of them serves the version or could not
        load it.

        model_path: a folder or file that each engine's machine can read. Engines that join later
        load it too. Returns the error of each engine that could not, by id; it gets no steps, and
        the scheduler requests the load again. Errors: TreadleError INVALID_ARGUMENT,
        DEADLINE_EXCEEDED (default timeouts.weights_s), after which the update still continues.
        """
        mesh = self._reach()
        desired = await set_weights(mesh, weight_version, model_path)
        return await until_served(mesh, desired, timeout_s or mesh.timeouts.weights_s)

    async def push_weights(
        self,
        weight_version: str,
        pushes: AsyncIterable[WeightPush] | Iterable[WeightPush],
        model_path: str = "",
        timeout_s: float | None = None,
    ) -> dict[str, str]:
        """Push weights to all registered engines that do not serve the version; return once they
        serve it.

        pushes: the parts. Each goes to all engines at once. A "distributed" part is broadcast by
        the trainer: `pushes` is advanced as soon as the part is on its way, so that an async
        generator broadcasts in the line after `yield`, without blocking the event loop. After a
        "tensor" or "ipc" part it is advanced once all engines have copied it. A part must be at
        most 16 MiB of JSON. model_path: from where engines that the push has missed, or that join
        later, load the same version; without it they get no step until it is pushed to them again.
        timeout_s: of each part (default timeouts.weights_s).

        Returns the error of each engine that has not taken the push, by id: it runs nothing until
        the version is pushed again or loaded. Where one engine fails in a "distributed" part, all
        have failed, and what `pushes` waits for is cancelled: a broadcast needs all ranks. Errors:
        ValueError; TreadleError INVALID_ARGUMENT, DEADLINE_EXCEEDED; what `pushes` raises.
        """
        mesh = self._reach()
        return await push_weights(
            mesh, weight_version, pushes, model_path, timeout_s or mesh.timeouts.weights_s
        )

    async def join_weights_group(
        self,
        master_address: str,
        trainer: Callable[[int], Awaitable[object]],
        *,
        group_name: str = "treadle",
        backend: str = "nccl",
        trainer_ranks: int = 1,
        engine_ids: Collection[str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, str]:
        """Join all engines, or those named, to a process group with the trainer, for "distributed"
        parts.

        master_address: host:port of the trainer's rank 0, which broadcasts. trainer: called with
        the world size; joins the trainer's ranks, 0 to trainer_ranks - 1, meanwhile, without
        blocking the event loop. The engines have the ranks after these, each as many as its tensor
        parallelism, in the order of their ids. They generate nothing until all ranks are there.
        Returns errors by engine id; where one engine fails, all have failed.
        """
        mesh = self._reach()
        return await join_group(
            *(mesh, master_address, trainer, group_name, backend, trainer_ranks, engine_ids),
            timeout_s or mesh.timeouts.weights_s,
        )

    async def leave_weights_group(
        self, group_name: str = "treadle", engine_ids: Collection[str] | None = None
    ) -> dict[str, str]:
        """Take all engines, or those named, out of a process group. Returns errors by engine id."""
        request = engine_pb2.LeaveWeightsGroupRequest(
            request_id=request_id(), group_name=group_name
        )
        return await self._call_engines("LeaveWeightsGroup", request, engine_ids)

    async def sleep(self, tags: Collection[str] = (), *, abort: bool = False) -> dict[str, str]:
        """Take the device memory of all engines for a trainer; their steps wait until `wake` has
        given all of it back.

        tags: of "weights", "kv_cache" and "cuda_graph"; none: all. abort: end running steps with
        the tokens they have. After "weights" an engine has no weights that may be used until they
        are pushed or loaded, unless SGLang runs with --enable-weights-cpu-backup. Returns errors by
        engine id, e.g. of an engine without --enable-memory-saver.
        """
        mode = engine_pb2.PAUSE_MODE_ABORT if abort else engine_pb2.PAUSE_MODE_KEEP
        return await self._call_engines(
            "Sleep", engine_pb2.SleepRequest(request_id=request_id(), mode=mode, tags=tags)
        )

    async def wake(self, tags: Collection[str] = ()) -> dict[str, str]:
        """Give memory back to all engines. tags: as of `sleep`; none: all. Returns errors by engine
        id."""
        return await self._call_engines(
            "Wake", engine_pb2.WakeRequest(request_id=request_id(), tags=tags)
        )

    async def pause(self, *, abort: bool = False) -> dict[str, str]:
        """Stop generation on all engines until `resume`. abort: end running steps with the tokens
        that they have, in place of keeping them. Returns errors by engine id."""
        mode = engine_pb2.PAUSE_MODE_ABORT if abort else engine_pb2.PAUSE_MODE_KEEP
        return await self._call_engines(
            "Pause", engine_pb2.PauseRequest(request_id=request_id(), mode=mode)
        )

    async def resume(self) -> dict[str, str]:
        """Resume generation on all engines after `pause`. Returns errors by engine id."""
        return await self._call_engines("Resume", engine_pb2.ResumeRequest(request_id=request_id()))

    async def _call_engines(
        self, name: str, request: Message, engine_ids: Collection[str] | None = None
    ) -> dict[str, str]:
        mesh = self._reach()
        return await call_all(
            mesh,
            await list_engines(mesh, engine_ids),
            lambda stub: getattr(stub, name)(request, timeout=mesh.timeouts.weights_s),
        )
