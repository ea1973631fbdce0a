"""Progress while a mesh starts: one line a part with a spinner and its seconds; plain lines where there is no
terminal.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class StartBoard:
    """Shows parts while they start. Used as a context manager; closing it leaves the last state on the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(finished_text="[green]✓[/green]"),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
            )
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def note(self, text: str) -> None:
        """A line of news above the board."""
        self._console.print(text, style="yellow", highlight=False, soft_wrap=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Shows `name` as starting until the block ends."""
        started_s = time.monotonic()
        task = self._progress.add_task(name, total=1) if self._progress is not None else None
        if task is None:
            self._console.print(f"starting {name}", highlight=False)
        yield
        if self._progress is not None and task is not None:
            self._progress.update(task, completed=1)
        else:
            self._console.print(f"{name} ready after {time.monotonic() - started_s:.1f} s", highlight=False)
