"""Train the next version of a models folder, and promote it if it is better: `python -m treadle_learned.refit
--transcripts FILE --models DIR --version NAME`.

A predictor service runs this as a process of its own, at a low priority. Invariants: a version that is worse on the
validation prompts than the one in use is never promoted; the one in use stays until a better one is whole. Prints one
JSON line on success; otherwise one line on stderr, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging

from treadle_learned.checkpoint import Checkpoint, ModelsFolder, load
from treadle_learned.errors import LearnedError
from treadle_learned.examples import TrainingSet, training_set
from treadle_learned.head import loss_held_out
from treadle_learned.training import Training, train
from treadle_learned.transcript import Transcript, read_transcripts

REFUSED = 2  # exit code
PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(frozen=True)
class Refit:
    """The result. loss: over the validation questions, of the member that was fitted without them; current_loss: of the
    version that was in use, on the same questions; None where there was none."""

    version: str
    promoted: bool
    loss: float
    current_loss: float | None


def refit(
    transcripts: list[Transcript], models: ModelsFolder, version: str, *, seed: int = 0, backbone: str = ""
) -> Refit:
    """Train `version`, and promote it if its loss is lower than that of the version in use, or none is in use.

    The split, the backbone and its adapter are those of the version in use: by another split it would be scored on
    prompts that it was trained on. Raises LearnedError, OSError."""
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
    return Training(version, current.backbone, tuned=current.tuned, seed=seed, bounds=current.bounds)


def _loss(checkpoint: Checkpoint, asked: TrainingSet) -> float:
    examples = checkpoint.examples(asked.validation, asked.transcripts)
    return loss_held_out(checkpoint.head, examples, torch.zeros(len(examples), dtype=torch.long))


def main(words: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="treadle_learned.refit", description=__doc__)
    parser.add_argument("--transcripts", type=Path, required=True, help="file that was harvested")
    parser.add_argument("--models", type=Path, required=True, help="folder of versions")
    parser.add_argument("--version", required=True, help="of what is trained")
    parser.add_argument("--seed", type=int, default=0, help="where no version is in use")
    parser.add_argument("--child-of", type=int, default=0, metavar="PID", help="end when that process does")
    parser.add_argument("--backbone", default="", help="where the version in use has none; none: numbers alone")
    options = parser.parse_args(words)
    if options.child_of and not _end_with_parent(options.child_of):
        return REFUSED
    logging.disable_progress_bar()
    try:
        found = refit(
            read_transcripts(options.transcripts),
            ModelsFolder(options.models),
            options.version,
            seed=options.seed,
            backbone=options.backbone,
        )
    except (LearnedError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return REFUSED
    print(json.dumps(vars(found)))
    return 0


def _end_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends; False where the parent has ended already. Whenever that
    is, a version is whole or not there."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main())
