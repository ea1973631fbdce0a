"""What the learned model is asked: a trajectory's numbers and texts at the end of a step, as they were in training."""

from dataclasses import dataclass

from treadle_core.estimator import Forecast, Progress
from treadle_core.evidence import Evidence
from treadle_learned.features import Vector, features, versions_behind
from treadle_learned.transcript import Turn, version_number

from treadle_predictor.recordings import Recording


@dataclass(frozen=True)
class Question:
    """turns: finished, with their texts; the tool of the last one still runs. prompt: empty where it is not known."""

    progress: Progress
    features: Vector
    prompt: str
    turns: tuple[Turn, ...]


def question(
    progress: Progress, recording: Recording, forecast: Forecast, evidence: Evidence, prompt: str
) -> Question | None:
    """`forecast`: of the estimators without a model. None where the trajectory's group is not known."""
    found = evidence.group_of(progress.trajectory_id, progress.prompt_id)
    if found is None:
        return None
    group = found[1]
    running = [each for name, each in group.running.items() if name != progress.trajectory_id]
    sampled_by = evidence.sampled_by(progress.trajectory_id, progress.prompt_id)
    behind = versions_behind(version_number(recording.weight_version), sampled_by)
    vector = features(progress, recording.steps, group.ended.values(), running, forecast, behind)
    return Question(progress, vector, recording.prompt or prompt, tuple(recording.turns))
