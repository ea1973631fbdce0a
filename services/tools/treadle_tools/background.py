"""Run work that goes on after the call that began it has ended, such as a step that must not be
half done.

This module owns one TaskGroup, from `run` (a background task of the service) until the drain.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from treadle_runtime.calls import detached_context

R = TypeVar("R")


class Background:
    """Runs work in one task group: `spawn` and forget, or `finish` whether or not the caller still
    waits."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Hold the group open until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            await asyncio.Event().wait()

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Start work that nobody need wait for; the work must not raise."""
        if self._group is None:
            raise RuntimeError("spawned before run")
        return self._group.create_task(work, context=detached_context())

    async def finish(self, call: Callable[[], Awaitable[R]]) -> R:
        """Return the result of `call`, which runs to its end even where the caller is cancelled."""

        async def work() -> R | Exception:
            try:
                return await call()
            except Exception as error:  # noqa: BLE001 - it is the caller's, who raises it
                return error

        ended = await asyncio.shield(self.spawn(work()))
        if isinstance(ended, Exception):
            raise ended
        return ended
