"""Simulated rollouts for the figures: plays jobs in child processes and keeps what the figures need
of each.

A Batch says which trajectories run on which GPUs. A Batch and a Job are small and can be pickled;
each process makes the trajectories itself. The same job gives the same figures in any process and
in any order.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from treadle_sim.engine_model import Speculation, engine_model
from treadle_sim.lower_bound import alone_s, longest_alone_s, lower_bound_s, work_s
from treadle_sim.outcome import Times
from treadle_sim.systems import Setting, System, simulate
from treadle_sim.workloads import parametric
from treadle_sim.workloads.resample import resample
from treadle_sim.workloads.workload import TrajectoryWork, read_traces

from treadle_bench.bench import BenchOptions
from treadle_bench.public_traces import read_public

ACCELERATOR = "H200"
DEGREES = (1, 2, 4, 8)  # GPUs of an engine
GPUS = 64  # Heddle's testbed
SAMPLES = parametric.SAMPLES
# sequences that decode at once for each GPU of an engine; Heddle's batch size of a rollout worker
SLOTS = 100
SMALL_SCALE = 0.25  # of GPUs and trajectories, where many seeds are played
TRACES = "traces"  # name of the workload of --traces
SETTINGS_CACHED = 4
Task = TypeVar("Task", bound=Hashable)
Result = TypeVar("Result")
PARTS = ("prefill_s", "decode_s", "tool_s", "move_s")  # of a trajectory's time, beside its waiting


@dataclass(frozen=True, slots=True)
class Batch:
    """`prompts` x SAMPLES trajectories for `gpus` GPUs: of a named workload, of a trace file, or,
    with `data`, of a public source in that folder. slots: of a GPU. tool_share: tools take this
    share of their time. host_share: KV that an engine's host keeps, for each token in the engine's
    memory. speculation: of all engines.
    """

    workload: str
    llm: str
    gpus: int
    prompts: int
    seed: int
    slots: int = SLOTS
    traces: Path | None = None
    data: Path | None = None
    tool_share: float = 1.0
    host_share: float = 0.0
    speculation: Speculation | None = None

    @property
    def trajectories(self) -> int:
        """Their number."""
        return self.prompts * SAMPLES


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout. degree: GPUs of each engine, 0 where the system allocates."""

    batch: Batch
    system: System
    degree: int = 0


@dataclass(frozen=True, slots=True)
class Played:
    """What is kept of a rollout. engines: as in "8x1 + 1x8 H200". last, longest: seconds by part of
    the trajectory that ended last, and of that with most tokens. prefilled_tokens: by all prefills.
    took_s: wall seconds of the simulation. finished_s: of each trajectory."""

    makespan_s: float
    tokens_per_s: float
    p50_s: float
    engines: str
    migrations: int
    events: int
    last: Mapping[str, float]
    longest: Mapping[str, float]
    prefilled_tokens: int
    took_s: float
    finished_s: np.ndarray = field(repr=False, compare=False)


def find_bound(batch: Batch) -> dict[str, Any]:
    """`bound_s`: the makespan that no schedule beats. `bound_by`: what sets it, all `work`
    together, the longest trajectory (`tail`), or its `tools`. `work_s`, `alone_s`: seconds of all
    work, and of the longest trajectory."""
    setting = setting_of(batch)
    usable = [
        model for model in setting.models if model.kv_tokens > 0 and model.gpus <= setting.gpus
    ]
    longest_s, all_s = (
        longest_alone_s(setting.workload, usable),
        work_s(setting.workload, usable, setting.gpus),
    )
    longest = max(
        setting.workload.trajectories,
        key=lambda work: min(alone_s(work, model) for model in usable),
    )
    tail = "tools" if longest.tool_s > 0.5 * longest_s else "tail"
    return {
        "bound_s": lower_bound_s(setting.workload, setting.models, setting.gpus),
        "bound_by": "work" if all_s >= longest_s else tail,
        "work_s": all_s,
        "alone_s": longest_s,
    }


@lru_cache(maxsize=SETTINGS_CACHED)
def setting_of(batch: Batch) -> Setting:
    """The batch for the simulator, with an earlier epoch of the same prompts from which engines are
    planned. Raises TraceFileError, PublicTraceError, OSError, UnknownWorkloadError and
    UnknownEngineError."""
    models = tuple(
        engine_model(batch.llm, ACCELERATOR, degree, batch.slots * degree) for degree in DEGREES
    )
    models = tuple(
        replace(
            model,
            host_kv_tokens=int(batch.host_share * model.kv_tokens),
            speculation=batch.speculation,
        )
        for model in models
    )
    size = (batch.prompts, SAMPLES, batch.seed)
    works: tuple[TrajectoryWork, ...] = ()
    if batch.data is not None:
        works = _read_source(batch.workload, batch.data)
    elif batch.traces is not None:
        works = read_traces(batch.traces)
    if works:
        works = tuple(_shorten_tools(work, batch.tool_share) for work in works)
        caps = {
            "max_gen_tokens": parametric.MAX_GEN_TOKENS,
            "max_context_tokens": parametric.MAX_CONTEXT_TOKENS,
        }
        now, before = (resample(works, *size, epoch=epoch, name=TRACES, **caps) for epoch in (0, 1))
    else:
        llm = batch.llm.lower()
        now, before = (
            parametric.make(batch.workload, *size, epoch=epoch, llm=llm) for epoch in (0, 1)
        )
    return Setting(now, batch.gpus, models, before.trajectories, seed=batch.seed)


