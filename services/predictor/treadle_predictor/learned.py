"""Load, try, and refit versions of the learned model: the only module of the service that needs
torch to be imported.

Invariants: the version that answers is replaced only by one that has answered a trial question;
whatever is wrong with a new version, the old one stays, and `refused` names the reason. One refit
runs at a time, in a process of its own, which takes no time of the event loop or the model's
thread; however it ends, the service continues to answer.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from treadle_core.ranking.estimator import Progress
from treadle_learned.backbone import load_tokenizer
from treadle_learned.checkpoint import Checkpoint, ModelsFolder, load
from treadle_learned.errors import LearnedError
from treadle_learned.moments import FEATURES
from treadle_learned.transcript import Turn, write_transcripts
from treadle_runtime.errors import StartError

from treadle_predictor.config import PredictorSettings
from treadle_predictor.facts import Recordings
from treadle_predictor.model import LearnedModel
from treadle_predictor.question import Question
from treadle_predictor.worker import Worker

log = structlog.get_logger()

CHECK_EVERY_S = 1.0  # between two checks whether another version is in use, or a refit is due
TERMINATE_S = 5.0  # time that a refit's process has to end when the service stops
NICENESS = 10  # niceness of a refit's process
TRANSCRIPTS = "refit-transcripts.jsonl.gz"
TRIAL = "trial"


@dataclass(frozen=True)
class LearnedPart:
    """Learned model and its helpers, which a predictor with a models folder has beside the other
    estimators."""

    loader: "ModelLoader"
    worker: Worker
    recordings: Recordings

    def on_start(self, trajectory_id: str, prompt: str) -> None:
        """Have the prompt read while the trajectory's first step runs."""
        if self.loader.leads:
            self.worker.begin(trajectory_id, prompt)


async def load_learned_part(
    settings: PredictorSettings, folder: Path
) -> tuple[LearnedPart, list[Callable[[], Coroutine[Any, Any, None]]]]:
    """Return the learned part and the tasks that it needs. The version in use is loaded already; a
    version that is refused is only logged. Raises StartError for a tokenizer that cannot be
    loaded."""
    torch.set_num_threads(settings.threads)
    recordings = Recordings(lambda ids: "")
    if settings.tokenizer:
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, settings.tokenizer)
        except LearnedError as error:
            raise StartError(
                f"TREADLE_PREDICTOR_TOKENIZER={settings.tokenizer!r} is refused: {error}"
            ) from error
        recordings.decode = tokenizer.decode

    def use_tokenizer(model: LearnedModel) -> None:
        if not settings.tokenizer and model.backbone is not None:
            recordings.decode = model.backbone.tokenizer.decode

    worker = Worker(settings.deadline_s, settings.gather_s, settings.most_batch)
    loader = ModelLoader(folder, worker, settings.kept_bytes, use_tokenizer)
    await loader.check()
    tasks: list[Callable[[], Coroutine[Any, Any, None]]] = [loader.run, worker.run]
    if settings.refit_every:
        tasks.append(Refits(folder, recordings, settings).run)
    return LearnedPart(loader, worker, recordings), tasks


class ModelLoader:
    """Loader of the version in use into the worker. on_loaded: called with each version that begins
    to answer. most_bytes: the bound of what is kept of trajectories."""

    def __init__(
        self,
        folder: Path,
        worker: Worker,
        most_bytes: int,
        on_loaded: Callable[[LearnedModel], None],
    ) -> None:
        self._models = ModelsFolder(folder)
        self.checkpoint: Checkpoint | None = None
        self.refused = ""
        self._worker = worker
        self._most_bytes = most_bytes
        self._on_loaded = on_loaded
        self._checked: Path | None = None

    @property
    def leads(self) -> bool:
        """Return whether the predictor uses the model at all."""
        return self.checkpoint is not None and self.checkpoint.leads

    @property
    def version(self) -> str:
        """Return the version that answers; empty where none does."""
        return self.checkpoint.version if self.checkpoint is not None else ""

    async def run(self) -> None:
        """Follow the version in use, for ever."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_EVERY_S)

    async def check(self) -> None:
        """Load the version in use, where it is another one."""
        try:
            current = await asyncio.to_thread(self._models.current)
            if current is None or current == self._checked:
                return
            self._checked = current
            model = await asyncio.to_thread(load_model, current, self._most_bytes)
        except (LearnedError, OSError) as error:
            if self.refused != str(error):
                log.error("the learned model is refused", error=str(error), answering=self.version)
            self.refused = str(error)
            return
        self._worker.model = model
        self.checkpoint = model.checkpoint
        self.refused = ""
        self._on_loaded(model)
        log.info("the learned model answers", version=self.version, leads=self.leads)


def load_model(folder: Path, most_bytes: int) -> LearnedModel:
    """Load a version and let it answer a trial question. Raises LearnedError with what is wrong."""
    checkpoint = load(folder)
    backbone = checkpoint.load_backbone() if checkpoint.reads_text else None
    model = LearnedModel(checkpoint, backbone, most_bytes)
    turn = Turn(8, text="1. look at the files")
    question = Question(
        Progress(TRIAL, TRIAL, 1, 8, 16, 8), np.zeros(len(FEATURES), np.float32), "a task", (turn,)
    )
    try:
        (forecast,) = model.answer([question])
    except (
        ValueError,
        RuntimeError,
    ) as error:  # quantiles that are no numbers, shapes that do not fit
        raise LearnedError(
            f"{folder}: does not answer ({str(error).splitlines()[0]}); export it again"
        ) from error
    if forecast is None:
        raise LearnedError(f"{folder}: does not answer; export it again")
    if model.readings is not None:
        model.readings.forget(TRIAL)
    return model


class Refits:
    """Trainer of the next version after every `refit_every` ended trajectories, which it then
    promotes: the policy changes with every update of its weights, and so do its lengths. It owns
    the files `refit-*` in the models folder."""

    def __init__(self, folder: Path, recordings: Recordings, settings: PredictorSettings) -> None:
        self._folder = folder
        self._recordings = recordings
        self._settings = settings
        self._done_at = 0  # trajectories that had ended at the last refit

    async def run(self) -> None:
        """Refit when it is due, for ever; terminate a refit that runs when the service stops."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            ended = self._recordings.ended_total
            if ended - self._done_at >= self._settings.refit_every:
                self._done_at = ended
                await self._refit(f"refit-{ended}-{os.getpid()}")

    async def _refit(self, version: str) -> None:
        transcripts, file = tuple(self._recordings.ended), self._folder / TRANSCRIPTS

        def write() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_transcripts(transcripts, file)

        try:
            await asyncio.to_thread(write)
            code, output, complaint = await self._train(file, version)
        except OSError as error:
            log.error("a refit could not start", version=version, error=str(error))
            return
        if code == 0:
            log.info("refitted", version=version, trajectories=len(transcripts), said=output)
        else:
            log.error(
                "a refit failed; the old version goes on answering",
                version=version,
                code=code,
                error=complaint,
            )

    async def _train(self, file: Path, version: str) -> tuple[int, str, str]:
        """Run the process that trains, and return its exit code, its stdout and the end of its
        stderr."""
        options = ["--transcripts", str(file), "--models", str(self._folder), "--version", version]
        options += ["--child-of", str(os.getpid())]
        options += ["--backbone", self._settings.backbone] if self._settings.backbone else []
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(NICENESS), sys.executable, "-m", "treadle_learned", *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(self._settings.threads)},
        )
        try:
            output, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(TERMINATE_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
        return process.returncode or 0, output.decode().strip(), complaint.decode().strip()[-400:]
