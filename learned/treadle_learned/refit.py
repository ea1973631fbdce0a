"""Train the next version of a models folder, and promote it if it is better.

Invariants: a version that is worse on the validation prompts than the one in use is never promoted;
the one in use stays until a better one is whole.
"""

from dataclasses import dataclass

import torch

from treadle_learned.checkpoint import Checkpoint, ModelsFolder, load
from treadle_learned.examples import TrainingSet, training_set
from treadle_learned.head import loss_held_out
from treadle_learned.training import Training, train
from treadle_learned.transcript import Transcript


@dataclass(frozen=True)
class Refit:
    """Result of a training. loss: over the validation questions, of the member that was fitted
    without them; current_loss: of the version that was in use, on the same questions; None where
    there was none."""

    version: str
    promoted: bool
    loss: float
    current_loss: float | None


def refit(
    transcripts: list[Transcript],
    models: ModelsFolder,
    version: str,
    *,
    seed: int = 0,
    backbone: str = "",
) -> Refit:
    """Train `version`, and promote it if its loss is lower than that of the version in use, or none
    is in use.

    The split, the backbone and its adapter are those of the version in use: by another split it
    would be scored on prompts that it was trained on. Raises LearnedError, OSError.
    """
    models.check_new(version)
    folder = models.current()
    current = None if folder is None else load(folder)
    found = train(transcripts, _how(version, current, seed, backbone), models.folder / version)
    asked = training_set(transcripts, found.notes["seed"])
    loss = _loss(found, asked)
    current_loss = None if current is None else _loss(current, asked)
    promoted = current_loss is None or loss < current_loss
    if promoted:
        models.promote(version)
    return Refit(version, promoted, loss, current_loss)


def _how(version: str, current: Checkpoint | None, seed: int, backbone: str) -> Training:
    if current is None:
        return Training(version, backbone, seed=seed)
    seed = current.notes.get("seed", seed)
    if not current.reads_text:
        return Training(version, backbone, seed=seed)
    return Training(
        version, current.backbone, tuned=current.tuned, seed=seed, bounds=current.bounds
    )


def _loss(checkpoint: Checkpoint, asked: TrainingSet) -> float:
    examples = checkpoint.examples(asked.validation, asked.transcripts)
    return loss_held_out(checkpoint.head, examples, torch.zeros(len(examples), dtype=torch.long))