@lru_cache(maxsize=SETTINGS_CACHED)
def _read_source(name: str, data: Path) -> tuple[TrajectoryWork, ...]:
    return read_public(name, data)


def _shorten_tools(work: TrajectoryWork, share: float) -> TrajectoryWork:
    return replace(
        work, steps=tuple(replace(step, tool_s=step.tool_s * share) for step in work.steps)
    )


def play_job(job: Job) -> Played:
    """Play one rollout in this process."""
    setting = setting_of(job.batch)
    began = time.perf_counter()
    run = simulate(job.system, setting, job.degree)
    took_s = time.perf_counter() - began
    outcome, works = run.outcome, setting.workload.trajectories
    _, longest = max(zip(works, outcome.times, strict=True), key=lambda pair: pair[0].gen_tokens)
    return Played(
        makespan_s=outcome.makespan_s,
        tokens_per_s=outcome.tokens_per_s,
        p50_s=outcome.finish_quantile_s(0.5),
        engines=run.cluster.describe(),
        migrations=outcome.migrations,
        events=outcome.events,
        last=_split_times(max(outcome.times, key=lambda times: times.finished_s)),
        longest=_split_times(longest),
        prefilled_tokens=sum(times.prefilled_tokens for times in outcome.times),
        took_s=took_s,
        finished_s=np.array([times.finished_s for times in outcome.times]),
    )


def _split_times(times: Times) -> dict[str, float]:
    """Seconds by part. queue_s is what no other part explains: in an engine's queue, before
    admission, on the way."""
    queue_s = times.finished_s - times.prefill_s - times.decode_s - times.tool_s - times.move_s
    return {"queue_s": queue_s, **{part: getattr(times, part) for part in PARTS}}


async def play_all(jobs: Iterable[Job], options: BenchOptions, what: str) -> dict[Job, Played]:
    """Play rollouts, as `play_each` does."""
    return await play_each(jobs, play_job, options, what)


async def play_each(
    jobs: Iterable[Task], play: Callable[[Task], Result], options: BenchOptions, what: str
) -> dict[Task, Result]:
    """Play each of the jobs once, `options.workers` at a time. With one worker: in this process."""
    ahead = list(dict.fromkeys(jobs))
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=options.progress, transient=True) as progress:
        task = progress.add_task(what, total=len(ahead))
        if options.workers <= 1:
            return {job: play(job) for job in progress.track(ahead, task_id=task)}
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(
            options.workers, mp_context=multiprocessing.get_context("spawn")
        ) as pool:

            async def play_one(job: Task) -> Result:
                played = await loop.run_in_executor(pool, play, job)
                progress.advance(task)
                return played

            async with asyncio.TaskGroup() as group:
                tasks = {job: group.create_task(play_one(job)) for job in ahead}
        return {job: task.result() for job, task in tasks.items()}


def batch_for(
    workload: str, llm: str, scale: float, seed: int, options: BenchOptions, *, degree: int = 1
) -> Batch:
    """A batch on the fraction `scale` of GPUS: SLOTS trajectories for each engine of `degree`
    GPUs."""
    gpus = max(round(GPUS * scale), 1)
    prompts = max(round(SLOTS * gpus / degree / SAMPLES), 1)
    return Batch(workload, llm, gpus, prompts, seed, traces=options.traces)


def workloads(options: BenchOptions) -> tuple[str, ...]:
    """Names of the workloads of a figure: the three of the paper, or that of --traces."""
    return (TRACES,) if options.traces is not None else tuple(parametric.WORKLOADS)


def batches_for(
    llm: str, scale: float, options: BenchOptions, slots: int = SLOTS
) -> dict[str, list[Batch]]:
    """Of each workload a batch for each seed. slots: of an engine; the number of trajectories
    stays."""
    return {
        name: [
            replace(batch_for(name, llm, scale, seed, options), slots=slots)
            for seed in options.seeds
        ]
        for name in workloads(options)
    }


def header(first: Batch, scale: float, options: BenchOptions) -> dict[str, Any]:
    """What the figures say of their batches, of which `first` is one."""
    return {
        "model": first.llm,
        "accelerator": ACCELERATOR,
        "gpus": first.gpus,
        "trajectories": first.trajectories,
        "scale": scale,
        "seeds": options.seeds,
        "repeats": options.repeats,
    }
