"""How well each estimator knows what is left of a trajectory, step by step (Heddle 7.2, Figure 13).

Every prompt is tested by estimators that were fitted without it (`treadle_learned.held_out`), once for each of
`repeats` ways to deal the prompts into folds: from one to the next a share moves by some points. `rows`: data, step,
estimator, the scores of `treadle_learned.scores`, each with a bootstrap interval over prompts, and `regret` of
rollouts told by that estimator (`predictor_regret`), one number for all steps, with its range over folds. `data`:
what was read. `p50_ms`, `p99_ms`: of predictions by the service (`predictor_latency`); none where no step has a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import track as tracked
from treadle_cli.mesh.engines import DEFAULT_MODEL, default_model_folder
from treadle_cli.predictor.sources import transcripts_of_works
from treadle_cli.problems import UsageProblem
from treadle_sim.workloads.public_traces import read_public
from treadle_sim.workloads.workload import TrajectoryWork, groups, read_traces

from treadle_bench.options import BenchOptions
from treadle_bench.predictor import latency as predictor_latency
from treadle_bench.predictor.regret import folds_of, regrets

if TYPE_CHECKING:
    from treadle_learned.examples import Track
    from treadle_learned.scores import Asked
    from treadle_learned.transcript import Transcript

NAME = "predictor"
DIGITS = 4


@dataclass(frozen=True)
class Source:
    """A data set of --data. prompts: most that are used of it, drawn by the seed, each with all its samples; 0 for all.
    task_of: of a prompt's name what says its text."""

    name: str
    prompts: int = 0
    task_of: Callable[[str], str] = str


SOURCES = (
    Source("swebench_verified_mini_gemini3"),
    Source("tau_airline_gpt4o"),
    # Its 2,886 prompts are 74 tasks under 39 models; there are counts of steps, and no text but the task's.
    Source("mcpmark", prompts=100, task_of=lambda prompt_id: prompt_id.partition("/")[2]),
)


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises UsageProblem, TraceFileError, PublicTraceError, OSError."""
    try:
        from treadle_learned.backbone import Backbone
        from treadle_learned.errors import LearnedError
        from treadle_learned.examples import States
        from treadle_learned.held_out import ask_estimators, deal
        from treadle_learned.reading import Bounds
        from treadle_learned.scores import pool, rows
    except ModuleNotFoundError as error:
        raise UsageProblem(f"{error.name} is not installed: pip install 'treadle[learned]'") from error
    bounds = Bounds()
    found: list[dict[str, Any]] = []
    data: list[dict[str, Any]] = []
    told: list[Transcript] = []  # whose steps have texts
    sets = list(_works(options))
    try:
        backbone = Backbone.load(_backbone(options.model))
        for source, works in sets:
            transcripts = transcripts_of_works(works)
            options.progress.print(f"{source.name}: {len(transcripts)} trajectories")
            with_text = any(transcript.has_text for transcript in transcripts)
            states = States(backbone, transcripts, bounds) if with_text else None
            told += [transcript for transcript in transcripts if any(turn.text for turn in transcript.turns)]
            deals = []
            for repeat in range(options.repeats):
                dealt = deal(transcripts, seed=options.seed + repeat, task_of=source.task_of)
                track = _bar(source.name, options)
                deals.append(ask_estimators(transcripts, dealt, states, hidden_size=backbone.hidden_size, track=track))
                options.progress.print(f"{source.name}: deal {repeat + 1}/{options.repeats}")
            asked = pool(deals)
            costs = _regrets(source.name, works, asked, options)
            found += [{**row, **costs[row["estimator"]]} for row in rows(source.name, asked, seed=options.seed)]
            data.append(_described(source, works))
    except LearnedError as error:
        raise UsageProblem(str(error)) from error
    return {
        "backbone": Path(backbone.name).name,
        "bounds": {name: getattr(bounds, name) for name in Bounds.__dataclass_fields__},
        "seeds": [options.seed],
        "repeats": options.repeats,
        "traces": options.traces.name if options.traces is not None else None,
        "data": data,
        "rows": [_rounded(row) for row in found],
        **await predictor_latency.measure(told, backbone, options),
    }


def some_prompts(works: Sequence[TrajectoryWork], most: int, seed: int) -> list[TrajectoryWork]:
    """Of so many prompts, drawn without replacement, all trajectories, in their order. most: 0 for all prompts."""
    names = list(groups(works))
    if not most or len(names) <= most:
        return list(works)
    kept = {names[at] for at in np.random.default_rng([seed, 3]).permutation(len(names))[:most].tolist()}
    return [work for work in works if work.prompt_id in kept]


def _works(options: BenchOptions) -> Iterable[tuple[Source, Sequence[TrajectoryWork]]]:
    if options.traces is not None:
        yield Source(options.traces.name), read_traces(options.traces)
    elif options.data is not None:
        for source in SOURCES:
            works = read_public(source.name, options.data, options.seed)
            yield source, some_prompts(works, source.prompts, options.seed)
    else:
        raise UsageProblem("this bench needs trajectories to learn from: --traces FILE (docs/traces.md) or --data DIR")


def _described(source: Source, works: Sequence[TrajectoryWork]) -> dict[str, Any]:
    return {
        "name": source.name,
        "trajectories": len(works),
        "prompts": len(groups(works)),
        "drawn": bool(source.prompts),
        "step_texts": any(step.text for work in works for step in work.steps),
        "prompt_texts": any(work.prompt for work in works),
    }


def _regrets(
    name: str, works: Sequence[TrajectoryWork], asked: Asked, options: BenchOptions
) -> Mapping[str, dict[str, Any]]:
    """By estimator what goes into its rows."""
    played = tracked(folds_of(asked), f"{name}: rollouts", console=options.progress)
    return {
        estimator: {"regret": float(np.mean(of_folds)), "regret_range": (min(of_folds), max(of_folds))}
        for estimator, of_folds in regrets(works, asked, played).items()
    }


def _bar(name: str, options: BenchOptions) -> Track:
    def track(over: Iterable[int], count: int) -> Iterable[int]:
        return tracked(over, f"{name}: reading", count, console=options.progress)

    return track


def _backbone(model: str) -> str:
    if model != DEFAULT_MODEL:
        return model
    folder = default_model_folder()
    if not folder.exists():
        raise UsageProblem(f"{folder} is not there yet: `treadle demo` makes it; or pass --model FOLDER or NAME")
    return str(folder)


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, DIGITS)
        if isinstance(value, float)
        else [round(each, DIGITS) for each in value]
        if isinstance(value, tuple)
        else value
        for name, value in row.items()
    }
