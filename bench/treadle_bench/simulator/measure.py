"""Wall seconds that the simulator takes for one rollout at the paper's size, in one process.

Keys: `trajectories`, `gpus`; `s`: of Treadle's slowest rollout; `rows`: each system with its events and events a
second. Medians over `repeats`, without the first rollout of each system, which loads compiled code.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.progress import Progress
from treadle_sim.systems import HEDDLE, TREADLE, VERL
from treadle_sim.workloads.parametric import WORKLOADS

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.rollouts import TRACES, Job, batch_for, play_job
from treadle_bench.summary import median_of, range_of

LLM = "Qwen3-14B"
WARM_SCALE = 1 / 32
PLAYED = ((TREADLE, 0), (HEDDLE, 0), (VERL, 1))
DIGITS = 3


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError, OSError."""
    scale = options.scale or 1.0
    names = (TRACES,) if options.traces is not None else tuple(WORKLOADS)
    batches = {name: batch_for(name, LLM, scale, options.seed, options) for name in names}
    with Progress(console=options.progress, transient=True) as progress:
        task = progress.add_task("simulator", total=len(names) * len(PLAYED) * options.repeats)
        for system, degree in PLAYED:
            play_job(Job(batch_for(names[0], LLM, min(scale, WARM_SCALE), options.seed, options), system, degree))
        rows: list[dict[str, Any]] = []
        for name, batch in batches.items():
            for system, degree in PLAYED:
                took_s = []
                for _ in range(options.repeats):
                    one = play_job(Job(batch, system, degree))
                    took_s.append(one.took_s)
                    progress.advance(task)
                rows.append(
                    {
                        "workload": name,
                        "system": system.name,
                        "s": median_of(took_s, DIGITS),
                        "s_range": range_of(took_s, DIGITS),
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


BENCH = Bench(
    "simulator",
    "Wall seconds of one simulated rollout of 6,400 trajectories on 64 GPUs. Takes about 5 minutes.",
    measure,
    page=lambda found: {},
)
