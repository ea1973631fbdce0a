"""A version of the learned model from its folder, tried before anybody relies on it."""

from pathlib import Path

import numpy as np
from treadle_core.estimator import Progress
from treadle_learned.checkpoint import backbone_of, load
from treadle_learned.errors import CheckpointError
from treadle_learned.features import FEATURES
from treadle_learned.transcript import Turn

from treadle_predictor.model import LearnedModel
from treadle_predictor.questions import Question

TRIAL = "trial"


def load_model(folder: Path, most_bytes: int) -> LearnedModel:
    """Raises LearnedError, saying what is wrong with it."""
    checkpoint = load(folder)
    backbone = backbone_of(checkpoint) if checkpoint.reads_text else None
    model = LearnedModel(checkpoint, backbone, most_bytes)
    turn = Turn(8, text="1. look at the files")
    question = Question(Progress(TRIAL, TRIAL, 1, 8, 16, 8), np.zeros(len(FEATURES), np.float32), "a task", (turn,))
    try:
        (forecast,) = model.answer([question])
    except (ValueError, RuntimeError) as error:  # quantiles that are no numbers, shapes that do not fit
        raise CheckpointError(f"{folder}: does not answer ({str(error).splitlines()[0]}); export it again") from error
    if forecast is None:
        raise CheckpointError(f"{folder}: does not answer; export it again")
    model.forget(TRIAL)
    return model
