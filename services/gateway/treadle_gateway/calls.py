"""Run an order through the mesh, or straight on an engine while the mesh is away.

Invariants: the events of a call are one unbroken sequence of tokens and one end, also where the
mesh goes away meanwhile: the tokens stay, and an engine continues from there. A call that nobody
reads any more ends its step. Only one thing ends a call without its end: no engine has answered for
`give_up_s`.
"""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog
import treadle
from treadle.generation import CONTEXT_TOO_LONG
from treadle.trajectory import GONE
from treadle_runtime.http.sglang import EngineLost

from treadle_gateway.engines import MOST_FAILURES, Engines
from treadle_gateway.mesh import Event, MeshLink, NoWeights, Visit
from treadle_gateway.order import Ended, Finish, Order, Output, Refused, Tokens
from treadle_gateway.text import TextModel, is_whole

log = structlog.get_logger()

RETRY_S = 0.2  # between two attempts while no engine answers
FINISH_S = 6.0  # at the end of the process: an abort at an engine has 5 s
# Answers of requests that have several run as many at a time as the engines decode at once, and so
# many for each engine at most. More would only wait in its queue, before other callers.
AT_ONCE = 256

Turns = tuple[asyncio.Semaphore, asyncio.Semaphore]  # of one request, and of all
T = TypeVar("T")
W = TypeVar("W")


@dataclass(eq=False)
class _Running:
    """A call that runs. work: what generates for it at this moment. trajectory: whose step the call
    is at; None while it is at none, or while the mesh is away. stopped: it ends with the tokens
    that it has."""

    rid: str
    work: asyncio.Task[None] | None = None
    trajectory: treadle.Trajectory | None = None
    stopped: bool = False

    @property
    def engine_id(self) -> str:
        """Return the id of the call's engine; empty while it is on none."""
        return self.trajectory.engine_id if self.trajectory is not None else ""

    def stop(self) -> None:
        """End the call with the tokens that it has."""
        self.stopped = True
        if self.work is not None:
            self.work.cancel()


