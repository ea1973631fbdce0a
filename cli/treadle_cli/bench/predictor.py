"""How well each estimator knows what is left of a trajectory, step by step (Heddle 7.2, Figure 13).

Every prompt is tested once, by estimators that were fitted without it (`treadle_learned.folds`). `rows`: data, step,
estimator, and the scores of `treadle_learned.scores`, each with a bootstrap interval over prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import track as tracked
from treadle_sim.public_traces import read_public
from treadle_sim.trace_file import read_traces
from treadle_sim.workload import TrajectoryWork

from treadle_cli.bench.options import BenchOptions
from treadle_cli.engines import DEFAULT_MODEL, default_model_folder
from treadle_cli.problems import UsageProblem

if TYPE_CHECKING:
    from treadle_learned.examples import Track
    from treadle_learned.transcript import Transcript

NAME = "predictor"
TEXTS = ("swebench_verified_mini_gemini3", "tau_airline_gpt4o")  # of --data, those with texts
DIGITS = 4


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises UsageProblem, TraceFileError, PublicTraceError."""
    try:
        from treadle_learned.backbone import Backbone
        from treadle_learned.comparison import rows
        from treadle_learned.errors import LearnedError
        from treadle_learned.examples import States
        from treadle_learned.folds import answered, folds
        from treadle_learned.reading import Bounds
    except ModuleNotFoundError as error:
        raise UsageProblem(f"{error.name} is not installed: pip install 'treadle[learned]'") from error
    sets = {name: _transcripts(works) for name, works in _works(options).items()}
    bounds = Bounds()
    found: list[dict[str, Any]] = []
    try:
        backbone = Backbone.load(_backbone(options.model))
        for name, transcripts in sets.items():
            options.progress.print(f"{name}: {len(transcripts)} trajectories")
            with_text = any(transcript.has_text for transcript in transcripts)
            states = States(backbone, transcripts, bounds) if with_text else None
            dealt = folds(transcripts, seed=options.seed)
            asked = answered(transcripts, dealt, states, hidden_size=backbone.hidden_size, track=_bar(name, options))
            found += rows(name, asked, seed=options.seed)
    except LearnedError as error:
        raise UsageProblem(str(error)) from error
    return {
        "backbone": Path(backbone.name).name,
        "bounds": {name: getattr(bounds, name) for name in Bounds.__dataclass_fields__},
        "seeds": [options.seed],
        "repeats": 1,
        "rows": [_rounded(row) for row in found],
    }


def _bar(name: str, options: BenchOptions) -> Track:
    def track(over: Iterable[int], count: int) -> Iterable[int]:
        return tracked(over, f"{name}: reading", count, console=options.progress)

    return track


def _works(options: BenchOptions) -> Mapping[str, Sequence[TrajectoryWork]]:
    if options.traces is not None:
        return {options.traces.name: read_traces(options.traces)}
    if options.data is not None:
        return {name: read_public(name, options.data, options.seed) for name in TEXTS}
    raise UsageProblem("this bench needs trajectories to learn from: --traces FILE (docs/traces.md) or --data DIR")


def _transcripts(works: Sequence[TrajectoryWork]) -> list[Transcript]:
    """As a rollout of their own."""
    from treadle_learned.transcript import Transcript, Turn

    return [
        Transcript(
            f"{work.prompt_id}#{work.sample}",
            "traces",
            work.prompt_id,
            work.prompt_tokens,
            tuple(Turn(step.gen_tokens, step.obs_tokens, step.text, step.obs_text) for step in work.steps),
            work.censored,
            work.prompt,
        )
        for work in works
    ]


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
