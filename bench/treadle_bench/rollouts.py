"""Simulated rollouts for the figures: what is played, in processes of their own, and what is kept of each.

A Batch says which trajectories come to which GPUs; it and a Job are small and picklable, so that each process makes
the trajectories itself. The same job gives the same figures in any process and in any order.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from treadle_sim.engine_model import EngineModel, engine_model
from treadle_sim.outcome import Times
from treadle_sim.rollout import Setting, alone_s, longest_alone_s, lower_bound_s, simulate, work_s
from treadle_sim.systems import System
from treadle_sim.workloads import parametric
from treadle_sim.workloads.resample import resample
from treadle_sim.workloads.workload import TrajectoryWork, read_traces

from treadle_bench.options import BenchOptions

ACCELERATOR = "H200"
DEGREES = (1, 2, 4, 8)
GPUS = 64  # Heddle's testbed
SAMPLES = parametric.SAMPLES
SLOTS = 100  # sequences that decode at once on an engine; Heddle: batch size 100 a rollout worker
# Of the GPUs and the trajectories, where many seeds are to be played.
SMALL_SCALE = 0.25
TRACES = "traces"  # the workload that --traces gives
SCENES_KEPT = 4

Binding = Literal["work", "tail", "tools"]


@dataclass(frozen=True, slots=True)
class Batch:
    """`prompts` x SAMPLES trajectories of a named workload, or of a trace file, for `gpus` GPUs."""

    workload: str
    llm: str
    gpus: int
    prompts: int
    seed: int
    accelerator: str = ACCELERATOR
    slots: int = SLOTS
    traces: Path | None = None

    @property
    def trajectories(self) -> int:
        """How many."""
        return self.prompts * SAMPLES


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout. degree: of all engines, 0 where the system allocates. curve: whether to keep all ends."""

    batch: Batch
    system: System
    degree: int = 0
    curve: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Where one trajectory's time went, in seconds. queue_s: in an engine's queue, or held back before it, or on the
    way. whole_s: all of it."""

    whole_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    tool_s: float
    move_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """What is kept of a rollout. engines: as in "8x1 + 1x8 H200". last: the trajectory that ended last; longest: the
    one with most tokens. finished_s: of each trajectory, where the job wants them. took_s: of the simulation."""

    makespan_s: float
    tokens_per_s: float
    p50_s: float
    engines: str
    migrations: int
    preemptions: int
    events: int
    last: Wait
    longest: Wait
    took_s: float
    finished_s: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Floor:
    """The makespan that no schedule beats, and what sets it: all work, the longest trajectory, or that one's tools."""

    bound_s: float
    bound_by: Binding
    work_s: float
    alone_s: float


def floor(batch: Batch) -> Floor:
    """See Floor."""
    here = setting(batch)
    works = here.workload.trajectories
    usable = [model for model in here.models if model.kv_tokens > 0 and model.gpus <= here.gpus]
    longest_s, all_s = longest_alone_s(here.workload, usable), work_s(here.workload, usable, here.gpus)
    longest = max(works, key=lambda work: _alone_s(work, usable))
    tail: Binding = "tools" if longest.tool_s > 0.5 * longest_s else "tail"
    bound_s = lower_bound_s(here.workload, here.models, here.gpus)
    return Floor(bound_s, "work" if all_s >= longest_s else tail, all_s, longest_s)


def _alone_s(work: TrajectoryWork, models: Sequence[EngineModel]) -> float:
    return min(alone_s(work, model) for model in models)


@lru_cache(maxsize=SCENES_KEPT)
def setting(batch: Batch) -> Setting:
    """The batch as the simulator takes it, with one earlier epoch of the same prompts to plan engines from. Raises
    TraceFileError, OSError, UnknownWorkloadError and UnknownEngineError."""
    models = tuple(engine_model(batch.llm, batch.accelerator, degree, batch.slots * degree) for degree in DEGREES)
    if batch.traces is not None:
        works = read_traces(batch.traces)
        caps = {"max_gen_tokens": parametric.MAX_GEN_TOKENS, "max_context_tokens": parametric.MAX_CONTEXT_TOKENS}
        now, before = (
            resample(works, batch.prompts, SAMPLES, batch.seed, epoch=epoch, name=TRACES, **caps) for epoch in (0, 1)
        )
    else:
        now, before = (
            parametric.make(batch.workload, batch.prompts, SAMPLES, batch.seed, epoch=epoch, llm=batch.llm.lower())
            for epoch in (0, 1)
        )
    return Setting(now, batch.gpus, models, before.trajectories, seed=batch.seed)


def played(job: Job) -> Played:
    """Plays it here and now."""
    here = setting(job.batch)
    began = time.perf_counter()
    run = simulate(job.system, here, job.degree)
    took_s = time.perf_counter() - began
    outcome = run.outcome
    works = here.workload.trajectories
    last = max(range(len(works)), key=lambda index: outcome.times[index].finished_s)
    longest = max(range(len(works)), key=lambda index: works[index].gen_tokens)
    return Played(
        makespan_s=outcome.makespan_s,
        tokens_per_s=outcome.tokens_per_s,
        p50_s=outcome.finish_quantile_s(0.5),
        engines=run.cluster.describe(),
        migrations=outcome.migrations,
        preemptions=outcome.preemptions,
        events=outcome.events,
        last=waited(outcome.times[last]),
        longest=waited(outcome.times[longest]),
        took_s=took_s,
        finished_s=tuple(times.finished_s for times in outcome.times) if job.curve else (),
    )


def waited(times: Times) -> Wait:
    """Queueing is what is left: the engine's queue is only one place to wait in."""
    queue_s = times.finished_s - times.prefill_s - times.decode_s - times.tool_s - times.move_s
    return Wait(times.finished_s, queue_s, times.prefill_s, times.decode_s, times.tool_s, times.move_s)


async def play_all(jobs: Sequence[Job], options: BenchOptions, what: str) -> list[Played]:
    """What came of each job, in their order; `options.workers` at a time, in processes of their own where over one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=options.progress, transient=True) as progress:
        task = progress.add_task(what, total=len(jobs))
        if options.workers <= 1:
            found = []
            for job in jobs:
                found.append(played(job))
                progress.advance(task)
            return found
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:

            async def play_one(job: Job) -> Played:
                one = await loop.run_in_executor(pool, played, job)
                progress.advance(task)
                return one

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(play_one(job)) for job in jobs]
        return [task.result() for task in tasks]


def batch_for(workload: str, llm: str, scale: float, seed: int, options: BenchOptions, *, degree: int = 1) -> Batch:
    """A batch of SLOTS trajectories for each engine of `degree` that a part `scale` of GPUS makes."""
    gpus = max(round(GPUS * scale), 1)
    prompts = max(round(SLOTS * gpus / degree / SAMPLES), 1)
    return Batch(workload, llm, gpus, prompts, seed, traces=options.traces)


def workloads(options: BenchOptions) -> tuple[str, ...]:
    """Names of the workloads of a figure: the three of the paper, or that of --traces."""
    return (TRACES,) if options.traces is not None else tuple(parametric.WORKLOADS)
