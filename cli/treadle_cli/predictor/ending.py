"""How the commands of `treadle predictor` end: as the others do (`exits.py`), without asyncio, which nothing here
needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from treadle_learned.errors import LearnedError

from treadle_cli import exits
from treadle_cli.exits import INTERRUPTED
from treadle_cli.problems import UsageProblem
from treadle_cli.report.records import RecordError


@contextmanager
def ending(interrupted: str = "interrupted") -> Iterator[None]:
    """What was asked for wrongly as one line and exit code 2, Ctrl-C as the line `interrupted` and 130."""
    try:
        yield
    except (*exits.USERS, LearnedError, RecordError, OSError) as error:
        exits.end(error)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("treadle"):
            raise
        exits.end(UsageProblem(f"{error.name} is not installed: pip install 'treadle[learned]'"))
    except KeyboardInterrupt:
        exits.err.print(interrupted, highlight=False, markup=False)
        raise typer.Exit(INTERRUPTED) from None
