"""Ctrl-C for an asyncio main: the first one unwinds, the second one hurries.

Purpose: SIGINT, SIGTERM and SIGHUP cancel the main coroutine once, so that its `async with` blocks stop what they
started; a second signal sets `hurry`, upon which a ProcessTree kills at once instead of waiting for a grace period.
Invariant: after the first signal the process ends by itself; no signal leaves it running or ends it before its
children.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

INTERRUPTED = 130  # exit code that a shell gives for SIGINT


def run_interruptible(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """Runs `main(hurry)` to its end and returns its exit code, or 130 when a signal ended it."""

    async def under_signals() -> int:
        loop = asyncio.get_running_loop()
        hurry = asyncio.Event()
        task = loop.create_task(main(hurry))
        interrupted = False

        def on_signal() -> None:
            nonlocal interrupted
            if interrupted:
                hurry.set()
                return
            interrupted = True
            task.cancel()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, on_signal)
        try:
            return await task
        except asyncio.CancelledError:
            if not interrupted:
                raise
            return INTERRUPTED
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    return asyncio.run(under_signals())
