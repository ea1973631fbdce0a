"""Bring a trainer's weights to all engines, from disk or pushed in parts, and lend a trainer the
engines' memory.

The scheduler holds which version is desired; parts go from the trainer to each engine's sidecar, so
weights never pass through the scheduler. A call to an engine is made once: a caller that tries
again begins the push anew, as a broadcast cannot be repeated for one engine alone.
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
