"""What was read of each running trajectory, kept for its next step, and what is read before it is asked for.

Used by one thread at a time. Invariants: a state is that of reading everything at once, to rounding, however much was
read before; what is kept is bounded in bytes, what was read ahead goes first, then the least recently asked about,
which are read afresh; reading ahead never pushes out what is kept.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from treadle_learned.backbone import Backbone
from treadle_learned.read import Read, shared
from treadle_learned.reading import Bounds, Reader
from treadle_learned.together import read_together

from treadle_predictor.questions import Question

# Beside keys and values, of one trajectory: ids, texts, objects.
READING_BYTES = 16_384
LEAST_SHARED = 16  # ids that another trajectory must begin with alike for a copy to be worth it


class Reading:
    """Of one trajectory. state: after all ids of its reader, where those are read. ahead: what is read of the next
    window."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.turns = 0
        self.read: Read | None = None
        self.ahead: Read | None = None
        self.state: torch.Tensor | None = None
        self.counted_bytes = 0

    @property
    def size_bytes(self) -> int:
        """All that is kept of it."""
        return READING_BYTES + sum(read.size_bytes for read in (self.read, self.ahead) if read is not None)

    @property
    def is_read(self) -> bool:
        """Whether `state` answers."""
        return self.read is not None and self.read.ids == self.reader.ids

    @property
    def is_ahead(self) -> bool:
        """Whether nothing of the next window is left to read."""
        return len(self.ahead.ids if self.ahead is not None else ()) >= len(self.reader.next_ids)

    def before(self) -> Read | None:
        """From where its ids are read on: what shares most with them; it is used up."""
        read, self.read = self.read, None
        if self.ahead is not None and self.ahead.ids == self.reader.ids[: len(self.ahead.ids)]:
            read, self.ahead = self.ahead, None
        return read


class Readings:
    """See the module. most_bytes: of what is kept."""

    def __init__(self, backbone: Backbone, bounds: Bounds, most_bytes: int) -> None:
        self._backbone = backbone
        self._bounds = bounds
        self._most_bytes = most_bytes
        self._readings: OrderedDict[str, Reading] = OrderedDict()  # least recently asked about first
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

    def read_ahead(self) -> bool:
        """Reads a step's worth of the next window that is due soonest; False where there is none, or no room for it."""
        due = [reading for reading in self._readings.values() if reading.is_read and not reading.is_ahead]
        if not due:
            return False
        reading = min(due, key=lambda each: each.reader.room)
        assert reading.read is not None
        if self.kept_bytes + reading.read.size_bytes > self._most_bytes:
            return False
        ids = reading.reader.next_ids
        before, reading.ahead = reading.ahead or reading.read.usable_for(ids), None
        done = len(before.ids) if before is not None else 0
        chunk = self._bounds.step_tokens + self._bounds.obs_tokens
        _, reading.ahead = self._backbone.read_on(ids[: done + chunk], before)
        self._count(reading)
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
            reading = Reading(Reader(self._bounds, tuple(tokenize(question.prompt))))
            reading.read = self._begun_alike(reading.reader.ids)
            self._readings[name] = reading
            self._count(reading)
        self._readings.move_to_end(name)
        for at in range(reading.turns, len(question.turns)):
            observation = question.turns[at - 1].obs_text if at else ""
            reading.reader.step(tuple(tokenize(observation)), tuple(tokenize(question.turns[at].text)))
        reading.turns = len(question.turns)
        return reading

    def _begun_alike(self, ids: tuple[int, ...]) -> Read | None:
        """A copy of the longest beginning that another trajectory shares, e.g. of the same prompt."""
        reads = [reading.read for reading in self._readings.values() if reading.read is not None]
        found = max(reads, key=lambda read: shared(read.ids, ids), default=None)
        count = shared(found.ids, ids) if found is not None else 0
        return found.beginning(count) if found is not None and count >= LEAST_SHARED else None

    def _count(self, reading: Reading) -> None:
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
