"""The learned model at work: questions in, forecasts out.

Used by one thread at a time. Invariant: a forecast never exceeds what the trajectory's cap leaves.
"""

from collections.abc import Sequence

import numpy as np
import torch
from treadle_core.model import Estimate
from treadle_core.ranking.estimator import Forecast, Progress, Source
from treadle_learned.backbone import Backbone
from treadle_learned.checkpoint import Checkpoint

from treadle_predictor.readings import Readings
from treadle_predictor.worker import Question


class LearnedModel:
    """backbone: None for a checkpoint that reads no text. most_bytes: of what is kept of trajectories."""

    def __init__(self, checkpoint: Checkpoint, backbone: Backbone | None, most_bytes: int) -> None:
        self.checkpoint = checkpoint
        self.backbone = backbone
        self._readings = Readings(backbone, checkpoint.bounds, most_bytes) if backbone is not None else None

    @property
    def gains_together(self) -> bool:
        """A processor reads eight steps in the time of eight; the first of them would wait for the last."""
        return self.backbone is None or self.backbone.device != "cpu"

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

    def begin(self, trajectory_id: str, prompt: str) -> None:
        """It will be asked about; its prompt is something to read ahead."""
        if self._readings is not None:
            self._readings.begin(trajectory_id, prompt)

    def read_ahead(self) -> bool:
        """A little of what will be asked about; False where nothing is left to read."""
        return self._readings is not None and self._readings.read_ahead()

    def forget(self, trajectory_id: str) -> None:
        """It has ended. Forgetting what is not here is fine."""
        if self._readings is not None:
            self._readings.forget(trajectory_id)

    def _states(self, questions: Sequence[Question]) -> torch.Tensor:
        """[n, hidden_size]; zeros without a backbone."""
        if self._readings is None:
            return torch.zeros(len(questions), self.checkpoint.hidden_size)
        return self._readings.states(questions)

    def _forecast(self, progress: Progress, tokens: list[float], turns: list[float]) -> Forecast:
        if progress.max_total_tokens:
            room = float(max(0, progress.max_total_tokens - progress.gen_tokens))
            tokens = [min(each, room) for each in tokens]
        return Forecast(Estimate(*tokens), Estimate(*turns), Source.MODEL, self.checkpoint.version)
