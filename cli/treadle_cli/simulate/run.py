"""Run `treadle simulate` from the options to what is printed: simulate on all cores, compare, write
a folder.

The result of a job depends on the job alone, so the number of cores and the order of jobs change
nothing. No worker process outlives the command, however it ends. Spans are recorded only for the
systems that are drawn, since they take most of a rollout's memory.
"""

import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from treadle_core.refusals import CoreError
from treadle_sim.systems import TREADLE, Run, Setting, System, simulate

from treadle_cli.exits import UsageProblem
from treadle_cli.options import print_json
from treadle_cli.simulate import output
from treadle_cli.simulate.comparison import choose_systems, compare
from treadle_cli.simulate.request import Request, SimulationPlan, make_plan

MOST_WORKERS = 8  # each has its own numpy, numba and rollout: some 250 MB
# Trajectories over all jobs up to which one process is as fast: workers take about two seconds to
# start.
ALONE_TRAJECTORIES = 4_000
PLAN = "plan.json"  # the engines that Treadle chose for the first seed, for `treadle apply`
PR_SET_PDEATHSIG = 1  # prctl(2)


async def run_simulate(
    request: Request,
    make_folder: Callable[[], Path],
    as_json: bool,
    out: Console,
    progress: Console,
) -> int:
    """Simulate, write the folder that `make_folder` creates, and print; return the exit code.
    Raises UsageProblem."""
    with progress.status("drawing the workload"):
        plan = make_plan(request)
    folder = make_folder()
    try:
        await _simulate_into(folder, plan, as_json, out, progress)
    finally:
        if not any(folder.iterdir()):  # interrupted
            folder.rmdir()
    return 0


async def _simulate_into(
    folder: Path, plan: SimulationPlan, as_json: bool, out: Console, progress: Console
) -> None:
    """Simulate each system on the degree that suits it best, write all files, print."""
    jobs = [
        Job(system, setting, index, degree)
        for system in plan.systems
        for index, setting in enumerate(plan.settings)
        for degree in ([plan.degree] if plan.degree or system.allocated else setting.degrees())
    ]
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=progress, transient=True) as bar:
        best = await _run_fastest(jobs, "simulating", bar)
        seeds = range(len(plan.settings))
        runs = {
            system.name: [best[system.name, index][1] for index in seeds] for system in plan.systems
        }
        comparison = compare(plan.systems, plan.settings, runs)
        drawn = [
            replace(best[name, 0][0], record=True)
            for name in choose_systems(plan.systems, comparison, plan.log)
        ]
        recorded = [run for _, run in (await _run_fastest(drawn, "recording", bar)).values()]
    sentences = output.describe(plan, comparison)
    with progress.status("drawing"):
        # a second of imports, which bad options need not wait for
        from treadle_cli.simulate import pictures

        scene = pictures.make_scene(recorded, plan.settings[0].workload, comparison)
        title = "Makespan: " + " · ".join(
            f"{panel.name} {panel.makespan_s:.0f} s" for panel in scene.panels
        )
        pictures.draw(scene, title, output.heading(plan), folder / output.PICTURE)
        pictures.write_page(
            scene, title, output.heading(plan), comparison, sentences, folder / output.PAGE
        )
        document = output.make_document(plan, comparison, sentences, folder)
        (folder / output.SUMMARY).write_text(json.dumps(document, indent=1) + "\n")
        output.write_trajectories(plan, runs, folder / output.TRAJECTORIES)
        if TREADLE.name in runs:
            # the next import loads grpc too: nothing else here needs them
            from google.protobuf import json_format

            from treadle_cli.resources.plan import EngineClass, plan_message

            cluster = runs[TREADLE.name][0].cluster
            kinds = (
                EngineClass(each.accelerator, each.gpus, each.slots) for each in cluster.engines
            )
            (folder / PLAN).write_text(json_format.MessageToJson(plan_message(kinds)) + "\n")
    if as_json:
        print_json(document)
    else:
        output.print_comparison(out, plan, comparison, sentences, folder)


@dataclass(frozen=True, slots=True)
class Job:
    """A system's rollout in a setting (`index` of the plan's). degree: of its engines, 0 for its
    own allocation."""

    system: System
    setting: Setting
    index: int
    degree: int = 0
    record: bool = False


async def _run_fastest(
    jobs: Sequence[Job], doing: str, bar: Progress
) -> dict[tuple[str, int], tuple[Job, Run]]:
    """Return, for each system and setting, the job that ends first, with its run; of two that end
    at once, the one with fewer GPUs an engine. They are in the order of the jobs."""
    task = bar.add_task(doing, total=len(jobs))
    best: dict[tuple[str, int], tuple[Job, Run]] = {}

    def keep(job: Job, run: Run) -> None:
        bar.update(
            task, advance=1, description=f"{doing} {job.system.name} on {run.cluster.describe()}"
        )
        key = (job.system.name, job.index)
        best[key] = min(best.get(key, (job, run)), (job, run), key=_rank)

    await run_jobs(jobs, keep)
    return {(job.system.name, job.index): best[job.system.name, job.index] for job in jobs}


def _rank(of_job: tuple[Job, Run]) -> tuple[float, int]:
    run = of_job[1]
    return run.outcome.makespan_s, -len(run.cluster.engines)


async def run_jobs(jobs: Sequence[Job], keep: Callable[[Job, Run], None]) -> None:
    """Call `keep` with each result when it is there. Raises what a job raises; then, and if the
    caller is cancelled, workers end at once."""
    workers = min(MOST_WORKERS, len(jobs), len(os.sched_getaffinity(0)))
    size = sum(len(job.setting.workload.trajectories) for job in jobs)
    if workers < 2 or size <= ALONE_TRAJECTORIES:
        for job in jobs:
            keep(job, _run_job(job))
            await asyncio.sleep(0)  # lets the loop handle a signal
        return
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin_worker, (os.getpid(),)
    ) as pool:
        waiting = _submit(pool, jobs)
        try:
            while waiting:
                ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in ended:
                    keep(waiting.pop(future), future.result())
        finally:
            if waiting:
                for future in waiting:
                    future.cancel()
                for child in set(multiprocessing.active_children()) - others:
                    child.terminate()
                # A job or a result of which a part is in a pipe never comes whole now. Python's
                # pool waits for it up to 3.11.4 (cpython issue 94777), unless nobody is at the
                # pipe's other end.
                pool._call_queue._reader.close()  # type: ignore[attr-defined]
                pool._result_queue._writer.close()  # type: ignore[attr-defined]


def _run_job(job: Job) -> Run:
    """Run one job. Raises UsageProblem if the budget gives the system no engines."""
    try:
        return simulate(job.system, job.setting, job.degree, record=job.record)
    except CoreError as error:  # has two arguments, so it cannot be sent back from another process
        raise UsageProblem(f"{job.system.name} finds no engines: {error}") from None


def _submit(pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> dict[asyncio.Future[Run], Job]:
    """Submit all jobs. Workers start here and inherit the signal mask: Ctrl-C in a terminal goes to
    all processes, and only this one handles it."""
    loop = asyncio.get_running_loop()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {loop.run_in_executor(pool, _run_job, job): job for job in jobs}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(parent_pid: int) -> None:
    """Make the kernel kill this worker when the command ends, even if that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
