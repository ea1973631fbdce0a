"""One simulated rollout as a job, and all of a plan's jobs over the machine's cores.

Invariants: a job's result depends on the job alone, so that cores and order change nothing; no worker outlives the
command, whatever ends it; spans are recorded only where asked, since they are most of a rollout's memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from treadle_core.refusals import CoreError
from treadle_sim.rollout import Run, Setting, simulate
from treadle_sim.systems import System

from treadle_cli.problems import UsageProblem

MOST_WORKERS = 8  # each holds its own numpy, numba and rollout: some 250 MB
# Trajectories over all jobs up to which one process is as fast: workers take about two seconds to start.
ALONE_TRAJECTORIES = 4_000
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, slots=True)
class Job:
    """A system's rollout in a setting (`index` of the plan's). degree: of its engines, 0 for its own allocation."""

    system: System
    setting: Setting
    index: int
    degree: int = 0
    record: bool = False


def jobs_of(system: System, setting: Setting, index: int, degree: int) -> list[Job]:
    """One job, or one for each degree of which the best is to be taken."""
    if degree or system.allocated:
        return [Job(system, setting, index, degree)]
    return [Job(system, setting, index, each) for each in setting.degrees()]


def run_job(job: Job) -> Run:
    """Plays one. Raises UsageProblem where the budget gives the system no engines."""
    try:
        return simulate(job.system, job.setting, job.degree, record=job.record)
    except CoreError as error:  # an error with two arguments, which does not come back from another process
        raise UsageProblem(f"{job.system.name} finds no engines: {error}") from None


async def simulate_all(jobs: Sequence[Job], heard: Callable[[Job, Run], None]) -> None:
    """Tells `heard` each result as it comes. Raises what a job raises; then, and where the caller is cancelled, workers
    are ended at once."""
    workers = min(MOST_WORKERS, len(jobs), len(os.sched_getaffinity(0)))
    size = sum(len(job.setting.workload.trajectories) for job in jobs)
    if workers < 2 or size <= ALONE_TRAJECTORIES:
        for job in jobs:
            heard(job, run_job(job))
            await asyncio.sleep(0)  # where a signal is heard
        return
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker, (os.getpid(),)) as pool:
        waiting = _submitted(pool, jobs)
        try:
            while waiting:
                ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in ended:
                    heard(waiting.pop(future), future.result())
        finally:
            if waiting:
                for future in waiting:
                    future.cancel()
                for child in set(multiprocessing.active_children()) - others:
                    child.terminate()


def _submitted(pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> dict[asyncio.Future[Run], Job]:
    """Workers start here and inherit the mask: Ctrl-C in a terminal goes to all processes, and is this one's to
    handle."""
    loop = asyncio.get_running_loop()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {loop.run_in_executor(pool, run_job, job): job for job in jobs}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(parent_pid: int) -> None:
    """A worker dies with the command, even where that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
