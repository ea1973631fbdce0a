"""Use the client without asyncio: each call blocks until it is done. It works where an event loop
runs already, as in a notebook.

    with treadle.sync.Client("localhost:7401") as client:
        result = client.rollout(prompts, agent, progress=True)

Each Client has an event loop in a thread of its own; its methods, trajectories, sessions and
pending rewards are those of treadle.Client and take the same arguments. Functions that
treadle.Client awaits may be plain functions here: they run in threads. Invariants: a call that
Ctrl-C interrupts is cancelled, and raises KeyboardInterrupt once what it had open is closed (a
second Ctrl-C does not wait); after `close` there is no loop and no thread left.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import threading
import weakref
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import treadle
from treadle.rewards import PendingReward as AsyncPendingReward
from treadle.rewards import RewardResult
from treadle.rollouts.declare import DeclaredAgent
from treadle.trajectory import Session as AsyncSession
from treadle.trajectory import Trajectory as AsyncTrajectory
from treadle.types import (
    Chunk,
    Limits,
    Prompt,
    RolloutResult,
    RunningTokens,
    Sampling,
    ToolResult,
    TrajectoryEnded,
)

T = TypeVar("T")
P = ParamSpec("P")
MOST_AGENT_THREADS = 256  # for agents that are plain functions, which wait most of the time
_END = object()


class EventLoop:
    """An event loop in a thread. Used from any other thread."""

    def __init__(self) -> None:
        self._running: concurrent.futures.Future[asyncio.AbstractEventLoop] = (
            concurrent.futures.Future()
        )
        self._over = asyncio.Event()
        self.is_closed = False
        # held where work is begun, so that none is begun in a loop that ends
        self._closing = threading.RLock()
        # A daemon: a process whose user has not closed the client must still be able to end.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="treadle", daemon=True
        )
        self._thread.start()
        self._loop = self._running.result()

    def run(
        self,
        work: Coroutine[Any, Any, T],
        note: Callable[[asyncio.Task[Any]], None] = lambda _: None,
    ) -> T:
        """Run a coroutine to its end, and return or raise what it does. note: is called with the
        task. Raises RuntimeError in the loop's own thread, which would wait for itself, and once
        the loop is closed."""
        if self.is_current:
            work.close()
            raise RuntimeError(
                "this call blocks the event loop that it waits for: use the asynchronous client "
                "here"
            )
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            task.add_done_callback(lambda done: _copy(done, outcome))
            tasks.append(task)
            note(task)

        with self._closing:
            if self.is_closed:
                work.close()
                raise RuntimeError("the client is closed")
            self._loop.call_soon_threadsafe(begin)
        try:
            return outcome.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(
                "the call was cancelled, with its client or with its trajectory"
            ) from None
        except BaseException:
            if not outcome.done():  # Ctrl-C, or another exception that was thrown into this thread
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                concurrent.futures.wait([outcome])
            raise

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs in the loop's own thread."""
        return threading.current_thread() is self._thread

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Run `last`, cancel all other tasks, and end the thread. In the loop's own thread, that
        happens soon afterwards. Does nothing once closed."""
        if self.is_current:
            # kept in a name, as a loop does not keep its tasks
            self._ending = self._loop.create_task(self._end(last))
        elif not self.is_closed:
            try:
                if last is not None:
                    self.run(last)
            finally:
                self._stop()
                self._thread.join()

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        try:
            if last is not None:
                await last
        finally:
            self._stop()

    def _stop(self) -> None:
        with self._closing:
            if not self.is_closed:
                self.is_closed = True
                self._loop.call_soon_threadsafe(self._over.set)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        # Plain functions of agents wait there; asyncio's own has 6 threads on a machine of two
        # cores.
        loop.set_default_executor(
            concurrent.futures.ThreadPoolExecutor(MOST_AGENT_THREADS, "treadle-work")
        )
        self._running.set_result(loop)
        await self._over.wait()


class _AgentCalls:
    """Calls in the loop by the thread of one agent: they are cancelled where the agent is."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop, self._cancelled = loop, False
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine as EventLoop.run does. Raises RuntimeError once cancelled."""
        return self._loop.run(work, self._note)

    @property
    def is_closed(self) -> bool:
        """Return whether the loop is closed."""
        return self._loop.is_closed

    def cancel(self) -> None:
        """Cancel the agent's calls. Called in the loop's thread."""
        self._cancelled = True
        for task in self._tasks:
            task.cancel()

    def _note(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._cancelled:
            task.cancel()


_Calls = EventLoop | _AgentCalls


class PendingReward:
    """A reward that was accepted, with blocking calls; see treadle.PendingReward."""

    def __init__(self, loop: _Calls, pending: AsyncPendingReward) -> None:
        self._loop, self.asynchronous, self.reward_id = loop, pending, pending.reward_id

    def result(self, timeout_s: float | None = None) -> RewardResult:
        return self._loop.run(self.asynchronous.result(timeout_s))

    def cancel(self) -> None:
        self._loop.run(self.asynchronous.cancel())


class Session:
    """A running environment, with blocking calls; see treadle.Session."""

    def __init__(self, loop: _Calls, session: AsyncSession) -> None:
        self._loop, self._session = loop, session
        self.session_id, self.first = session.session_id, session.first

    def step(self, arguments: Mapping[str, Any]) -> ToolResult:
        return self._loop.run(self._session.step(arguments))

    def close(self) -> None:
        self._loop.run(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Trajectory:
    """An open trajectory, with blocking calls; see treadle.Trajectory, whose attributes (`tokens`,
    `loss_mask`, `steps`, ...) it has too."""

    def __init__(self, loop: _Calls, trajectory: AsyncTrajectory) -> None:
        self._loop, self.asynchronous = loop, trajectory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.asynchronous, name)

    def generate(self, sampling: Sampling) -> Iterator[Chunk]:
        return _iterate(self._loop, self.asynchronous.generate(sampling))

    def observe(self, token_ids: Sequence[int]) -> None:
        async def call() -> None:
            self.asynchronous.observe(token_ids)

        self._loop.run(call())

    def tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return self._loop.run(self.asynchronous.tool(name, arguments))

    def open_session(
        self, name: str, arguments: Mapping[str, Any], limits: Limits | None = None
    ) -> Session:
        return Session(
            self._loop, self._loop.run(self.asynchronous.open_session(name, arguments, limits))
        )

    def time_tool(self, work: Callable[[], T]) -> T:
        """Run a tool outside the mesh, and record its time as tool time."""

        async def call() -> T:
            return await self.asynchronous.time_tool(lambda: asyncio.to_thread(work))

        return self._loop.run(call())

    def score(self, reward: str, arguments: Mapping[str, Any]) -> PendingReward:
        return PendingReward(self._loop, self._loop.run(self.asynchronous.score(reward, arguments)))

    def close(
        self, reward: float | None = None, outcome: treadle.types.Outcome = "finished"
    ) -> None:
        self._loop.run(self.asynchronous.close(reward, outcome))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._loop.run(self.asynchronous.__aexit__(kind, error, trace))


Agent = Callable[[Trajectory, Prompt], float | PendingReward | None]


def _blocking(
    method: Callable[Concatenate[treadle.Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return the method of treadle.Client as one that blocks."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.loop.run(method(self.asynchronous, *args, **kwargs))

    return call


class Client:
    """A client of the mesh; arguments and methods are those of treadle.Client. Close it, or use it
    as a context manager.

    asynchronous: the treadle.Client in its loop, e.g. for an EnvManager, whose `rollout` this
    client runs: `client.run(manager.rollout())`.
    """

    def __init__(self, address: str, **arguments: Any) -> None:
        self.asynchronous = treadle.Client(address, **arguments)
        self.loop = EventLoop()
        try:
            self.loop.run(self.asynchronous.__aenter__())
        except BaseException:
            self.loop.close()
            raise
        # at exit at the latest
        self._close = weakref.finalize(self, _close_client, self.loop, self.asynchronous)

    update_weights = _blocking(treadle.Client.update_weights)
    leave_weights_group = _blocking(treadle.Client.leave_weights_group)
    sleep = _blocking(treadle.Client.sleep)
    wake = _blocking(treadle.Client.wake)
    pause = _blocking(treadle.Client.pause)
    resume = _blocking(treadle.Client.resume)
    get_batch = _blocking(treadle.Client.get_batch)
    confirm_batch = _blocking(treadle.Client.confirm_batch)
    shaping_report = _blocking(treadle.Client.shaping_report)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the client's loop, to its end."""
        return self.loop.run(work)

    def open(self, **arguments: Any) -> Trajectory:
        """Open a trajectory; see treadle.Client.open. on_change is called from the client's
        thread."""
        return Trajectory(self.loop, self.loop.run(self.asynchronous.open(**arguments)))

    def rollout(self, prompts: Iterable[Prompt], agent: Any, **arguments: Any) -> RolloutResult:
        """Run an agent on all prompts; see treadle.Client.rollout. agent: `def agent(trajectory,
        prompt)`, which runs in a thread; so that at most MOST_AGENT_THREADS trajectories are open
        at once, or `concurrency`. Or an agent of treadle.Client: an `async` function, a declared
        agent, an EnvManager. on_event is called from the client's thread."""
        if _is_asynchronous(agent):
            return self.loop.run(self.asynchronous.rollout(list(prompts), agent, **arguments))
        threads = arguments.get("concurrency") or MOST_AGENT_THREADS
        with concurrent.futures.ThreadPoolExecutor(
            threads, thread_name_prefix="treadle-agent"
        ) as pool:

            async def play(
                trajectory: AsyncTrajectory, prompt: Prompt
            ) -> float | AsyncPendingReward | None:
                loop, calls = asyncio.get_running_loop(), _AgentCalls(self.loop)
                try:
                    reward = await loop.run_in_executor(
                        pool, agent, Trajectory(calls, trajectory), prompt
                    )
                except asyncio.CancelledError:
                    calls.cancel()
                    raise
                return reward.asynchronous if isinstance(reward, PendingReward) else reward

            arguments["concurrency"] = threads
            return self.loop.run(self.asynchronous.rollout(list(prompts), play, **arguments))

    def score(
        self, trajectory_id: str, reward: str, arguments: Mapping[str, Any], job: str = ""
    ) -> PendingReward:
        """Request a reward; see treadle.Client.score."""
        return PendingReward(
            self.loop, self.loop.run(self.asynchronous.score(trajectory_id, reward, arguments, job))
        )

    def push_weights(
        self,
        weight_version: str,
        pushes: AsyncIterable[treadle.WeightPush] | Iterable[treadle.WeightPush],
        model_path: str = "",
        timeout_s: float | None = None,
    ) -> dict[str, str]:
        """Push weights to all engines; see treadle.Client.push_weights. A plain generator is
        advanced in a thread, so that it may broadcast in the line after `yield`."""
        parts = pushes if isinstance(pushes, AsyncIterable) else _advance_in_thread(pushes)
        return self.loop.run(
            self.asynchronous.push_weights(weight_version, parts, model_path, timeout_s)
        )

    def join_weights_group(
        self, master_address: str, trainer: Callable[[int], object], **arguments: Any
    ) -> dict[str, str]:
        """Join all engines to a process group; see treadle.Client.join_weights_group. trainer: a
        plain function, which runs in a thread; or an `async` one."""

        async def join(world_size: int) -> object:
            made = await asyncio.to_thread(trainer, world_size)
            return await made if inspect.isawaitable(made) else made

        return self.loop.run(
            self.asynchronous.join_weights_group(master_address, join, **arguments)
        )

    def stream_tokens(self, *args: Any, **kwargs: Any) -> Iterator[RunningTokens | TrajectoryEnded]:
        """Yield tokens of running trajectories; see treadle.Client.stream_tokens."""
        return _iterate(self.loop, self.asynchronous.stream_tokens(*args, **kwargs))

    def close(self) -> None:
        """Close what is open, and end the loop and its thread. Does nothing once closed."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_client(loop: EventLoop, client: treadle.Client) -> None:
    loop.close(client.__aexit__(None, None, None))


def _is_asynchronous(agent: Any) -> bool:
    call = getattr(agent, "__call__", None)  # noqa: B004 - to see whether it is `async`
    return (
        isinstance(agent, DeclaredAgent)
        or inspect.iscoroutinefunction(agent)
        or inspect.iscoroutinefunction(call)
    )


async def _advance_in_thread(items: Iterable[T]) -> AsyncIterator[T]:
    iterator = iter(items)
    while (item := await asyncio.to_thread(next, iterator, _END)) is not _END:
        yield item  # type: ignore[misc]


def _iterate(loop: _Calls, items: AsyncIterator[T]) -> Iterator[T]:
    """Yield each item once it is there. Leaving the iteration ends it in the loop too."""
    try:
        while (item := loop.run(_next_of(items))) is not _END:
            yield item
    finally:
        if not loop.is_closed:
            loop.run(_close(items))


async def _next_of(items: AsyncIterator[T]) -> Any:
    return await anext(items, _END)


async def _close(items: AsyncIterator[Any]) -> None:
    if (close := getattr(items, "aclose", None)) is not None:
        await close()


def _copy(done: asyncio.Task[T], outcome: concurrent.futures.Future[T]) -> None:
    """Give the result of a task to the thread that waits for it."""
    if done.cancelled():
        outcome.cancel()
        outcome.set_running_or_notify_cancel()
    elif (error := done.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(done.result())
