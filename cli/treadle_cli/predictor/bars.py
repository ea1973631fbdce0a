"""Progress on stderr: bars that may stand inside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Track = Callable[[Iterable[int], int], Iterable[int]]


@contextmanager
def bars(console: Console) -> Iterator[Callable[[str], Track]]:
    """A bar by its words; it goes when what it counts is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:

        def bar(words: str) -> Track:
            def track(over: Iterable[int], count: int) -> Iterable[int]:
                if count:
                    task = progress.add_task(words, total=count)
                    try:
                        yield from progress.track(over, task_id=task)
                    finally:
                        progress.remove_task(task)

            return track

        yield bar
