"""What the simulator itself takes: wall seconds of one rollout at the paper's size, in one process.

Keys: `trajectories`, `gpus`, `s` of the rollout that takes longer, Treadle's; `rows` each system with its events and
events a second. Each is a median over `repeats`, the first rollout of the process (which loads compiled code) left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from rich.progress import Progress
from treadle_sim.systems import HEDDLE, TREADLE, VERL
from treadle_sim.workloads.parametric import WORKLOADS

from treadle_bench.options import BenchOptions
from treadle_bench.page import command, paragraph, point, table
from treadle_bench.rollouts import TRACES, Job, batch_for, played

NAME = "simulator"
LLM = "Qwen3-14B"
WARM_SCALE = 1 / 32
PLAYED = ((TREADLE, 0), (HEDDLE, 0), (VERL, 1))
DIGITS = 3


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises TraceFileError, OSError."""
    scale = options.scale or 1.0
    names = (TRACES,) if options.traces is not None else tuple(WORKLOADS)
    batches = {name: batch_for(name, LLM, scale, options.seed, options) for name in names}
    with Progress(console=options.progress, transient=True) as progress:
        task = progress.add_task(NAME, total=len(names) * len(PLAYED) * options.repeats)
        for system, degree in PLAYED:
            played(Job(batch_for(names[0], LLM, min(scale, WARM_SCALE), options.seed, options), system, degree))
        rows: list[dict[str, Any]] = []
        for name, batch in batches.items():
            for system, degree in PLAYED:
                took_s = []
                for _ in range(options.repeats):
                    one = played(Job(batch, system, degree))
                    took_s.append(one.took_s)
                    progress.advance(task)
                rows.append(
                    {
                        "workload": name,
                        "system": system.name,
                        "s": round(median(took_s), DIGITS),
                        "s_range": [round(min(took_s), DIGITS), round(max(took_s), DIGITS)],
                        "events": one.events,
                        "events_per_s": round(one.events / median(took_s)),
                        "simulated_s": round(one.makespan_s, DIGITS),
                    }
                )
    first = batches[names[0]]
    return {
        "trajectories": first.trajectories,
        "gpus": first.gpus,
        "s": max(row["s"] for row in rows if row["system"] == TREADLE.name),
        "model": LLM,
        "scale": scale,
        "seeds": [options.seed],
        "repeats": options.repeats,
        "rows": rows,
    }


def page(found: Mapping[str, Any]) -> Iterator[str]:
    yield "# simulator: seconds of one rollout"
    yield ""
    yield from paragraph(
        f"`{command(NAME, found)}`, on one core of an AMD EPYC. {found['model']}, {found['trajectories']:,}",
        f"trajectories on {found['gpus']} GPUs; medians of {found['repeats']} after one that warms up.",
    )
    yield from table(
        ["", "system", "s (range)", "events", "events a second", "seconds simulated"],
        (
            [
                row["workload"],
                row["system"],
                f"{row['s']:.1f} ({row['s_range'][0]:.1f}–{row['s_range'][1]:.1f})",
                f"{row['events']:,}",
                f"{row['events_per_s']:,}",
                f"{row['simulated_s']:,.0f}",
            ]
            for row in found["rows"]
        ),
    )
    yield ""
    yield from point(
        "An event is one that the controller hears; its own handling, the plans and the engines are all in the time.",
    )
    yield from point("Another process on the machine's other core makes these times up to twice as long.")
