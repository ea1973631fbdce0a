"""Figures as commands: `treadle bench NAME --json` prints what a bench's `run` gives.

Invariant: a bench prints nothing on stdout, starts what it needs and leaves nothing behind. Each lives in a module of
its own and is named in BENCHES; what was measured with them stands in the folder bench/ of the checkout.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle_cli.bench import control_plane
from treadle_cli.bench.options import BenchOptions

Run = Callable[[BenchOptions], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Bench:
    """One figure. summary: one line of help. run: measures, and gives the keys and their values. engines: whether it
    starts engines."""

    name: str
    summary: str
    run: Run
    engines: bool = False


BENCHES: Mapping[str, Bench] = {
    bench.name: bench
    for bench in (
        Bench(
            "control-plane",
            "What the control plane costs: ScheduleStep alone and 32 in flight, and a step through the sidecar against "
            "the engine's HTTP alone. Takes about 4 minutes on 2 cores.",
            control_plane.run,
            engines=True,
        ),
    )
}

__all__ = ["BENCHES", "Bench", "BenchOptions"]
