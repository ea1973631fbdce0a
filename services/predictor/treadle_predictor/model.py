"""The learned model at work: questions in, forecasts out, and what was read of each trajectory kept for its next step.

Used by one thread at a time. Invariants: a forecast never exceeds what the trajectory's cap leaves; what is kept is
bounded in bytes, the least recently asked about go first and are read afresh.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from treadle_core.estimator import Forecast, Progress, Source
from treadle_core.model import Estimate
from treadle_learned.backbone import Backbone
from treadle_learned.checkpoint import Checkpoint
from treadle_learned.read import Read
from treadle_learned.reading import Reader
from treadle_learned.together import read_together

from treadle_predictor.questions import Question

# Beside keys and values, of one trajectory: ids, texts, objects.
READING_BYTES = 16_384


@dataclass
class _Reading:
    reader: Reader
    turns: int = 0
    read: Read | None = None
    state: torch.Tensor | None = None  # after all that was read

    @property
    def size_bytes(self) -> int:
        return READING_BYTES + (self.read.size_bytes if self.read is not None else 0)


class LearnedModel:
    """backbone: None for a checkpoint that reads no text."""

    def __init__(self, checkpoint: Checkpoint, backbone: Backbone | None, most_bytes: int) -> None:
        self.checkpoint = checkpoint
        self.backbone = backbone
        self._most_bytes = most_bytes
        self._readings: OrderedDict[str, _Reading] = OrderedDict()
        self._bytes = 0

    @torch.inference_mode()
    def answer(self, questions: Sequence[Question]) -> list[Forecast | None]:
        """In their order; None where the model reads text and there is none yet."""
        asked = [at for at, question in enumerate(questions) if self.backbone is None or question.prompt]
        found: list[Forecast | None] = [None] * len(questions)
        if asked:
            some = [questions[at] for at in asked]
            features = torch.from_numpy(np.stack([question.features for question in some]))
            has_text = torch.full((len(some),), self.backbone is not None)
            logs = self.checkpoint.head(self._states(some), features, has_text)
            for at, quantiles in zip(asked, torch.expm1(logs).tolist(), strict=True):
                found[at] = self._forecast(questions[at].progress, *quantiles)
        return found

    def forget(self, trajectory_id: str) -> None:
        """It has ended. Forgetting what is not here is fine."""
        reading = self._readings.pop(trajectory_id, None)
        if reading is not None:
            self._bytes -= reading.size_bytes

    def _states(self, questions: Sequence[Question]) -> torch.Tensor:
        """[n, hidden_size]; zeros without a backbone."""
        if self.backbone is None:
            return torch.zeros(len(questions), self.checkpoint.hidden_size)
        readings = [self._reading(question) for question in questions]
        unread = [reading for reading in readings if reading.read is None or reading.read.ids != reading.reader.ids]
        before = sum(reading.size_bytes for reading in unread)
        if unread:
            answers = read_together(self.backbone, [(reading.reader.ids, reading.read) for reading in unread])
            for reading, (state, read) in zip(unread, answers, strict=True):
                reading.state, reading.read = state, read
        self._bytes += sum(reading.size_bytes for reading in unread) - before
        while self._bytes > self._most_bytes and self._readings:
            self.forget(next(iter(self._readings)))
        return torch.stack([reading.state for reading in readings if reading.state is not None])

    def _reading(self, question: Question) -> _Reading:
        backbone = self.backbone
        assert backbone is not None
        name = question.progress.trajectory_id
        reading = self._readings.get(name)
        if reading is None or reading.turns > len(question.turns):
            self.forget(name)
            reading = _Reading(Reader(self.checkpoint.bounds, tuple(backbone.tokenize(question.prompt))))
            self._readings[name] = reading
            self._bytes += reading.size_bytes
        self._readings.move_to_end(name)
        for at in range(reading.turns, len(question.turns)):
            observation = question.turns[at - 1].obs_text if at else ""
            text = question.turns[at].text
            reading.reader.step(tuple(backbone.tokenize(observation)), tuple(backbone.tokenize(text)))
        reading.turns = len(question.turns)
        return reading

    def _forecast(self, progress: Progress, tokens: list[float], turns: list[float]) -> Forecast:
        if progress.max_total_tokens:
            room = float(max(0, progress.max_total_tokens - progress.gen_tokens))
            tokens = [min(each, room) for each in tokens]
        return Forecast(Estimate(*tokens), Estimate(*turns), Source.MODEL, self.checkpoint.version)
