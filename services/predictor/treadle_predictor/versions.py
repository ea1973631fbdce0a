"""Which version of the learned model answers: the one that the folder's pointer names, once it is loaded and tried.

Invariant: the version that answers is replaced only by one that has answered a question; whatever is wrong with the
new one, the old one stays, and `refused` says why.

A version of the learned model from its folder, tried before anybody relies on it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import structlog
from treadle_core.ranking.estimator import Progress
from treadle_learned.checkpoint import Checkpoint, ModelsFolder, load
from treadle_learned.errors import CheckpointError, LearnedError
from treadle_learned.moments import FEATURES
from treadle_learned.transcript import Turn

from treadle_predictor.model import LearnedModel
from treadle_predictor.worker import Question, Worker

TRIAL = "trial"


def load_model(folder: Path, most_bytes: int) -> LearnedModel:
    """Raises LearnedError, saying what is wrong with it."""
    checkpoint = load(folder)
    backbone = checkpoint.load_backbone() if checkpoint.reads_text else None
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


log = structlog.get_logger()

LOOK_EVERY_S = 1.0

Loaded = Callable[[LearnedModel], None]


class ModelKeeper:
    """`on_loaded`: told of each version that begins to answer. most_bytes: of what is kept of trajectories."""

    def __init__(self, folder: Path, worker: Worker, most_bytes: int, on_loaded: Loaded) -> None:
        self.models = ModelsFolder(folder)
        self.checkpoint: Checkpoint | None = None
        self.refused = ""
        self._worker = worker
        self._most_bytes = most_bytes
        self._on_loaded = on_loaded
        self._looked_at: Path | None = None

    @property
    def leads(self) -> bool:
        """Whether the model is to be asked at all."""
        return self.checkpoint is not None and self.checkpoint.leads

    async def run(self) -> None:
        """Follows the pointer, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Loads what the pointer names, where that is new."""
        try:
            current = await asyncio.to_thread(self.models.current)
            if current is None or current == self._looked_at:
                return
            self._looked_at = current
            model = await asyncio.to_thread(load_model, current, self._most_bytes)
        except (LearnedError, OSError) as error:
            if self.refused != str(error):
                log.error("the learned model is refused", error=str(error), answering=self._version)
            self.refused = str(error)
            return
        self._worker.model = model
        self.checkpoint = model.checkpoint
        self.refused = ""
        self._on_loaded(model)
        log.info("the learned model answers", version=self._version, leads=self.leads)

    @property
    def _version(self) -> str:
        return self.checkpoint.version if self.checkpoint is not None else ""
