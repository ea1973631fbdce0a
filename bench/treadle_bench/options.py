"""What every bench is told."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from treadle_cli.mesh.engines import DEFAULT_MODEL, EnginePlan
from treadle_cli.problems import UsageProblem


@dataclass(frozen=True)
class BenchOptions:
    """seed: of prompts and workloads. repeats: of each measurement; a figure is a median over all of them.

    plan: the engines to start, None where the bench needs none. traces: a trace file (docs/traces.md) to run on instead
    of the bench's own workload. data: a folder of public traces and engine measurements. pictures: a folder to draw
    into, None for no pictures. progress: where what happens is told, never stdout. hurry: see ProcessTree. scale: of a
    simulated figure's GPUs and trajectories, None for the bench's own choice. workers: processes that simulate at once.
    model: a folder or a hub's name, for a bench that loads a model itself. quick: a bench that can be made small is, so
    that it says little and soon.
    """

    plan: EnginePlan | None = None
    seed: int = 0
    repeats: int = 5
    traces: Path | None = None
    data: Path | None = None
    pictures: Path | None = None
    progress: Console = field(default_factory=lambda: Console(stderr=True))
    hurry: asyncio.Event | None = None
    scale: float | None = None
    workers: int = 2
    model: str = DEFAULT_MODEL
    quick: bool = False

    @property
    def engines(self) -> EnginePlan:
        """The engines of a bench that starts some. Raises UsageProblem where none were planned."""
        if self.plan is None:
            raise UsageProblem("this bench starts engines, and none were planned for")
        return self.plan
