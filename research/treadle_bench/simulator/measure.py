"""Wall seconds that the simulator takes for one rollout at the paper's size, in one process.

Keys: `trajectories`, `gpus`; `s`: of Treadle's slowest rollout; `rows`: each system with its events
and events a second. Medians over `repeats`, without the first rollout of each system, which loads
compiled code.
"""

from statistics import median
from typing import Any

from rich.progress import track
from treadle_sim.systems import HEDDLE, TREADLE, VERL

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.rollouts import Job, batch_for, play_job, workloads
from treadle_bench.summary import median_of, range_of

LLM = "Qwen3-14B"
WARM_SCALE = 1 / 32
PLAYED = ((TREADLE, 0), (HEDDLE, 0), (VERL, 1))
DIGITS = 3


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError, OSError."""
    scale = options.scale or 1.0
    batches = [batch_for(name, LLM, scale, options.seed, options) for name in workloads(options)]
    warm = batch_for(batches[0].workload, LLM, min(scale, WARM_SCALE), options.seed, options)
    for system, degree in PLAYED:
        play_job(Job(warm, system, degree))
    jobs = [Job(batch, system, degree) for batch in batches for system, degree in PLAYED]
    rows: list[dict[str, Any]] = []
    for job in track(jobs, "simulator", console=options.progress, transient=True):
        runs = [play_job(job) for _ in range(options.repeats)]
        took_s = [one.took_s for one in runs]
        rows.append(
            {
                "workload": job.batch.workload,
                "system": job.system.name,
                "s": median_of(took_s, DIGITS),
                "s_range": range_of(took_s, DIGITS),
                "events": runs[0].events,
                "events_per_s": round(runs[0].events / median(took_s)),
                "simulated_s": round(runs[0].makespan_s, DIGITS),
            }
        )
    return {
        "trajectories": batches[0].trajectories,
        "gpus": batches[0].gpus,
        "s": max(row["s"] for row in rows if row["system"] == TREADLE.name),
        "model": LLM,
        "scale": scale,
        "seeds": [options.seed],
        "repeats": options.repeats,
        "rows": rows,
    }


BENCH = Bench(
    "simulator",
    "Wall seconds of one simulated rollout of 6,400 trajectories on 64 GPUs. Takes about 5 "
    "minutes.",
    measure,
    page=dict,
)