class Calls:
    """The calls that run. model: None where only token ids are served. give_up_s: how long engines
    that do not answer are tried. count: called with the way that a call takes, "mesh" or
    "straight"; with both for one that changes."""

    def __init__(
        self,
        mesh: MeshLink,
        engines: Engines,
        model: TextModel | None,
        give_up_s: float,
        count: Callable[[str], None],
    ) -> None:
        self._mesh, self._engines, self._model = mesh, engines, model
        self._give_up_s, self._count = give_up_s, count
        self._running: set[_Running] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._slots, self._of_several = 0, asyncio.Semaphore()

    @property
    def running(self) -> int:
        """Return how many calls have begun and not ended."""
        return len(self._running)

    def running_on(self, engine_id: str) -> int:
        """Return how many calls are on an engine."""
        return sum(call.engine_id == engine_id for call in self._running)

    def abort(self, rid: str = "", engine_id: str = "") -> int:
        """End the calls whose rid begins with `rid`, all where it is empty, with the tokens that
        they have. engine_id: only those on this engine or on none yet, which a router would have
        sent to some engine. Return how many."""
        found = [
            call
            for call in self._running
            if call.rid.startswith(rid) and (not engine_id or call.engine_id in ("", engine_id))
        ]
        for call in found:
            call.stop()
        return len(found)

    async def run_all(
        self, wanted: Sequence[W], run: Callable[[W, Turns | None], Coroutine[Any, Any, T]]
    ) -> list[T]:
        """Return the results of `run` for all answers that a request wants, in their order. Only
        some of them run at a time, if `run` passes its turns on to `self.run`."""
        turns = self._turns(len(wanted))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(each, turns)) for each in wanted]
        return [task.result() for task in tasks]

    async def stream_all(
        self, orders: Sequence[Order]
    ) -> AsyncGenerator[tuple[int, Tokens | Ended], None]:
        """Yield the events of all orders of a request as they come, with the place of each. Only
        some of them run at a time. Raises Refused."""
        turns = self._turns(len(orders))
        async with aclosing(_merge([self.run(order, turns) for order in orders])) as events:
            async for event in events:
                yield event

    def _turns(self, answers: int) -> Turns | None:
        """Return the turns of a request's answers; None for a single one, which waits for none."""
        if answers == 1:
            return None
        known = self._mesh.engines.values()
        slots = sum(min(AT_ONCE, engine.slots or AT_ONCE) for engine in known) or AT_ONCE
        if slots > self._slots:
            self._slots, self._of_several = slots, asyncio.Semaphore(slots)
        return asyncio.Semaphore(slots), self._of_several

    async def run(
        self, order: Order, turns: Turns | None = None
    ) -> AsyncGenerator[Tokens | Ended, None]:
        """Yield tokens as they come, then the end. turns: all of them are awaited first. Raises
        Refused."""
        output, call = Output(), _Running(order.rid)
        self._running.add(call)
        try:
            async with AsyncExitStack() as stack:
                for turn in turns or ():
                    await stack.enter_async_context(turn)
                async with aclosing(self._run(order, output, call)) as events:
                    async for event in events:
                        yield event
        finally:
            self._running.discard(call)

    async def _run(
        self, order: Order, output: Output, call: _Running
    ) -> AsyncGenerator[Tokens | Ended, None]:
        await self._mesh.looked.wait()
        visit = self._mesh.visit
        if visit is not None:
            self._count("mesh")
            async with aclosing(self._through_mesh(visit, order, call)) as events:
                async for event in events:
                    output.add(event)
                    yield event
            if output.ended is not None:
                return
        self._count("straight")
        async with aclosing(self._straight(order, output, call)) as events:
            async for event in events:
                yield event

    async def finish(self) -> None:
        """End the calls that still run, and wait for those that are being ended."""
        for call in tuple(self._running):
            call.stop()
        if self._ending:
            await asyncio.wait(self._ending, timeout=FINISH_S)

    async def _through_mesh(
        self, visit: Visit, order: Order, call: _Running
    ) -> AsyncGenerator[Tokens | Ended, None]:
        """Yield the events of a call; they stop without an end where the mesh cannot continue.
        Raises Refused."""
        queue, heard_s = visit.listen(), -math.inf
        work = self._start(call, _pump(visit, order, queue.put_nowait, call), queue.put_nowait)
        try:
            while True:
                event = await queue.get()
                if isinstance(event, str):
                    return
                if isinstance(event, NoWeights):
                    if heard_s < event.since_s:
                        raise Refused(event.reason, 503)
                    continue
                heard_s = time.monotonic()
                if isinstance(event, treadle.TreadleError):
                    if event.refused and event.reason not in GONE:
                        raise _refusal(event, order)
                    log.warning(
                        "the mesh could not run a step: an engine is asked", error=str(event)
                    )
                    return
                if isinstance(event, BaseException):
                    log.error("a step has failed: an engine is asked", exc_info=event)
                    return
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            call.trajectory = None
            visit.leave(queue)
            work.cancel()

    async def _straight(
        self, order: Order, output: Output, call: _Running
    ) -> AsyncGenerator[Tokens | Ended, None]:
        """Yield the events that come after `output`, from an engine. Raises Refused."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        work = self._start(
            call, self._ask_engines(order, output, queue.put_nowait), queue.put_nowait
        )
        try:
            while not isinstance(event := await queue.get(), str | NoWeights):
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            work.cancel()

    def _start(
        self, call: _Running, work: Coroutine[Any, Any, None], put: Callable[[Event], None]
    ) -> "asyncio.Task[None]":
        """Start the task that generates for a call. `put` gets an end where it is cancelled, and
        the error where it fails."""

        def end(ended: "asyncio.Task[None]") -> None:
            if ended.cancelled():
                put(
                    Ended(
                        "abort",
                        trajectory.trajectory_id
                        if (trajectory := call.trajectory) is not None
                        else "",
                    )
                )
            elif (error := ended.exception()) is not None:
                put(error)

        call.work = task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.add_done_callback(end)
        if call.stopped:
            task.cancel()
        return task

    async def _ask_engines(
        self, order: Order, output: Output, put: Callable[[Event], None]
    ) -> None:
        """Continue from `output` on the session's engine, and on another one where that fails.
        Raises Refused."""
        sampling, rid, silent_since = order.sampling, order.rid, time.monotonic()
        failures = 0
        while True:
            before = len(output.token_ids)
            left = sampling.max_new_tokens - before
            if left <= 0 or is_whole(self._model, output.token_ids, sampling):
                put(Ended("length" if left <= 0 else "stop"))
                return
            rest = Order(
                order.session,
                order.prompt + output.token_ids,
                replace(sampling, max_new_tokens=left),
                rid,
                order.prompt_field,
            )
            try:
                async with aclosing(self._engines.generate(rest)) as events:
                    async for event in events:
                        silent_since, failures = time.monotonic(), 0
                        output.add(event)
                        put(event)
                        if isinstance(event, Ended):
                            return
                        # An engine does not see a stop string that began in the tokens before its
                        # own.
                        if (
                            before
                            and sampling.stop
                            and is_whole(self._model, output.token_ids, sampling)
                        ):
                            put(Ended("stop"))
                            return
            except EngineLost as error:
                failures += error.loss == "failed"
                if failures >= MOST_FAILURES:
                    raise Refused(f"engines fail at this request: {error}", 503) from error
                if time.monotonic() - silent_since > self._give_up_s:
                    raise Refused(
                        f"neither the mesh nor an engine answers: {error}", 503
                    ) from error
                # the engine may still run the request whose stream broke
                rid = f"{uuid.uuid4().hex}_{order.rid}"
                await asyncio.sleep(RETRY_S)


def _refusal(error: treadle.TreadleError, order: Order) -> Refused:
    """Return a refusal of the mesh with the caller's name for the prompt."""
    found = [(each.field, each.description) for each in error.field_violations]
    if error.reason == CONTEXT_TOO_LONG:
        said = f"{error.message}: longer than the maximum context length; shorten the prompt"
        return Refused(f"{order.prompt_field}: {said}", code="context_length_exceeded")
    if not found:
        return Refused(str(error))
    return Refused(
        "; ".join(
            f"{order.prompt_field if name.startswith('prompt') else name}: {description}"
            for name, description in found
        )
    )


