"""What was read of all running trajectories, kept for their next steps, within a bound of bytes.

Used by one thread at a time. Invariants: where the bound is met, next windows that were read ahead go first, then the
least recently asked about, which are read afresh; reading ahead never pushes out what is kept.

What was read of one trajectory: its window up to the newest step, and what is read before it is asked for.

Invariant: `state` is that of reading the window at once, to rounding, however much of it was read before."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from treadle_learned.backbone import Backbone, read_together
from treadle_learned.reading import Bounds, Ids, Read, Reader, shared_prefix

from treadle_predictor.worker import Question

# Beside keys and values: ids, texts, objects.
READING_BYTES = 16_384


class Reading:
    """turns: steps that its reader was told. read: of its window. ahead: of the next window. state: after all that is
    read of its window, where that is known. counted_bytes: what its owner has counted it for."""

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
        return self.state is not None and self.read is not None and self.read.ids == self.reader.ids

    @property
    def next_ids(self) -> Ids:
        """What to read before it is asked for: the prompt, then the next window; nothing where that is read."""
        if not self.turns:
            return () if self.is_read else self.reader.ids
        ahead = len(self.ahead.ids) if self.ahead is not None else 0
        return self.reader.next_ids if self.is_read and ahead < len(self.reader.next_ids) else ()

    @property
    def room(self) -> int:
        """Ids that can still come before `next_ids` are needed."""
        return self.reader.room if self.turns else 0

    def before(self) -> Read | None:
        """From where its window is read on; it is used up."""
        read, self.read, self.state = self.read, None, None
        if self.ahead is not None and self.ahead.ids == self.reader.ids[: len(self.ahead.ids)]:
            read, self.ahead = self.ahead, None
        return read

    def read_ahead(self, backbone: Backbone, most: int) -> None:
        """At the most so many more of `next_ids`."""
        ids = self.next_ids
        if not self.turns:
            before = self.before()
        elif self.ahead is not None:
            before, self.ahead = self.ahead, None
        else:
            before = self.read.usable_for(ids) if self.read is not None else None
        state, read = backbone.read_on(ids[: (len(before.ids) if before is not None else 0) + most], before)
        if self.turns:
            self.ahead = read
        else:
            self.read, self.state = read, state


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
        found = max(reads, key=lambda read: shared_prefix(read.ids, ids), default=None)
        count = shared_prefix(found.ids, ids) if found is not None else 0
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
