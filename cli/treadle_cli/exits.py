"""How a command ends: what it raised as one line on stderr, and its exit code.

0 done, 1 something failed while it ran, 2 the user can put it right, 130 interrupted.

What stops a command for a reason that its user can put right.

Ctrl-C for an asyncio main: the first one unwinds, the second one hurries.

Purpose: SIGINT, SIGTERM and SIGHUP cancel the main coroutine once, so that its `async with` blocks stop what they
started; a second signal sets `hurry`, upon which a ProcessTree kills at once instead of waiting for a grace period.
Invariant: after the first signal the process ends by itself; no signal leaves it running or ends it before its
children."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import typer
from rich.console import Console
from treadle import TreadleError
from treadle_sim.workloads.public_traces import PublicTraceError
from treadle_sim.workloads.trace_file import TraceFileError

from treadle_cli.mesh.processes import ProcessError

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


class UsageProblem(Exception):  # noqa: N818 - it is the user's to solve, not a fault
    """Something is missing or was asked for wrongly. The message says what to do; the command prints it and ends with
    2.
    """


FAILED, USER_CAN_HELP = 1, 2
USERS = (UsageProblem, TraceFileError, PublicTraceError)  # of what the user asked for, or of the files that were named
KNOWN = (*USERS, ProcessError, TreadleError)  # the rest are faults of ours, with a traceback

err = Console(stderr=True, soft_wrap=True)


def run(begin: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> NoReturn:
    """Runs an async command under signals, and turns what it raises into a line and an exit code."""

    async def main(hurry: asyncio.Event) -> int:
        return await begin(hurry)

    try:
        code = run_interruptible(main)
    except (*KNOWN, BaseExceptionGroup) as raised:
        known = _known(raised)
        if known is None:
            raise
        end(known, USER_CAN_HELP if isinstance(known, USERS) else FAILED)
    raise typer.Exit(code)


def end(error: BaseException, code: int = USER_CAN_HELP) -> NoReturn:
    """Says what is wrong, and leaves."""
    err.print(f"treadle: {error}", style="red", highlight=False, markup=False)
    raise typer.Exit(code)


def _known(raised: BaseException) -> BaseException | None:
    """The error to show, of a group the first; None where the group holds one that is a fault of ours."""
    if not isinstance(raised, BaseExceptionGroup):
        return raised if isinstance(raised, KNOWN) else None
    known = [_known(error) for error in raised.exceptions]
    return None if None in known else known[0]