async def _pump(visit: Visit, order: Order, put: Callable[[Event], None], call: _Running) -> None:
    """Generate a turn of the order's trajectory into a queue. Cancelling it ends the step with what
    it has."""

    def take(trajectory: treadle.Trajectory) -> None:
        call.trajectory = trajectory

    def put_tokens(chunk: treadle.Chunk) -> None:
        put(Tokens(chunk.token_ids, chunk.logprobs, chunk.weight_version))

    try:
        trajectory = await visit.sessions.generate(
            order.session, order.prompt, order.sampling, on_take=take, on_chunk=put_tokens
        )
    except treadle.TreadleError as error:
        put(error)
        return
    step = trajectory.steps[-1]
    finish: Finish = "abort" if step.finish_reason == "aborted" else step.finish_reason
    put(Ended(finish, trajectory.trajectory_id, step.cached_tokens))


async def _merge(
    streams: Sequence[AsyncGenerator[Tokens | Ended, None]],
) -> AsyncGenerator[tuple[int, Tokens | Ended], None]:
    """Yield what several generators yield, as it comes, with the place of each. Raises what one of
    them raises."""
    queue: asyncio.Queue[tuple[int, Tokens | Ended] | asyncio.Task[None]] = asyncio.Queue()

    async def read(at: int, stream: AsyncGenerator[Tokens | Ended, None]) -> None:
        async with aclosing(stream) as events:
            async for event in events:
                queue.put_nowait((at, event))

    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for event in only:
                yield 0, event
        return
    tasks = [
        asyncio.get_running_loop().create_task(read(at, stream))
        for at, stream in enumerate(streams)
    ]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    left = len(tasks)
    try:
        while left:
            came = await queue.get()
            if isinstance(came, asyncio.Task):
                await came
                left -= 1
            else:
                yield came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
