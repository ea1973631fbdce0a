"""How a command ends: what it raised as one line on stderr, and its exit code.

0 done, 1 something failed while it ran, 2 the user can put it right, 130 interrupted.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import typer
from rich.console import Console
from treadle import TreadleError
from treadle_sim.workloads.public_traces import PublicTraceError
from treadle_sim.workloads.trace_file import TraceFileError

from treadle_cli.interrupts import run_interruptible
from treadle_cli.problems import UsageProblem
from treadle_cli.processes import ProcessError

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
