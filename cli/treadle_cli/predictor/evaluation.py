"""`treadle predictor evaluate`: a checkpoint and the estimators without a model, on prompts it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from treadle_learned.checkpoint import load
from treadle_learned.errors import TooFewError
from treadle_learned.examples import Part, split
from treadle_learned.head import remaining_tokens
from treadle_learned.held_out import PromptAverage
from treadle_learned.moments import replay
from treadle_learned.scores import STEPS, Asked, forecasts, rows
from treadle_learned.transcript import Transcript

COLUMNS = ("recall_top10", "pearson", "pearson_log", "pinball", "coverage_80")


def evaluated(
    checkpoint: Path,
    name: str,
    transcripts: Sequence[Transcript],
    bar: Callable[[str], Callable[[Iterable[int], int], Iterable[int]]],
) -> dict[str, Any]:
    """`rows` of `treadle_learned.scores` for learned, siblings and history, asked with the training prompts for
    history. Raises LearnedError."""
    found = load(checkpoint)
    parts = split(transcripts, int(found.notes.get("seed", 0)))
    tested, earlier = parts[Part.TEST], parts[Part.TRAIN]
    moments = replay(tested, earlier, asked=lambda turn: turn in STEPS)
    asked = found.examples(moments, tested, bar("reading")) if moments else None
    if asked is None:
        raise TooFewError(f"{name}: holds no test prompt (of 4 prompts one is): harvest more rollouts")
    answers = {
        "learned": remaining_tokens(found.head, asked),
        "siblings": forecasts(moments),
        "history": PromptAverage(earlier).predict(moments, tested),
    }
    return {
        "version": found.version,
        "leads": found.leads,
        "validation": found.notes.get("validation", {}),
        "test": {"prompts": len({each.prompt_id for each in tested}), "trajectories": len(tested)},
        "rows": rows(name, Asked(moments, tested, answers)),
    }


def table(found: dict[str, Any]) -> Table:
    """Of `evaluated`: each score with its 95% interval."""
    drawn = Table(title=f"{found['version']} on {found['test']['prompts']} test prompts, 95% intervals")
    for column in ("step", "trajectories", "estimator", *COLUMNS):
        drawn.add_column(column, justify="left" if column == "estimator" else "right")
    for row in found["rows"]:
        scores = [f"{row[name]:.2f} [{_interval(row[f'{name}_interval'])}]" for name in COLUMNS]
        drawn.add_row(str(row["step"]), str(row["trajectories"]), row["estimator"], *scores)
    return drawn


def _interval(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2f}, {interval[1]:.2f}"
