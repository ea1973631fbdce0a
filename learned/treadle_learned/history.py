"""Prediction from history alone, which Heddle 4.1 calls static: what a prompt's earlier trajectories came to, newest
first.

An exponential moving average of ln(1 + tokens) for each prompt; a prompt without any has the average of all. The spread
is that of all earlier trajectories around their own prompt's average before them. Nothing of the trajectory itself is
used but how much it has sampled. What was cut counts as it is: that is what such predictors do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle_learned.moments import Moment
from treadle_learned.scores import Floats
from treadle_learned.transcript import Transcript

NEWEST = 0.3  # the weight of the newest trajectory in the average
OVERRUN = 0.25  # of what it has done is taken to be left of one that has outlived its average
Z_90 = 1.2816  # standard deviations from the median to p90 of a normal distribution
WIDEST = 1.0  # of ln tokens, where too little came before to tell


class PromptAverage:
    """See the module. `earlier` in the order in which they ended."""

    def __init__(self, earlier: Sequence[Transcript]) -> None:
        self._of_prompt: dict[str, float] = {}
        self._of_all = 0.0
        errors: list[float] = []
        for number, transcript in enumerate(earlier):
            length = float(np.log1p(transcript.gen_tokens))
            known = self._of_prompt.get(transcript.prompt_id)
            if number:
                errors.append(length - (self._of_all if known is None else known))
            self._of_prompt[transcript.prompt_id] = length if known is None else known + NEWEST * (length - known)
            self._of_all += (length - self._of_all) / (number + 1)
        self._spread = float(np.std(errors)) if len(errors) > 1 else WIDEST

    def predict(self, moments: Sequence[Moment], transcripts: Sequence[Transcript]) -> Floats:
        """Remaining tokens [n, 3]."""
        logs = np.array([self._of_prompt.get(transcripts[moment.index].prompt_id, self._of_all) for moment in moments])
        done = np.array([moment.gen_tokens for moment in moments], np.float64)
        totals = np.expm1(logs[:, None] + self._spread * np.array([-Z_90, 0.0, Z_90]))
        return np.maximum(totals - done[:, None], OVERRUN * done[:, None])
