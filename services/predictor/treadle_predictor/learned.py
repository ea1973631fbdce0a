"""Puts the learned part together: the only module of the service that needs torch to be imported."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from treadle_learned.backbone import load_tokenizer
from treadle_learned.errors import BackboneError
from treadle_runtime.lifecycle import ServerStartError

from treadle_predictor.asking import LearnedPart
from treadle_predictor.config import PredictorSettings
from treadle_predictor.keeper import ModelKeeper
from treadle_predictor.model import LearnedModel
from treadle_predictor.recordings import Recordings
from treadle_predictor.refits import Refits
from treadle_predictor.worker import Worker


async def learned_part(
    settings: PredictorSettings, folder: Path
) -> tuple[LearnedPart, list[Callable[[], Coroutine[Any, Any, None]]]]:
    """And the tasks that it needs. The version in use is loaded already; one that is refused is only said. Raises
    ServerStartError for a tokenizer that cannot be loaded."""
    torch.set_num_threads(settings.threads)
    recordings = Recordings(lambda ids: "")
    if settings.tokenizer:
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, settings.tokenizer)
        except BackboneError as error:
            raise ServerStartError(f"TREADLE_PREDICTOR_TOKENIZER={settings.tokenizer!r} is refused: {error}") from error
        recordings.decode = tokenizer.decode

    def note(model: LearnedModel) -> None:
        if not settings.tokenizer and model.backbone is not None:
            recordings.decode = model.backbone.tokenizer.decode

    worker = Worker(settings.deadline_s, settings.gather_s, settings.most_batch)
    keeper = ModelKeeper(folder, worker, settings.kept_bytes, note)
    await keeper.look()
    tasks: list[Callable[[], Coroutine[Any, Any, None]]] = [keeper.run, worker.run]
    if settings.refit_every:
        tasks.append(Refits(folder, recordings, settings).run)
    return LearnedPart(keeper, worker, recordings), tasks
