"""Run work that goes on after the call that began it has ended, such as a step that must not be half done.

Owns: one TaskGroup, from `run` (a background task of the service) until the drain.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from treadle_runtime.calls import detached_context

R = TypeVar("R")


class Background:
    """Runs work in one task group: `spawn` and forget, or `finish` whether or not the caller still waits."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Hold the group open until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            await asyncio.Event().wait()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that nobody waits for; it must not raise."""
        if self._group is None:
            raise RuntimeError("spawned before run")
        self._group.create_task(work, context=detached_context())

    async def finish(self, call: Callable[[], Awaitable[R]]) -> R:
        """The result of `call`, which runs to its end even where the caller is cancelled."""
        outcome: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

        async def work() -> None:
            try:
                result = await call()
            except asyncio.CancelledError:
                outcome.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - it is the caller's, who raises it
                if not outcome.done():
                    outcome.set_exception(error)
            else:
                if not outcome.done():
                    outcome.set_result(result)

        self.spawn(work())
        return await asyncio.shield(outcome)
