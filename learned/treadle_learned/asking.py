"""Asks a checkpoint what it says at moments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from treadle_learned.checkpoint import Checkpoint, backbone_of
from treadle_learned.examples import Examples, States, Track, examples
from treadle_learned.head import QuantileHead
from treadle_learned.moments import Moment
from treadle_learned.scores import Floats
from treadle_learned.transcript import Transcript


def told(
    checkpoint: Checkpoint,
    moments: Sequence[Moment],
    transcripts: Sequence[Transcript],
    track: Track = lambda over, _: over,
) -> Examples:
    """The moments as its head takes them, in their order. Raises BackboneError, CheckpointError."""
    if not checkpoint.reads_text:
        return examples(moments, torch.zeros(len(moments), checkpoint.hidden_size), [False] * len(moments))
    states = States(backbone_of(checkpoint), transcripts, checkpoint.bounds)
    return examples(moments, *states.read(moments, track))


@torch.inference_mode()
def remaining_tokens(head: QuantileHead, asked: Examples) -> Floats:
    """p10, p50, p90 of each, [n, 3]."""
    logs = head(asked.hidden, asked.features, asked.has_text)[:, 0]
    return np.asarray(torch.expm1(logs).numpy(), np.float64)
