"""Puts the learned part together: the only module of the service that needs torch to be imported.

Refits in the background: enough trajectories have ended, so a process of its own trains a candidate on them and
promotes it if it is better.

Purpose: the policy changes with every update of its weights, and so do its lengths. Invariants: one refit at a time;
training takes no time of the service's event loop or of its model's thread; however it ends, what answers goes on
answering. Owner of the files `refit-*` in the folder of models."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from treadle_learned.backbone import load_tokenizer
from treadle_learned.errors import BackboneError
from treadle_learned.transcript import Transcript, write_transcripts
from treadle_runtime.errors import StartError

from treadle_predictor.asking import LearnedPart
from treadle_predictor.config import PredictorSettings
from treadle_predictor.model import LearnedModel
from treadle_predictor.recordings import Recordings
from treadle_predictor.versions import ModelKeeper
from treadle_predictor.worker import Worker

log = structlog.get_logger()

LOOK_EVERY_S = 1.0
END_S = 5.0
KINDNESS = 10  # of the refit's process to everything else on the machine
TRANSCRIPTS = "refit-transcripts.jsonl.gz"


class Refits:
    """See the module."""

    def __init__(self, folder: Path, recordings: Recordings, settings: PredictorSettings) -> None:
        self._folder = folder
        self._recordings = recordings
        self._settings = settings
        self._done_at = 0  # trajectories that had ended at the last refit

    async def run(self) -> None:
        """Looks whether one is due, for ever; a refit that runs when the service stops is ended."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            ended = self._recordings.ended_total
            if ended - self._done_at >= self._settings.refit_every:
                self._done_at = ended
                await self._refit(tuple(self._recordings.ended), f"refit-{ended}-{os.getpid()}")

    async def _refit(self, transcripts: Sequence[Transcript], version: str) -> None:
        try:
            file = self._folder / TRANSCRIPTS
            await asyncio.to_thread(self._written, transcripts, file)
            code, said, complaint = await self._run(file, version)
        except OSError as error:
            log.error("a refit could not start", version=version, error=str(error))
            return
        if code == 0:
            log.info("refitted", version=version, trajectories=len(transcripts), said=said)
        else:
            log.error("a refit failed; the old version goes on answering", version=version, code=code, error=complaint)

    def _written(self, transcripts: Sequence[Transcript], file: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_transcripts(transcripts, file)

    async def _run(self, file: Path, version: str) -> tuple[int, str, str]:
        options = [
            "--transcripts",
            str(file),
            "--models",
            str(self._folder),
            "--version",
            version,
            "--child-of",
            str(os.getpid()),
        ]
        options += ["--backbone", self._settings.backbone] if self._settings.backbone else []
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(KINDNESS), sys.executable, "-m", "treadle_learned.refit", *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(self._settings.threads)},
        )
        try:
            said, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(END_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
        return process.returncode or 0, said.decode().strip(), complaint.decode().strip()[-400:]


async def learned_part(
    settings: PredictorSettings, folder: Path
) -> tuple[LearnedPart, list[Callable[[], Coroutine[Any, Any, None]]]]:
    """And the tasks that it needs. The version in use is loaded already; one that is refused is only said. Raises
    StartError for a tokenizer that cannot be loaded."""
    torch.set_num_threads(settings.threads)
    recordings = Recordings(lambda ids: "")
    if settings.tokenizer:
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, settings.tokenizer)
        except BackboneError as error:
            raise StartError(f"TREADLE_PREDICTOR_TOKENIZER={settings.tokenizer!r} is refused: {error}") from error
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
