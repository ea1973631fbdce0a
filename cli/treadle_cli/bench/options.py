"""What every bench is told."""

import asyncio
from dataclasses import dataclass, field

from rich.console import Console

from treadle_cli.engines import EnginePlan


@dataclass(frozen=True)
class BenchOptions:
    """engines: what to start where a bench needs engines; a bench says how many it takes. seed: of prompts. repeats:
    of each measurement;
    a figure is a median over all of them. progress: where what happens is told, never stdout. hurry: see ProcessTree.
    """

    engines: EnginePlan
    seed: int = 0
    repeats: int = 5
    progress: Console = field(default_factory=lambda: Console(stderr=True))
    hurry: asyncio.Event | None = None
