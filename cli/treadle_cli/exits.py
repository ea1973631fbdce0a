"""Run a command: turn signals into cancellation, and errors into one line on stderr and an exit code.

Exit codes: 0 done, 1 something failed while it ran, 2 the user can correct it, 130 interrupted.

The first SIGINT, SIGTERM or SIGHUP cancels the main coroutine, so that its `async with` blocks stop what they started;
a second signal sets `hurry`, and a ProcessTree then kills its children without a grace period. After the first signal
the process ends by itself: no signal ends it before its children.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import typer
from rich.console import Console
from treadle import TreadleError
from treadle_sim.workloads.public_traces import PublicTraceError
from treadle_sim.workloads.workload import TraceFileError

from treadle_cli.mesh.processes import ProcessError
from treadle_cli.problems import UsageProblem

INTERRUPTED = 130  # exit code that a shell gives for SIGINT


def run_interruptible(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """Run `main(hurry)` to its end and return its exit code, or 130 if a signal ended it."""

    async def run_main() -> int:
        interrupted, hurry = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            if interrupted.is_set():
                hurry.set()
            else:
                interrupted.set()
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)  # until the loop closes
        task = asyncio.get_running_loop().create_task(main(hurry))
        try:
            return await task
        except asyncio.CancelledError:
            if not interrupted.is_set():
                raise
            return INTERRUPTED

    return asyncio.run(run_main())


FAILED, USER_CAN_HELP = 1, 2
USERS = (UsageProblem, TraceFileError, PublicTraceError)  # the user can correct these
KNOWN = (*USERS, ProcessError, TreadleError)  # any other error is a bug of ours and shows its traceback

err = Console(stderr=True, soft_wrap=True)


def run(begin: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> NoReturn:
    """Run an async command under signal handling; end the process with its exit code."""
    try:
        code = run_interruptible(begin)
    except (*KNOWN, BaseExceptionGroup) as raised:
        known = _known(raised)
        if known is None:
            raise
        end(known, USER_CAN_HELP if isinstance(known, USERS) else FAILED)
    raise typer.Exit(code)


def end(error: BaseException, code: int = USER_CAN_HELP) -> NoReturn:
    """Print the error and end the command."""
    err.print(f"treadle: {error}", style="red", highlight=False, markup=False)
    raise typer.Exit(code)


def _known(raised: BaseException) -> BaseException | None:
    """The error to show (the first of a group), or None if any of them is a bug of ours."""
    if not isinstance(raised, BaseExceptionGroup):
        return raised if isinstance(raised, KNOWN) else None
    known = [_known(error) for error in raised.exceptions]
    return None if None in known else known[0]
