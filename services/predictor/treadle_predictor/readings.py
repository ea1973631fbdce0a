"""What was read of all running trajectories, kept for their next steps, within a bound of bytes.

Used by one thread at a time. Invariants: where the bound is met, next windows that were read ahead go first, then the
least recently asked about, which are read afresh; reading ahead never pushes out what is kept.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from treadle_learned.backbone import Backbone
from treadle_learned.read import Read, shared
from treadle_learned.reading import Bounds, Ids, Reader
from treadle_learned.together import read_together

from treadle_predictor.questions import Question
from treadle_predictor.reading import READING_BYTES, Reading

LEAST_SHARED = 16  # ids that another trajectory must begin with alike for a copy to be worth it


class Readings:
    """See the module. most_bytes: of what is kept."""

    def __init__(self, backbone: Backbone, bounds: Bounds, most_bytes: int) -> None:
        self._backbone = backbone
        self._bounds = bounds
        self._most_bytes = most_bytes
        self._readings: OrderedDict[str, Reading] = OrderedDict()  # least recently asked about first
        self._id_bytes = 0  # of what was read of one id; not known before something is read
        self.kept_bytes = 0

    def states(self, questions: Sequence[Question]) -> torch.Tensor:
        """[n, hidden_size]: after the newest step of each."""
        readings = [self._of(question) for question in questions]
        unread = [reading for reading in readings if not reading.is_read]
        if unread:
            asked = [(reading.reader.ids, reading.before()) for reading in unread]
            for reading, (state, read) in zip(unread, read_together(self._backbone, asked), strict=True):
                reading.state, reading.read = state, read
                self._count(reading)
            self._hold_bound()
        return torch.stack([reading.state for reading in readings if reading.state is not None])

    def begin(self, trajectory_id: str, prompt: str) -> None:
        """Its first step runs: the prompt is something to read ahead, where there is room for it."""
        more_bytes = READING_BYTES + self._bounds.prompt_tokens * self._id_bytes
        if trajectory_id not in self._readings and self.kept_bytes + more_bytes <= self._most_bytes:
            self._begin(trajectory_id, prompt)

    def read_ahead(self) -> bool:
        """Reads a step's worth of what will be needed soonest; False where there is nothing, or no room for it."""
        due = [reading for reading in self._readings.values() if reading.next_ids]
        if not due:
            return False
        reading = min(due, key=lambda each: each.room)
        ids = reading.next_ids
        if self.kept_bytes + len(ids) * self._id_bytes > self._most_bytes:
            return False
        reading.read_ahead(self._backbone, self._bounds.step_tokens + self._bounds.obs_tokens)
        self._count(reading)
        self._hold_bound()
        return True

    def forget(self, trajectory_id: str) -> None:
        """It has ended. Forgetting what is not here is fine."""
        reading = self._readings.pop(trajectory_id, None)
        if reading is not None:
            self.kept_bytes -= reading.counted_bytes

    def _of(self, question: Question) -> Reading:
        """Told all that the question says."""
        name, tokenize = question.progress.trajectory_id, self._backbone.tokenize
        reading = self._readings.get(name)
        if reading is None or reading.turns > len(question.turns):
            self.forget(name)
            reading = self._begin(name, question.prompt)
        self._readings.move_to_end(name)
        for at in range(reading.turns, len(question.turns)):
            observation = question.turns[at - 1].obs_text if at else ""
            reading.reader.step(tuple(tokenize(observation)), tuple(tokenize(question.turns[at].text)))
        reading.turns = len(question.turns)
        return reading

    def _begin(self, name: str, prompt: str) -> Reading:
        reading = self._readings[name] = Reading(Reader(self._bounds, tuple(self._backbone.tokenize(prompt))))
        reading.read = self._begun_alike(reading.reader.ids)
        self._count(reading)
        return reading

    def _begun_alike(self, ids: Ids) -> Read | None:
        """A copy of the longest beginning that another trajectory shares, e.g. of the same prompt."""
        reads = [reading.read for reading in self._readings.values() if reading.read is not None]
        found = max(reads, key=lambda read: shared(read.ids, ids), default=None)
        count = shared(found.ids, ids) if found is not None else 0
        return found.beginning(count) if found is not None and count >= LEAST_SHARED else None

    def _count(self, reading: Reading) -> None:
        if reading.read is not None:
            self._id_bytes = reading.read.size_bytes // len(reading.read.ids)
        size_bytes = reading.size_bytes
        self.kept_bytes += size_bytes - reading.counted_bytes
        reading.counted_bytes = size_bytes

    def _hold_bound(self) -> None:
        for reading in self._readings.values():
            if self.kept_bytes > self._most_bytes and reading.ahead is not None:
                reading.ahead = None
                self._count(reading)
        while self.kept_bytes > self._most_bytes and self._readings:
            self.forget(next(iter(self._readings)))
