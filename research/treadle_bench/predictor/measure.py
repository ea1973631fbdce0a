"""How well each estimator knows the remaining tokens of a trajectory, step by step (Heddle §7.2,
Figure 13).

Every prompt is tested by estimators that were fitted without it (held_out.py). Prompts are dealt
into folds in `repeats` ways, because a share moves by some points from one way to the next. `rows`:
for each data set, step and estimator the scores of `treadle_learned.scores`, each with a bootstrap
interval over prompts, and `regret`, which is one number for all steps, with its range over folds.
`data`: what was read. `p50_ms`, `p99_ms`: of predictions by the service (latency.py); absent where
no step has a text.

Regret is what planning with an estimator costs. The trajectories of each test fold are one batch on
ENGINES simulated engines that hold a part of them at once (OVERSUBSCRIBED), so that both the place
and the order of trajectories matter. Treadle's whole policy plays it, with plans hedged by the
estimator's quantiles. The estimator is asked at the opening and after each step up to
`held_out.LAST_TURN`. Regret is the makespan over that of the same rollout with every length known,
less 1. It can be below 0: the policy is a heuristic, also when it knows the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import track
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.engines import DEFAULT_MODEL, default_model_folder
from treadle_cli.predictor.transcripts import transcripts_of_works
from treadle_core.model import Estimate
from treadle_sim.cluster import homogeneous
from treadle_sim.driver import Driver
from treadle_sim.engine_model import engine_model
from treadle_sim.systems import TREADLE_HOMOGENEOUS
from treadle_sim.workloads.workload import TrajectoryWork, Workload, groups, read_traces

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.predictor.page import draw, page_values
from treadle_bench.predictor.recorded import Recorded, RecordedPredictor
from treadle_bench.public_traces import read_public
from treadle_bench.summary import rounded

if TYPE_CHECKING:
    from treadle_learned.moments import Moment
    from treadle_learned.scores import Asked
    from treadle_learned.transcript import Transcript

LLM, ACCELERATOR = "Qwen3-14B", "H200"
ENGINES = 4
OVERSUBSCRIBED = 4  # trajectories for each slot


@dataclass(frozen=True)
class Source:
    """A data set of --data. prompts: how many are used, drawn by the seed, each with all its
    samples; 0: all. task_of: the part of a prompt's name that determines its text."""

    name: str
    prompts: int = 0
    task_of: Callable[[str], str] = str


