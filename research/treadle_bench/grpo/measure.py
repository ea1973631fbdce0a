"""A training run through the mesh: GRPO on a small model, with every asynchronous bound, with and
without shaping.

Each run is `examples/grpo/train.py` as a process of its own, against a mesh of two SGLang engines;
between two runs all KV is forgotten, since weight versions have the same names in each. The base
model is pretrained once, with a seed of its own, and kept with the converted models. Cells of one
seed have the same questions, adapters and sampling seeds. What shapes is a soft length cap, with
each bound, and first K, which starts more than it keeps, with bound 0.

The last run is disturbed: its trainer, the rollout service and an engine are killed by SIGKILL, one
after the other, and started again. It must do every step once, each with whole groups.

Keys: `reward_first`, `reward_last`: means over the first and the last WINDOW steps, of the
trajectories that were trained on, as the task scores them (without what a cap takes away); `gain`:
their difference, `gain_interval`: its 95% interval over seeds (Student's t). `held_out`: reward on
questions that are never trained on, of all samples, before and after. `step_s`: from the end of a
step to the end of the next; its parts overlap where the bound is above 0: `rollout_s`, from a
rollout's begin to the end of its last trajectory; `reward_s`, from there until all are scored and
submitted; `train_s`, from the batch to its checkpoint; `sync_s`, until every engine serves the new
weights: means over the steps but the first. `rollout_ratio`: unshaped rollout_s over shaped, of
equal bound and seed. `sampled_tokens`: longest and mean over the trajectories that ended. `drift`:
mean of k3 and clip fraction over steps (treadle.training.measure_drift), before the step's first
update. The keys at the top are those of bound 0 without shaping; `shaped` has those of bound 0 with
first K.
"""

import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.engines import EnginePlan, default_model_folder, prepare_model
from treadle_cli.mesh.guardian import kill_sessions
from treadle_cli.mesh.mesh import Mesh, MeshPlan, StartBoard
from treadle_cli.mesh.processes import Child, ProcessError, ProcessTree, describe_exit

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.grpo.page import draw, page_values
from treadle_bench.processes import run_tree
from treadle_bench.summary import rounded

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "grpo" / "train.py"
PRETRAIN_STEPS = 3_000
UNSHAPED, CAP, FIRST_K = "none", "cap", "first-k"
SETTINGS = [(0, UNSHAPED), (0, CAP), (0, FIRST_K), (1, UNSHAPED), (1, CAP), (2, UNSHAPED), (2, CAP)]
WINDOW = 5
SLOTS = 64  # all trajectories of a rollout decode at once: it ends when the longest does
# of SGLang: a message for each token is a fifth of a step on two cores
FLAGS = ("--stream-interval", "16")
STAGE = 3  # the trainer stops before the services
DRIFT = ("k3", "clip_fraction", "mean_abs")
PARTS = ("rollout_s", "reward_s", "train_s", "sync_s")


@dataclass(frozen=True)
class Size:
    """steps of a run; prompts of a step; samples of a prompt that are kept; pretraining steps;
    held-out questions."""

    steps: int
    prompts: int
    keep: int
    pretrain: int
    evaluated: int


FULL, QUICK = Size(20, 8, 8, PRETRAIN_STEPS, 32), Size(4, 2, 4, 20, 4)


@dataclass(frozen=True)
class Cell:
    """One run."""

    bound: int
    shaping: str
    seed: int

    @property
    def name(self) -> str:
        return f"bound-{self.bound}-{self.shaping}-seed-{self.seed}"


