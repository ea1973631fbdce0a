"""A bench: its name, what it measures and how its figures become a page and a picture; and the
options of all benches.

Invariant: a bench prints nothing on stdout, starts what it needs and stops everything that it
started.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from treadle_cli.exits import Terminal, UsageProblem
from treadle_cli.mesh.engines import DEFAULT_MODEL, EnginePlan

from treadle_bench.page import render
from treadle_bench.staleness import UNKNOWN, newest_commit

Figures = Mapping[str, Any]  # what a bench measured, as it is written to its JSON


@dataclass(frozen=True)
class BenchOptions:
    """What the command line says. A bench reads the options that its help names.

    plan: the engines to start, None where the bench starts none. seed: of prompts and workloads.
    repeats: of each measurement. traces: a trace file (docs/traces.md) to use instead of the
    bench's own workload. data: a folder of public traces and engine measurements. pictures: the
    folder for page, picture and JSON; None: write none. progress: where progress is printed. hurry:
    set when child processes must stop at once. scale: fraction of a simulated figure's GPUs and
    trajectories, None for the bench's default. workers: processes that simulate at once. model: the
    folder or hub name of a model that a bench loads itself. quick: small sizes, to see whether the
    bench works. earlier: the figures of a run that was stopped, whose finished cells are not
    measured again (real). profiles: the folder to write the simulator's engines to (fit).
    """

    plan: EnginePlan | None = None
    seed: int = 0
    repeats: int = 5
    traces: Path | None = None
    data: Path | None = None
    pictures: Path | None = None
    progress: Console = field(default_factory=lambda: Terminal(stderr=True))
    hurry: asyncio.Event | None = None
    scale: float | None = None
    workers: int = 2
    model: str = DEFAULT_MODEL
    quick: bool = False
    earlier: Figures | None = None
    profiles: Path | None = None

    @property
    def engines(self) -> EnginePlan:
        """The engines to start. Raises UsageProblem where there are none."""
        if self.plan is None:
            raise UsageProblem("this bench starts engines; give it a plan for them")
        return self.plan

    @property
    def seeds(self) -> list[int]:
        """One seed for each repeat."""
        return [self.seed + repeat for repeat in range(self.repeats)]


@dataclass(frozen=True)
class Bench:
    """One figure. summary: its line of help. measure: gives the figures. engines: how many it
    starts; each takes a core where there is no GPU. page: gives the values that the template
    `pages/<name>.md.j2` needs beside the figures; None: no page. draw: writes the picture to a
    file. decides: folders of the code that the figures depend on; none: they measure a machine."""

    name: str
    summary: str
    measure: Callable[[BenchOptions], Awaitable[dict[str, Any]]]
    engines: int = 0
    page: Callable[[Figures], Figures] | None = None
    draw: Callable[[Figures, Path], None] | None = None
    decides: Sequence[str] = ("core/treadle_core", "sim/treadle_sim")

    async def run(self, options: BenchOptions) -> dict[str, Any]:
        """Measure, and write JSON, page and picture where `options.pictures` names a folder and the
        bench has a page."""
        measured_on = newest_commit(self.decides) if self.decides else newest_commit(["."])
        figures = {"measured_on": measured_on, **await self.measure(options)}
        if options.pictures is not None and self.page is not None:
            self.write(figures, options.pictures)
        return figures

    def write(self, figures: Figures, folder: Path) -> None:
        """Write NAME.json, NAME.md and NAME.png. Raises ValueError for a bench without a page."""
        if self.page is None:
            raise ValueError(f"bench {self.name} has no page")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(figures, indent=1) + "\n")
        text = render(self.name, {**figures, **self.page(figures)})
        (folder / f"{self.name}.md").write_text(
            f"{text.rstrip()}\n\nMeasured on {figures.get('measured_on', UNKNOWN)}.\n"
        )
        if self.draw is not None:
            self.draw(figures, folder / f"{self.name}.png")