SOURCES = (
    Source("swebench_verified_mini_gemini3"),
    Source("tau_airline_gpt4o"),
    # Its 2,886 prompts are 74 tasks under 39 models; steps are counted, and only the task has a
    # text.
    Source("mcpmark", prompts=100, task_of=lambda prompt_id: prompt_id.partition("/")[2]),
)


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises UsageProblem, TraceFileError, PublicTraceError, OSError."""
    # Imported here: torch takes seconds, and the other benches do not need it.
    from treadle_learned.backbone import Backbone
    from treadle_learned.examples import States
    from treadle_learned.reading import Bounds
    from treadle_learned.scores import rows
    from treadle_learned.transcript import LearnedError

    from treadle_bench.predictor import latency
    from treadle_bench.predictor.held_out import ask_estimators, deal, pool

    bounds = Bounds()
    found: list[dict[str, Any]] = []
    data: list[dict[str, Any]] = []
    with_texts: list[Transcript] = []

    def show_reading(over: Iterable[int], count: int) -> Iterable[int]:
        return track(over, "reading", count, console=options.progress)

    try:
        sets = list(_read_sources(options))
        backbone = Backbone.load(_backbone_folder(options.model))
        for source, works in sets:
            transcripts = transcripts_of_works(works)
            options.progress.print(f"{source.name}: {len(transcripts)} trajectories")
            has_text = any(transcript.has_text for transcript in transcripts)
            states = States(backbone, transcripts, bounds) if has_text else None
            with_texts += [
                transcript
                for transcript in transcripts
                if any(turn.text for turn in transcript.turns)
            ]
            deals = []
            for seed in options.seeds:
                dealt = deal(transcripts, seed=seed, task_of=source.task_of)
                size = backbone.hidden_size
                deals.append(
                    ask_estimators(transcripts, dealt, states, hidden_size=size, track=show_reading)
                )
                options.progress.print(f"{source.name}: deal {len(deals)}/{options.repeats}")
            asked = pool(deals)
            played = track(
                np.unique(asked.parts).tolist(),
                f"{source.name}: rollouts",
                console=options.progress,
            )
            costs = {
                estimator: {
                    "regret": float(np.mean(of_folds)),
                    "regret_range": [min(of_folds), max(of_folds)],
                }
                for estimator, of_folds in measure_regrets(works, asked, played).items()
            }
            found += [
                {**row, **costs[row["estimator"]]}
                for row in rows(source.name, asked, seed=options.seed)
            ]
            data.append(
                {
                    "name": source.name,
                    "trajectories": len(works),
                    "prompts": len(groups(works)),
                    "drawn": bool(source.prompts),
                    "step_texts": any(step.text for work in works for step in work.steps),
                    "prompt_texts": any(work.prompt for work in works),
                }
            )
    except LearnedError as error:
        raise UsageProblem(str(error)) from error
    return {
        "backbone": Path(backbone.name).name,
        "bounds": {name: getattr(bounds, name) for name in Bounds.__dataclass_fields__},
        "seeds": [options.seed],
        "repeats": options.repeats,
        "traces": options.traces.name if options.traces is not None else None,
        "data": data,
        "rows": rounded(found),
        **await latency.measure(with_texts, backbone, options),
    }


def draw_prompts(works: Sequence[TrajectoryWork], most: int, seed: int) -> list[TrajectoryWork]:
    """All trajectories, in their order, of `most` prompts that are drawn without replacement; 0: of
    all prompts."""
    names = list(groups(works))
    if not most or len(names) <= most:
        return list(works)
    kept = {
        names[at] for at in np.random.default_rng([seed, 3]).permutation(len(names))[:most].tolist()
    }
    return [work for work in works if work.prompt_id in kept]


def _read_sources(options: BenchOptions) -> Iterator[tuple[Source, Sequence[TrajectoryWork]]]:
    if options.traces is not None:
        yield Source(options.traces.name), read_traces(options.traces)
    elif options.data is not None:
        for source in SOURCES:
            works = read_public(source.name, options.data, options.seed)
            yield source, draw_prompts(works, source.prompts, options.seed)
    else:
        raise UsageProblem(
            "this bench needs trajectories to learn from: --traces FILE (docs/traces.md) or "
            "--data DIR"
        )


def _backbone_folder(model: str) -> str:
    if model != DEFAULT_MODEL:
        return model
    folder = default_model_folder()
    if not folder.exists():
        raise UsageProblem(
            f"{folder} is not there yet: `treadle demo` makes it; or pass --model FOLDER or NAME"
        )
    return str(folder)


def measure_regrets(
    works: Sequence[TrajectoryWork], asked: Asked, played: Iterable[int]
) -> dict[str, list[float]]:
    """The regret of each estimator, one for each fold in `played`. works: the trajectories, as the
    questions number them. Raises ValueError where a trajectory was not asked about at its opening.
    """
    folds = [_play_fold(works, asked, fold) for fold in played]
    return {
        name: [makespans[name] / makespans["oracle"] - 1.0 for makespans in folds]
        for name in asked.answers
    }


def _play_fold(works: Sequence[TrajectoryWork], asked: Asked, fold: int) -> Mapping[str, float]:
    """The makespan with each estimator."""
    of: dict[int, list[tuple[int, Moment]]] = {}  # of each trajectory, its questions by turn
    questions = ((at, asked.moments[at]) for at in np.flatnonzero(asked.parts == fold).tolist())
    for at, moment in sorted(questions, key=lambda question: question[1].turn):
        of.setdefault(moment.index, []).append((at, moment))
    batch = Workload(f"fold-{fold}", tuple(works[index] for index in of))
    slots = max(1, len(of) // (ENGINES * OVERSUBSCRIBED))
    cluster = homogeneous(engine_model(LLM, ACCELERATOR, 1, slots), ENGINES)
    system, makespans = TREADLE_HOMOGENEOUS, {}
    for name, quantiles in asked.answers.items():
        said = [
            [
                Recorded(moment.turn, moment.gen_tokens, Estimate(*quantiles[at].tolist()))
                for at, moment in own
            ]
            for own in of.values()
        ]
        predictor = RecordedPredictor(batch, said)
        driver = Driver(
            batch, cluster, system.policy, system.tuning, predictor, call_tokens=system.call_tokens
        )
        makespans[name] = driver.run().makespan_s
    return makespans


BENCH = Bench(
    "predictor",
    "Predictors of remaining tokens (--data or --traces): history, siblings, trees, the learned "
    "one; every prompt is "
    "tested once; regret in the simulator. --model: the backbone. About 40 minutes with --data.",
    measure,
    page=page_values,
    draw=draw,
    decides=("core/treadle_core/ranking", "learned/treadle_learned"),
)
