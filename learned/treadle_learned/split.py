"""Training, validation and test by prompt: no prompt is in two parts, whoever asks and in whatever order.

A prompt's part follows from its name and the seed alone, so that what was held out once stays so when transcripts are
added.
"""

import math
import zlib
from collections.abc import Sequence
from enum import StrEnum

from treadle_learned.transcript import Transcript


class Part(StrEnum):
    """What a prompt's trajectories are for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


VALIDATION_SHARE = 0.15  # a fold: stops the training, sets the quantiles right, and chooses between estimators
TEST_SHARE = 0.25  # only ever reported on
VALIDATION, FOLDS = 0, 5  # (1 - TEST_SHARE) / VALIDATION_SHARE
_STEPS = 1 << 32


def part_of(prompt_id: str, seed: int = 0) -> Part:
    """Where a prompt belongs."""
    fold = fold_of(prompt_id, seed)
    if fold < 0:
        return Part.TEST
    return Part.VALIDATION if fold == VALIDATION else Part.TRAIN


def fold_of(prompt_id: str, seed: int = 0) -> int:
    """Which member of an ensemble is fitted without a prompt: from 0 (VALIDATION, which a trained backbone has not read
    either) to FOLDS - 1. Below 0 for a test prompt."""
    at = zlib.crc32(f"{seed}/{prompt_id}".encode()) / _STEPS
    return math.floor((at - TEST_SHARE) / VALIDATION_SHARE)


def split(transcripts: Sequence[Transcript], seed: int = 0) -> dict[Part, list[Transcript]]:
    """The transcripts of each part, in their order."""
    parts: dict[Part, list[Transcript]] = {part: [] for part in Part}
    for transcript in transcripts:
        parts[part_of(transcript.prompt_id, seed)].append(transcript)
    return parts
