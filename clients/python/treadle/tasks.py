"""Structured concurrency for Python 3.10, which has no asyncio.TaskGroup.

Invariant: no task outlives the block or the call that started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """`async with Tasks() as tasks: tasks.start(...)`: leaving waits for all; a failure or a cancellation cancels the
    rest first.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Tasks:
        return self

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts work as a task of this block."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        return task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self._first_failure()
        finally:
            await self._cancel_all()
        if error is None:
            for task in self._tasks:
                if not task.cancelled() and (failure := task.exception()):
                    raise failure

    async def _first_failure(self) -> None:
        """Returns when all are done or one has failed. A task that was cancelled on purpose is not a failure."""
        pending = set(self._tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(not task.cancelled() and task.exception() for task in done):
                return

    async def _cancel_all(self) -> None:
        running = {task for task in self._tasks if not task.done()}
        for task in running:
            task.cancel()
        if running:
            await to_the_end(_all_done(running))


async def _all_done(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work` although the caller is cancelled meanwhile; the cancellation is passed on afterwards.

    For cleaning up only: `work` must be bounded in time by itself.
    """
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})  # unlike awaiting the task, this does not hand our cancellation on to it
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation says more
        raise cancelled
    return task.result()


async def outcome_of(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Runs foreign code to its end and gives the finished task, whatever it raised; a cancellation goes through to it
    first.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await to_the_end(_all_done({task}))
        if not task.cancelled():
            task.exception()
        raise
    return task