class Trainers:
    """Runs the example on one mesh."""

    def __init__(
        self, tree: ProcessTree, mesh: Mesh, folder: Path, size: Size, options: BenchOptions
    ) -> None:
        self._tree, self._mesh, self._folder, self._size, self._options = (
            tree,
            mesh,
            folder,
            size,
            options,
        )

    async def play(self, cell: Cell) -> dict[str, Any]:
        """One undisturbed run. Raises ProcessError."""
        await self._mesh.forget_caches()
        began_s = time.monotonic()
        child = self._start(cell)
        await child.exited.wait()
        if child.returncode != 0:
            raise ProcessError(child, describe_exit(child.returncode))
        found = read_run(self._folder / cell.name, cell)
        took_s = time.monotonic() - began_s
        self._options.progress.print(
            f"{cell.name}: reward {found['reward_first']:.2f} to {found['reward_last']:.2f}, "
            f"{found['step_s']:.1f} s a step, {took_s:.0f} s",
            highlight=False,
        )
        return found

    async def disturb(self, cell: Cell) -> dict[str, Any]:
        """One run in which the trainer, the rollout service and an engine are killed. Raises
        ProcessError."""
        await self._mesh.forget_caches()
        child = self._start(cell)
        deaths: dict[str, int] = {}
        kills = {
            "trainer": None,
            "rollout service": self._kill_rollout,
            "engine": self._kill_engine,
        }
        for number, (what, kill) in enumerate(kills.items(), start=1):
            await self._until_step(cell, child, number * self._size.steps // (len(kills) + 1))
            deaths[what] = len(_steps_of(self._folder / cell.name))
            if kill is None:
                os.kill(child.pid, signal.SIGKILL)
                await child.exited.wait()
                child = self._start(cell)
            else:
                await kill()
            self._options.progress.print(
                f"{what} killed after step {deaths[what]}", highlight=False
            )
        await child.exited.wait()
        if child.returncode != 0:
            raise ProcessError(child, describe_exit(child.returncode))
        steps = _steps_of(self._folder / cell.name)
        trained = [trajectory for step in steps for trajectory in step["trained"]]
        return {
            "killed_after_step": deaths,
            "steps": len(steps),
            "steps_in_order": [step["step"] for step in steps] == list(range(self._size.steps)),
            "trained_twice": len(trained) - len(set(trained)),
            "missing_trajectories": self._size.steps * self._size.prompts * self._size.keep
            - len(trained),
            "max_staleness": max(step["staleness"] for step in steps),
            "reward_last": fmean(step["reward"] for step in steps[-WINDOW:]),
        }

    async def _kill_rollout(self) -> None:
        child = self._mesh.service("rollout")
        os.kill(child.pid, signal.SIGKILL)
        await child.exited.wait()
        await self._mesh.restart_service("rollout")

    async def _kill_engine(self) -> None:
        """Another one takes its core."""
        engine = self._mesh.engines[0]
        kill_sessions({engine.child.pid})
        await engine.child.exited.wait()
        await self._mesh.until_up(self._mesh.start_engine(engine.kind, engine.units))

    async def _until_step(self, cell: Cell, child: Child, step: int) -> None:
        async def reached() -> bool | None:
            return len(_steps_of(self._folder / cell.name)) >= step or None

        await child.until(reached, f"step {step}", 600.0 + 120.0 * self._size.steps)

    def _start(self, cell: Cell) -> Child:
        size = self._size
        words = {
            "folder": self._folder / cell.name,
            "base": self._mesh.model_path,
            "scheduler": self._mesh.where.scheduler,
            "steps": size.steps,
            "bound": cell.bound,
            "shaping": cell.shaping,
            "seed": cell.seed,
            "prompts": size.prompts,
            "keep": size.keep,
            "evaluated": size.evaluated,
        }
        command = [
            sys.executable,
            str(PROGRAM),
            *(word for name, value in words.items() for word in (f"--{name}", str(value))),
        ]
        child = self._tree.start(f"trainer-{cell.name}", command, stage=STAGE)
        child.stopping = True  # its end is expected
        return child


async def measure(options: BenchOptions) -> dict[str, Any]:
    """--resume: cells of an earlier run of the same size. Raises UsageProblem, ProcessError."""
    if not PROGRAM.is_file():
        raise UsageProblem(
            f"grpo trains with {PROGRAM}, which is in a checkout alone: run pip install -e "
            "./bench there"
        )
    size = QUICK if options.quick else FULL
    seeds = options.seeds[:1] if options.quick else options.seeds
    asked = {"size": vars(size), "seeds": seeds}
    earlier = options.earlier or {}
    if earlier and any(earlier.get(key) != value for key, value in asked.items()):
        raise UsageProblem(
            "--resume: those figures are of another size or other seeds; use the same options"
        )
    runs: list[dict[str, Any]] = list(earlier.get("runs", []))
    disturbed = earlier.get("disturbed")
    cells = [Cell(bound, shaping, seed) for seed in seeds for bound, shaping in SETTINGS]
    missing = [cell for cell in cells if cell.name not in {run["name"] for run in runs}]
    async with training_mesh(size, options) as trainers:
        for cell in missing:
            runs.append(await trainers.play(cell))
            if options.pictures is not None:
                BENCH.write(make_figures(asked, runs, disturbed), options.pictures)
        if disturbed is None:
            disturbed = await trainers.disturb(Cell(1, CAP, options.seed + 1_000))
    return make_figures(asked, runs, disturbed)


@asynccontextmanager
async def training_mesh(size: Size, options: BenchOptions) -> AsyncIterator[Trainers]:
    """A mesh whose engines serve the base model, and what runs trainers on it. Raises
    ProcessError."""
    async with run_tree(options) as (tree, folder):
        base = await _pretrained(tree, options.engines, size)
        plan = options.engines
        plan = replace(
            plan, model=str(base), slots=SLOTS, weights="float", flags=(*FLAGS, *plan.flags)
        )
        with StartBoard(options.progress) as board:
            mesh = await Mesh.start(MeshPlan(plan, folder / "state", together=()), tree, board)
        yield Trainers(tree, mesh, folder / "runs", size, options)


async def _pretrained(tree: ProcessTree, plan: EnginePlan, size: Size) -> Path:
    """The folder of the base model, made at first use."""
    tokenizer = await prepare_model(tree, plan)
    base = default_model_folder().parent / f"grpo-checks-{size.pretrain}"
    options = {"folder": base, "base": base, "pretrain": size.pretrain, "tokenizer": tokenizer}
    command = [
        sys.executable,
        str(PROGRAM),
        *(word for name, value in options.items() for word in (f"--{name}", str(value))),
    ]
    child = tree.start("pretrain", command, stage=STAGE)
    child.stopping = True
    await child.exited.wait()
    if child.returncode != 0:
        raise ProcessError(child, describe_exit(child.returncode))
    return base


def _steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "steps").glob("*.json"))]


