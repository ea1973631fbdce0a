"""Training, validation and test by prompt: no prompt is in two parts, whoever asks and in whatever order.

A prompt's part follows from its name and the seed alone, so that what was held out once stays so when transcripts are
added.
"""

import zlib
from collections.abc import Sequence
from enum import StrEnum

from treadle_learned.transcript import Transcript


class Part(StrEnum):
    """What a prompt's trajectories are for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


VALIDATION_SHARE = 0.15  # stops the training, sets the quantiles right, and chooses between estimators
TEST_SHARE = 0.25  # only ever reported on
_STEPS = 1 << 32


def part_of(prompt_id: str, seed: int = 0) -> Part:
    """Where a prompt belongs."""
    at = zlib.crc32(f"{seed}/{prompt_id}".encode()) / _STEPS
    if at < TEST_SHARE:
        return Part.TEST
    return Part.VALIDATION if at < TEST_SHARE + VALIDATION_SHARE else Part.TRAIN


def split(transcripts: Sequence[Transcript], seed: int = 0) -> dict[Part, list[Transcript]]:
    """The transcripts of each part, in their order."""
    parts: dict[Part, list[Transcript]] = {part: [] for part in Part}
    for transcript in transcripts:
        parts[part_of(transcript.prompt_id, seed)].append(transcript)
    return parts
