"""Trace a step through the real services of a mesh in this process: which of our files it passes,
leg by leg.

`sys.setprofile` calls the tracer at each function that this thread enters, generated code and
libraries included; files of our packages count, generated stubs do not. Background work runs in the
same thread, so a test plays the step several times and keeps the files that every play has passed.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from treadle_core.compiled import kernel_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("clients/python/treadle/", "core/", "runtime/", "services/")
# How a kernel is called: only where no C++ compiler was there to compile it ahead of time.
NOT_COUNTED = "core/treadle_core/compiled.py"

# Where a leg ends: the file, the function, and the event that the controller gets there.
TICKET_USED = ("services/sidecar/treadle_sidecar/servicer.py", "Generate", "")
FACT_HEARD = ("core/treadle_core/controller.py", "on_event", "StepFinished")
PREDICTED = ("core/treadle_core/controller.py", "on_event", "PredictionArrived")
PLANNED = ("core/treadle_core/controller.py", "on_event", "PlanArrived")

# a file, the function that is entered, and the event that the controller gets
Entry = tuple[str, str, str]


@dataclass(frozen=True)
class Leg:
    """Part of a step's way."""

    name: str
    entries: Sequence[Entry]

    @property
    def files(self) -> set[str]:
        """Files that it passes."""
        return {file for file, _, _ in self.entries}

    @property
    def moves(self) -> int:
        """How often it goes from one file to another."""
        return sum(
            before[0] != after[0]
            for before, after in zip(self.entries, self.entries[1:], strict=False)
        )


class StepTracer:
    """Notes each entered function of ours while `running`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        # of the files that code objects name; empty for those that do not count
        self._names: dict[str, str] = {}
        self._kernels = _find_kernels()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Trace this thread for the time of the block."""
        self.entries.clear()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def has_seen(self, *places: Entry) -> bool:
        """Whether functions were entered, each of them after the first one."""
        if places[0] not in self.entries:
            return False
        since = self.entries[self.entries.index(places[0]) :]
        return all(place in since for place in places)

    def cut(self, legs: Sequence[tuple[str, Entry | None]]) -> list[Leg]:
        """The entries so far in legs, each with its name and where it ends; None for the last
        one."""
        found: list[Leg] = []
        start = 0
        for name, ends_at in legs:
            end = len(self.entries) if ends_at is None else self.entries.index(ends_at, start)
            found.append(Leg(name, self.entries[start:end]))
            start = end
        return found

    def _note(self, frame: FrameType, kind: str, _: Any) -> None:
        if kind != "call":
            return
        path = frame.f_code.co_filename
        if (path, frame.f_code.co_name) in self._kernels:
            return
        name = self._names.get(path)
        if name is None:
            name = self._names[path] = _name_of(path)
        if name:
            event = frame.f_locals.get("event") if frame.f_code.co_name == "on_event" else None
            self.entries.append(
                (name, frame.f_code.co_name, type(event).__name__ if event is not None else "")
            )


def _name_of(path: str) -> str:
    """The path from the root of a file that counts; empty for any other."""
    file = Path(path)
    if not file.is_relative_to(ROOT) or file.stem.endswith(("_pb2", "_pb2_grpc")):
        return ""
    name = file.relative_to(ROOT).as_posix()
    return name if name.startswith(PACKAGES) and name != NOT_COUNTED else ""


def _find_kernels() -> set[tuple[str, str]]:
    """The files and names of the core's kernels: numba reports those that it has compiled, and none
    that was compiled ahead of time."""
    modules = [each for name, each in sys.modules.items() if name.startswith("treadle_core.")]
    found = (kernel_of(value) for module in modules for value in vars(module).values())
    codes = (kernel.function.__code__ for kernel in found if kernel is not None)
    return {(code.co_filename, code.co_name) for code in codes}
