"""What the learned model is asked."""

from dataclasses import dataclass

from treadle_core.ranking.estimator import Forecast, Progress
from treadle_core.ranking.evidence import Evidence
from treadle_learned.moments import Vector, features_of
from treadle_learned.transcript import Turn

from treadle_predictor.facts import Recording


@dataclass(frozen=True)
class Question:
    """A trajectory's features and texts at the end of a step, as in training. turns: finished, with their texts; the
    tool of the last one still runs. prompt: empty where it is not known."""

    progress: Progress
    features: Vector
    prompt: str
    turns: tuple[Turn, ...]


def make_question(
    progress: Progress, recording: Recording, forecast: Forecast, evidence: Evidence, prompt: str
) -> Question | None:
    """forecast: of the estimators without a model. None where the trajectory's group is not known."""
    features = features_of(progress, recording.steps, evidence, forecast, recording.weight_version)
    if features is None:
        return None
    return Question(progress, features, recording.prompt or prompt, tuple(recording.turns))