def read_run(folder: Path, cell: Cell) -> dict[str, Any]:
    """The figures of one run from its folder."""
    steps = _steps_of(folder)
    held_out = [
        json.loads(path.read_text()) for path in sorted((folder / "evaluations").glob("*.json"))
    ]
    rewards = [step["reward"] for step in steps]
    later = steps[1:]  # the first step pays for first calls
    lengths = [length for step in steps for length in step["tokens"]]
    return rounded(
        {
            "name": cell.name,
            "bound": cell.bound,
            "shaping": cell.shaping,
            "seed": cell.seed,
            "steps": len(steps),
            "rewards": rewards,
            "reward_first": fmean(rewards[:WINDOW]),
            "reward_last": fmean(rewards[-WINDOW:]),
            "held_out": [each["reward"] for each in held_out],
            **{part: fmean(step[part] for step in later) for part in ("step_s", *PARTS)},
            "rollouts_s": [step["rollout_s"] for step in steps],
            "steps_s": [step["step_s"] for step in steps],
            "max_staleness": max(step["staleness"] for step in steps),
            "mean_staleness": fmean(step["mean_staleness"] for step in steps),
            "sampled_tokens": {
                "mean": fmean(lengths),
                "longest": fmean(step["longest_tokens"] for step in steps),
            },
            "trained_tokens": fmean(step["trained_tokens"] for step in steps),
            "started": sum(step["started"] for step in steps),
            "kept": sum(step["kept"] for step in steps),
            "failed": sum(len(step["failed"]) for step in steps),
        }
    ) | {"drift": _mean_drift([step["drift"] for step in steps])}


