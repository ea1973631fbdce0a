"""`treadle simulate` from a checked request to figures, files and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from treadle_sim.rollout import Run

from treadle_cli.problems import UsageProblem
from treadle_cli.simulate.comparison import Comparison, compare
from treadle_cli.simulate.files import (
    PAGE,
    PICTURE,
    SUMMARY,
    TRAJECTORIES,
    document,
    new_folder,
    write_trajectories,
)
from treadle_cli.simulate.jobs import Job, jobs_of, simulate_all
from treadle_cli.simulate.request import Request, SimulationPlan, plan
from treadle_cli.simulate.scene import Scene, drawn, scene
from treadle_cli.simulate.sentences import Told, tell
from treadle_cli.simulate.terminal import heading, print_comparison


async def run_simulate(asked: Request, out_folder: Path, as_json: bool, out: Console, progress: Console) -> int:
    """Simulates, writes a folder under `out_folder`, prints; the exit code. Raises UsageProblem."""
    with progress.status("drawing the workload"):
        chosen = plan(asked)
    folder = _folder(out_folder)
    try:
        found, told, comparison = await _into(folder, chosen, progress)
    finally:
        if not any(folder.iterdir()):  # interrupted
            folder.rmdir()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_comparison(out, chosen, comparison, told, folder)
    return 0


async def _into(folder: Path, chosen: SimulationPlan, progress: Console) -> tuple[dict[str, Any], Told, Comparison]:
    """Simulates and writes all files; returns what summary.json holds, and what it was made of."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=progress,
        transient=True,
    ) as bar:
        runs = await _all_runs(chosen, bar)
        comparison = compare(chosen.systems, chosen.settings, runs)
        recorded = await _recorded(chosen, comparison, runs, bar)
    told = tell(chosen, comparison)
    with progress.status("drawing"):
        from treadle_cli.simulate.page import write_page  # a second of imports, which bad options need not wait for
        from treadle_cli.simulate.picture import draw

        shown = scene(recorded, chosen.settings[0].workload, comparison)
        draw(shown, title(shown), heading(chosen), folder / PICTURE)
        write_page(shown, title(shown), heading(chosen), comparison, told, folder / PAGE)
        found = document(chosen, comparison, told, folder)
        (folder / SUMMARY).write_text(json.dumps(found, indent=1) + "\n")
        write_trajectories(chosen, runs, folder / TRAJECTORIES)
    return found, told, comparison


def title(shown: Scene) -> str:
    """The makespans in a line."""
    spans = " · ".join(f"{panel.name} {panel.makespan_s:.0f} s" for panel in shown.panels)
    return f"Makespan: {spans}"


async def _all_runs(chosen: SimulationPlan, bar: Progress) -> dict[str, list[Run]]:
    """Of each system one run a seed, on the degree that suits it best."""
    jobs = [
        job
        for system in chosen.systems
        for index, setting in enumerate(chosen.settings)
        for job in jobs_of(system, setting, index, chosen.degree)
    ]
    task = bar.add_task("simulating", total=len(jobs))
    best: dict[tuple[str, int], Run] = {}

    def heard(job: Job, run: Run) -> None:
        bar.update(task, advance=1, description=f"{job.system.name} on {run.cluster.describe()}")
        key = (job.system.name, job.index)
        if key not in best or _better(run, best[key]):
            best[key] = run

    await simulate_all(jobs, heard)
    return {
        system.name: [best[system.name, index] for index in range(len(chosen.settings))] for system in chosen.systems
    }


def _better(run: Run, other: Run) -> bool:
    """Sooner; of two that end at once, the one of fewer GPUs an engine, whichever came first from its core."""
    return (run.outcome.makespan_s, -len(run.cluster.engines)) < (
        other.outcome.makespan_s,
        -len(other.cluster.engines),
    )


async def _recorded(
    chosen: SimulationPlan, comparison: Comparison, runs: dict[str, list[Run]], bar: Progress
) -> list[Run]:
    """The first seed's runs of the systems to draw, once more and with their spans."""
    names = drawn(chosen.systems, comparison)
    jobs = []
    for system in chosen.systems:
        if system.name in names:
            run = runs[system.name][0]
            degree = 0 if system.allocated and not chosen.degree else run.cluster.engines[0].gpus
            jobs.append(Job(system, chosen.settings[0], 0, degree, record=True))
    task = bar.add_task("recording", total=len(jobs))
    found: dict[str, Run] = {}

    def heard(job: Job, run: Run) -> None:
        bar.update(task, advance=1, description=f"recording {job.system.name}")
        found[job.system.name] = run

    await simulate_all(jobs, heard)
    return [found[name] for name in names]


def _folder(out: Path) -> Path:
    try:
        return new_folder(out)
    except OSError as error:
        raise UsageProblem(f"--out: {out}: {error.strerror}") from error
