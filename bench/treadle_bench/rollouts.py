"""Simulated rollouts for the figures: plays jobs in child processes and keeps what the figures need of each.

A Batch says which trajectories run on which GPUs. A Batch and a Job are small and can be pickled; each process makes
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

from treadle_bench.bench import BenchOptions

ACCELERATOR = "H200"
DEGREES = (1, 2, 4, 8)  # GPUs of an engine
GPUS = 64  # Heddle's testbed
SAMPLES = parametric.SAMPLES
SLOTS = 100  # sequences that decode at once for each GPU of an engine; Heddle's batch size of a rollout worker
SMALL_SCALE = 0.25  # of GPUs and trajectories, where many seeds are played
TRACES = "traces"  # name of the workload of --traces
SETTINGS_CACHED = 4

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
        """Their number."""
        return self.prompts * SAMPLES


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout. degree: GPUs of each engine, 0 where the system allocates. curve: keep when each trajectory
    ended."""

    batch: Batch
    system: System
    degree: int = 0
    curve: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Where one trajectory's time went, in seconds. whole_s: all of it. queue_s: what no other part explains: in an
    engine's queue, before admission, or on the way."""

    whole_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    tool_s: float
    move_s: float

    @classmethod
    def of(cls, times: Times) -> Wait:
        """From the simulator's times of the trajectory."""
        queue_s = times.finished_s - times.prefill_s - times.decode_s - times.tool_s - times.move_s
        return cls(times.finished_s, queue_s, times.prefill_s, times.decode_s, times.tool_s, times.move_s)


@dataclass(frozen=True, slots=True)
class Played:
    """What is kept of a rollout. engines: as in "8x1 + 1x8 H200". last: the trajectory that ended last. longest: the
    one with most tokens. took_s: wall seconds of the simulation. finished_s: of each trajectory, where the job asks."""

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
class Bound:
    """The makespan that no schedule beats, and what sets it: all work together, the longest trajectory, or its
    tools."""

    bound_s: float
    bound_by: Binding
    work_s: float
    alone_s: float


def find_bound(batch: Batch) -> Bound:
    """The lower bound of the batch's makespan."""
    setting = setting_of(batch)
    works = setting.workload.trajectories
    usable = [model for model in setting.models if model.kv_tokens > 0 and model.gpus <= setting.gpus]
    longest_s, all_s = longest_alone_s(setting.workload, usable), work_s(setting.workload, usable, setting.gpus)
    longest = max(works, key=lambda work: _alone_s(work, usable))
    tail: Binding = "tools" if longest.tool_s > 0.5 * longest_s else "tail"
    bound_s = lower_bound_s(setting.workload, setting.models, setting.gpus)
    return Bound(bound_s, "work" if all_s >= longest_s else tail, all_s, longest_s)


def _alone_s(work: TrajectoryWork, models: Sequence[EngineModel]) -> float:
    return min(alone_s(work, model) for model in models)


@lru_cache(maxsize=SETTINGS_CACHED)
def setting_of(batch: Batch) -> Setting:
    """The batch for the simulator, with an earlier epoch of the same prompts from which engines are planned. Raises
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


def play_job(job: Job) -> Played:
    """Play one rollout in this process."""
    setting = setting_of(job.batch)
    began = time.perf_counter()
    run = simulate(job.system, setting, job.degree)
    took_s = time.perf_counter() - began
    outcome = run.outcome
    works = setting.workload.trajectories
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
        last=Wait.of(outcome.times[last]),
        longest=Wait.of(outcome.times[longest]),
        took_s=took_s,
        finished_s=tuple(times.finished_s for times in outcome.times) if job.curve else (),
    )


async def play_all(jobs: Sequence[Job], options: BenchOptions, what: str) -> list[Played]:
    """Play the jobs, `options.workers` at a time; results in the order of the jobs. With one worker: in this
    process."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=options.progress, transient=True) as progress:
        task = progress.add_task(what, total=len(jobs))
        if options.workers <= 1:
            return [play_job(job) for job in progress.track(jobs, task_id=task)]
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:

            async def play_one(job: Job) -> Played:
                played = await loop.run_in_executor(pool, play_job, job)
                progress.advance(task)
                return played

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(play_one(job)) for job in jobs]
        return [task.result() for task in tasks]


def batch_for(workload: str, llm: str, scale: float, seed: int, options: BenchOptions, *, degree: int = 1) -> Batch:
    """A batch on the fraction `scale` of GPUS: SLOTS trajectories for each engine of `degree` GPUs."""
    gpus = max(round(GPUS * scale), 1)
    prompts = max(round(SLOTS * gpus / degree / SAMPLES), 1)
    return Batch(workload, llm, gpus, prompts, seed, traces=options.traces)


def workloads(options: BenchOptions) -> tuple[str, ...]:
    """Names of the workloads of a figure: the three of the paper, or that of --traces."""
    return (TRACES,) if options.traces is not None else tuple(parametric.WORKLOADS)
