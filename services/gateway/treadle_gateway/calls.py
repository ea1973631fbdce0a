"""Run an order: through the mesh, or straight on an engine while the mesh is away.

Invariants: the events of a call are one unbroken sequence of tokens and one end, also where the mesh goes away in its
midst: what has come stays, and an engine goes on from there. A call that nobody reads any more ends its step. Only one
thing ends a call without its end: no engine has answered for `give_up_s`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import structlog
import treadle

from treadle_gateway.engines import EngineAway, Engines
from treadle_gateway.mesh import AWAY, Event, MeshLink, Visit
from treadle_gateway.order import Ended, Finish, Order, Output, Refused, Tokens

log = structlog.get_logger()

CLOSED = "TRAJECTORY_CLOSED"  # ErrorInfo.reason: the scheduler has closed it, e.g. after a lease that had run out
RETRY_S = 0.2  # between two attempts at engines none of which answers


@dataclass(frozen=True, eq=False)
class _Running:
    """A call that runs. stop: ends it. engine: the id of the engine that it is on; empty while it is on none, or while
    the mesh is away."""

    rid: str
    stop: Callable[[], object]
    engine: Callable[[], str] = str


class Calls:
    """The calls that run. give_up_s: how long engines that do not answer are tried. count: called with the way that a
    call takes, "mesh" or "straight"; with both for one that changes."""

    def __init__(self, mesh: MeshLink, engines: Engines, give_up_s: float, count: Callable[[str], None]) -> None:
        self._mesh, self._engines, self._give_up_s, self._count = mesh, engines, give_up_s, count
        self._running: set[_Running] = set()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Calls that have begun and not ended."""
        return len(self._running)

    def running_on(self, engine_id: str) -> int:
        """Calls that are on an engine."""
        return sum(call.engine() == engine_id for call in self._running)

    def abort(self, rid: str = "", engine_id: str = "") -> int:
        """End the calls whose rid begins so, all where it is empty, with the tokens that they have. engine_id: only
        those on this engine or on none yet, which a router would have sent to some engine."""
        found = [
            call
            for call in self._running
            if call.rid.startswith(rid) and (not engine_id or call.engine() in ("", engine_id))
        ]
        for call in found:
            call.stop()
        return len(found)

    async def run(self, order: Order) -> AsyncGenerator[Tokens | Ended, None]:
        """Tokens as they come, then the end. Raises Refused."""
        output = Output()
        await self._mesh.looked.wait()
        visit = self._mesh.visit
        if visit is not None:
            self._count("mesh")
            async with aclosing(self._through_mesh(visit, order)) as events:
                async for event in events:
                    output.add(event)
                    yield event
            if output.ended is not None:
                return
        self._count("straight")
        async with aclosing(self._straight(order, output)) as events:
            async for event in events:
                yield event

    async def finish(self) -> None:
        """Wait for steps that are being ended."""
        while self._ending:
            await asyncio.wait(self._ending)

    async def _through_mesh(self, visit: Visit, order: Order) -> AsyncGenerator[Tokens | Ended, None]:
        """The events; they stop without an end where the mesh cannot go on. Raises Refused."""
        queue = visit.listen()
        taken: list[treadle.Trajectory] = []

        def end(ended: asyncio.Task[None]) -> None:
            if ended.cancelled():
                queue.put_nowait(Ended("abort", taken[-1].trajectory_id if taken else ""))
            elif ended.exception() is not None:
                log.error("a step has failed: an engine is asked", exc_info=ended.exception())
                queue.put_nowait(AWAY)

        pump = asyncio.get_running_loop().create_task(_pump(visit, order, queue.put_nowait, taken))
        self._ending.add(pump)
        pump.add_done_callback(self._ending.discard)
        pump.add_done_callback(end)
        running = _Running(order.rid, pump.cancel, lambda: taken[-1].engine_id if taken else "")
        self._running.add(running)
        try:
            while True:
                event = await queue.get()
                if isinstance(event, str):
                    return
                if isinstance(event, treadle.TreadleError):
                    if event.refused and event.reason != CLOSED:
                        raise Refused(str(event))
                    log.warning("the mesh could not run a step: an engine is asked", error=str(event))
                    return
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            self._running.discard(running)
            visit.leave(queue)
            pump.cancel()

    async def _straight(self, order: Order, output: Output) -> AsyncGenerator[Tokens | Ended, None]:
        """Go on from `output` on the engine of the session; on another one where that fails."""
        stopped = asyncio.Event()
        running = _Running(order.rid, stopped.set)
        self._running.add(running)
        silent_since = time.monotonic()
        try:
            while not stopped.is_set():
                sampling = order.sampling
                left = sampling.max_new_tokens - len(output.token_ids)
                if left <= 0:
                    yield Ended("length")
                    return
                rest = replace(
                    order, prompt=order.prompt + output.token_ids, sampling=replace(sampling, max_new_tokens=left)
                )
                try:
                    async with aclosing(self._engines.generate(rest)) as events:
                        async for event in events:
                            silent_since = time.monotonic()
                            output.add(event)
                            yield event
                            if isinstance(event, Ended):
                                return
                            if stopped.is_set():
                                break
                except EngineAway as error:
                    if time.monotonic() - silent_since > self._give_up_s:
                        raise Refused(f"neither the mesh nor an engine answers: {error}", 503) from error
                    await asyncio.sleep(RETRY_S)
            yield Ended("abort")
        finally:
            self._running.discard(running)


async def _pump(visit: Visit, order: Order, put: Callable[[Event], None], taken: list[treadle.Trajectory]) -> None:
    """Generate a turn of the order's trajectory into a queue. Cancelling it ends the step with what it has. taken: gets
    the trajectory."""

    def put_tokens(chunk: treadle.Chunk) -> None:
        put(Tokens(chunk.token_ids, chunk.logprobs, chunk.weight_version))

    try:
        trajectory = await visit.sessions.generate(
            order.session, order.prompt, order.sampling, on_take=taken.append, on_chunk=put_tokens
        )
    except treadle.TreadleError as error:
        put(error)
        return
    step = trajectory.steps[-1]
    finish: Finish = "abort" if step.finish_reason == "aborted" else step.finish_reason
    put(Ended(finish, trajectory.trajectory_id, step.cached_tokens))