def make_figures(
    asked: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], disturbed: Any
) -> dict[str, Any]:
    """The JSON of the runs that are there. disturbed: see Trainers.disturb, or None."""
    cells = [
        merge(found)
        for bound, shaping in SETTINGS
        if (found := [run for run in runs if (run["bound"], run["shaping"]) == (bound, shaping)])
    ]
    for cell in cells:
        if cell["shaping"] != UNSHAPED:
            cell.update(
                compare([run for run in runs if run["bound"] == cell["bound"]], cell["shaping"])
            )
    names = (
        "steps",
        "reward_first",
        "reward_last",
        "gain",
        "gain_interval",
        "held_out",
        "step_s",
        *PARTS,
    )
    at_once = {cell["shaping"]: cell for cell in cells if cell["bound"] == 0}
    compared = ("rollout_ratio", "reward_difference")

    def keys_of(shaping: str, keys: Sequence[str]) -> dict[str, Any]:
        return {key: at_once[shaping][key] for key in keys if key in at_once.get(shaping, {})}

    return {
        **asked,
        **keys_of(UNSHAPED, names),
        "shaped": keys_of(FIRST_K, (*names, *compared)),
        "max_staleness": max((run["max_staleness"] for run in runs), default=0),
        "cells": cells,
        "runs": list(runs),
        "disturbed": disturbed,
    }


def merge(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One cell over its seeds."""
    gains = [run["reward_last"] - run["reward_first"] for run in runs]
    numbers = ("reward_first", "reward_last", "step_s", *PARTS, "trained_tokens", "mean_staleness")
    return rounded(
        {
            "bound": runs[0]["bound"],
            "shaping": runs[0]["shaping"],
            "steps": runs[0]["steps"],
            "seeds": [run["seed"] for run in runs],
            **{name: fmean(run[name] for run in runs) for name in numbers},
            "gain": fmean(gains),
            "gain_interval": interval(gains),
            "held_out": [fmean(run["held_out"][at] for run in runs) for at in (0, -1)],
            "max_staleness": max(run["max_staleness"] for run in runs),
            "sampled_tokens": {
                name: fmean(run["sampled_tokens"][name] for run in runs)
                for name in ("mean", "longest")
            },
            "kept_share": sum(run["kept"] for run in runs) / sum(run["started"] for run in runs),
        }
    ) | {"drift": _mean_drift([run["drift"] for run in runs])}


def _mean_drift(drifts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """With three digits that count, however small."""
    return {name: float(f"{fmean(drift[name] for drift in drifts):.3g}") for name in DRIFT}


def compare(runs: Sequence[Mapping[str, Any]], shaping: str) -> dict[str, Any]:
    """Runs with `shaping` against unshaped ones of one bound, by seed; empty while no seed has
    both."""
    of = {(run["shaping"], run["seed"]): run for run in runs}
    seeds = [
        run["seed"] for run in runs if run["shaping"] == shaping and (UNSHAPED, run["seed"]) in of
    ]
    if not seeds:
        return {}
    found: dict[str, Any] = {}
    for name in ("rollout_s", "step_s"):
        ratios = [of[UNSHAPED, seed][name] / of[shaping, seed][name] for seed in seeds]
        found |= {
            name.replace("_s", "_ratio"): fmean(ratios),
            name.replace("_s", "_ratio_interval"): interval(ratios),
        }
    for name, at in (("reward_difference", "reward_last"), ("held_out_difference", "held_out")):
        both = [[of[which, seed][at] for which in (shaping, UNSHAPED)] for seed in seeds]
        differences = [
            shaped - unshaped if at == "reward_last" else shaped[-1] - unshaped[-1]
            for shaped, unshaped in both
        ]
        found |= {name: fmean(differences), f"{name}_interval": interval(differences)}
    return rounded(found)


def interval(values: Sequence[float]) -> list[float]:
    """95% interval of the mean by Student's t; of one value that value."""
    mean = fmean(values)
    if len(values) == 1:
        return [mean, mean]
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return [mean - half, mean + half]


BENCH = Bench(
    "grpo",
    "GRPO on a small model through a mesh with two engines: rewards, seconds by part, staleness "
    "and drift, for three asynchronous bounds, with and without a length cap, and with a trainer, "
    "a service and an engine killed. Starts engines; --resume goes on.",
    measure,
    engines=2,
    page=page_values,
    draw=draw,
    decides=("services/rollout",),
)
