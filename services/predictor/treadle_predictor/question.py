"""Build the input of the learned model."""

from dataclasses import dataclass

from treadle_core.ranking.estimator import Forecast, Progress
from treadle_core.ranking.evidence import Evidence
from treadle_learned.moments import Vector, features_of
from treadle_learned.transcript import Turn

from treadle_predictor.facts import Recording


@dataclass(frozen=True)
class Question:
    """Input of the learned model at the end of a step: the same features and texts as in
    training."""

    progress: Progress
    features: Vector
    prompt: str
    """Text of the prompt; empty where it is not known."""

    turns: tuple[Turn, ...]
    """The finished turns with their texts; the tool of the last one still runs."""


def make_question(
    progress: Progress, recording: Recording, forecast: Forecast, evidence: Evidence, prompt: str
) -> Question | None:
    """Return the question about a trajectory; None where its group is not known.

    forecast: what the estimators without a model forecast. prompt: the text, where the recording
    has none.
    """
    features = features_of(progress, recording.steps, evidence, forecast, recording.weight_version)
    if features is None:
        return None
    return Question(progress, features, recording.prompt or prompt, tuple(recording.turns))
