"""Training an epoch at a time, so that it can be left after any and gone on with.

Invariant: training that was left after an epoch and restored ends as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from treadle_learned.examples import Track
from treadle_learned.partial import Partial

State = dict[str, Any]  # tensors, numbers and texts, and dicts and lists of these
Bar = Callable[[str], Track]  # a progress bar by its words


class Epochs(Protocol):
    """What is trained. epoch: how many are done."""

    epoch: int

    @property
    def most(self) -> int:
        """Epochs at most."""

    @property
    def done(self) -> bool:
        """Whether no further epoch is wanted."""

    def run_epoch(self, bar: Bar) -> None:
        """One more."""

    def state(self) -> State:
        """All that the next epoch depends on."""

    def restore(self, state: State) -> None:
        """What `state` gave, of one that was made of the same."""


def silent(words: str) -> Track:
    """No bar."""
    del words

    def track(over: Iterable[int], count: int) -> Iterable[int]:
        del count
        return over

    return track


def run(work: Epochs, name: str, kept: Partial | None = None, bar: Bar = silent) -> None:
    """To its end, from where `kept` has it under `name`, and kept there after each epoch."""
    if kept is not None and (state := kept.get(name)) is not None:
        work.restore(state)
    for _ in bar(f"{name}: epochs")(range(work.epoch, work.most), work.most - work.epoch):
        if work.done:
            break
        work.run_epoch(bar)
        if kept is not None:
            kept.put(name, work.state())
