"""Run a command: turn signals into cancellation, errors into one line on stderr and an exit code,
and texts that somebody else wrote into letters on a terminal.

Exit codes: 0 done, 1 something failed while it ran, 2 the user can correct it, 130 interrupted.

The first SIGINT, SIGTERM or SIGHUP cancels the main coroutine, so that its `async with` blocks stop
what they started; a second signal sets `hurry`, and a ProcessTree then kills its children without a
grace period. After the first signal the process ends by itself: no signal ends it before its
children.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

INTERRUPTED = 130  # exit code that a shell gives for SIGINT
FAILED, USER_CAN_HELP = 1, 2

MOST_CHARS = 4_096  # of a text on one line


def printable(text: str) -> str:
    """Return the text on one line, cut, and without codes that would change a terminal or the order
    of its letters: names and texts of servers, prompts and files may contain some."""
    shown = "".join(char if char.isprintable() else " " for char in text[:MOST_CHARS]).strip()
    return f"{shown}…" if len(text) > MOST_CHARS else shown


def cell(text: object) -> Text:
    """Return what somebody else named as a cell of a table, where a str would be read as markup."""
    return Text(printable(str(text)))


class Terminal(Console):
    """Console of rich on which every text is printed as it is: without markup or emoji codes, and
    without the codes that would change the terminal, whoever wrote it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **settings})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object; what is no letter becomes as many spaces as it is wide."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if not (control or text == "\n" or text.isprintable()):
                text = "".join(map(_without_codes, text))
            yield Segment(text, style, control)

    def status(self, status: RenderableType, **settings: Any) -> Status:
        """Show what is being done, beside a spinner."""
        return super().status(cell(status) if isinstance(status, str) else status, **settings)


def _without_codes(char: str) -> str:
    return char if char.isprintable() or char == "\n" else " " * cell_len(char)


err = Terminal(stderr=True, soft_wrap=True)

Errors = tuple[type[Exception], ...]


class UsageProblem(Exception):  # noqa: N818 - it is for the user to solve
    """Raised where the user can correct something. The message names what is missing or wrong and
    what to do; the command prints it and exits with 2."""


class Failure(Exception):  # noqa: N818 - as the exit code is called
    """Raised where something failed that a command had started; the command prints the message and
    exits with 1."""


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

        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, on_signal)
        task = loop.create_task(main(hurry))
        try:
            return await task
        except asyncio.CancelledError:
            if not interrupted.is_set():
                raise
            return INTERRUPTED
        finally:
            for number in numbers:  # a thread may still run, and the next signal is to end it
                loop.remove_signal_handler(number)

    return asyncio.run(run_main())


# These import when an error is there, since a command that meets none needs neither the client nor
# the simulator.
def _for_users() -> Errors:
    """Return the errors that the user can correct."""
    from treadle_sim.workloads.workload import TraceFileError

    return UsageProblem, TraceFileError


def _while_it_ran() -> Errors:
    """Return the errors of meshes and of processes."""
    from treadle import TreadleError

    return Failure, TreadleError


def _of_files() -> Errors:
    """Return the errors of files that a command reads."""
    from treadle_learned.transcript import LearnedError

    return LearnedError, OSError


def _known() -> Errors:
    """Return all errors that end a command with one line. Any other is a bug of ours and shows its
    traceback."""
    return *_for_users(), *_while_it_ran()


def run(begin: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> NoReturn:
    """Run an async command under signal handling; end the process with its exit code."""
    try:
        code = run_interruptible(begin)
    except _known() as error:
        end(error)
    except BaseExceptionGroup as group:
        known, bugs = group.split(_known())
        if known is None or bugs is not None:
            raise
        end(known)
    raise typer.Exit(code)


@contextmanager
def end_with_one_line() -> Iterator[None]:
    """End a command without a loop on what the user can correct, files included, and on Ctrl-C."""
    try:
        yield
    except (*_for_users(), *_of_files()) as error:
        end(error)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("treadle"):
            raise
        end(UsageProblem(f"{error.name} is not installed: pip install 'treadle[learned]'"))
    except KeyboardInterrupt:
        err.print("interrupted", highlight=False)
        raise typer.Exit(INTERRUPTED) from None


def end(error: BaseException) -> NoReturn:
    """Print the error, of a group the first one, and end the command."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    # A text that a server sent can begin no line of its own
    text = "\n    ".join(str(error).splitlines())
    err.print(f"treadle: {text}", style="red", highlight=False)
    raise typer.Exit(FAILED if isinstance(error, _while_it_ran()) else USER_CAN_HELP)
