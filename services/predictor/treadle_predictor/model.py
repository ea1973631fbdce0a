"""Run the learned model: forecast for questions, and keep what was read of running trajectories.

Used by one thread at a time. Invariants: a forecast never exceeds what the trajectory's cap leaves.
What was read is kept for the next steps, within a bound of bytes: next windows that were read ahead
are dropped first, then the trajectories whose last question is oldest, which are read again;
reading ahead never evicts kept state. States are those of reading a window at once, to rounding,
however much of it was read before.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from treadle_core.model import Estimate
from treadle_core.ranking.estimator import Forecast, Progress, Source
from treadle_learned.backbone import Backbone, read_together
from treadle_learned.checkpoint import Checkpoint
from treadle_learned.reading import Bounds, Ids, Read, Reader, shared_prefix

from treadle_predictor.question import Question

READING_BYTES = 16_384  # bytes of a trajectory beside keys and values: ids, texts, objects
LEAST_SHARED = 16  # ids that another trajectory must begin with for a copy to be worth it


class LearnedModel:
    """Checkpoint that answers questions. backbone: None for a checkpoint that reads no text; it has
    no `readings`, either. most_bytes: the bound of what is kept."""

    def __init__(self, checkpoint: Checkpoint, backbone: Backbone | None, most_bytes: int) -> None:
        self.checkpoint = checkpoint
        self.backbone = backbone
        self.readings = (
            Readings(backbone, checkpoint.bounds, most_bytes) if backbone is not None else None
        )

    @property
    def gains_together(self) -> bool:
        """Return whether a batch gains time: on a GPU; a CPU reads eight steps in the time of
        eight, and the first would wait for the last."""
        return self.backbone is None or self.backbone.device != "cpu"

    @torch.inference_mode()
    def answer(self, questions: Sequence[Question]) -> list[Forecast | None]:
        """Return forecasts in the order of the questions; None where the model reads text and there
        is none yet."""
        asked = [
            at for at, question in enumerate(questions) if self.backbone is None or question.prompt
        ]
        found: list[Forecast | None] = [None] * len(questions)
        if asked:
            some = [questions[at] for at in asked]
            features = torch.from_numpy(np.stack([question.features for question in some]))
            has_text = torch.full((len(some),), self.backbone is not None)
            unread = torch.zeros(len(some), self.checkpoint.hidden_size)
            states = unread if self.readings is None else self.readings.states(some)
            logs = self.checkpoint.head(states, features, has_text)
            for at, quantiles in zip(asked, torch.expm1(logs).tolist(), strict=True):
                found[at] = self._forecast(questions[at].progress, *quantiles)
        return found

    def _forecast(self, progress: Progress, tokens: list[float], turns: list[float]) -> Forecast:
        if progress.max_total_tokens:
            room = float(max(0, progress.max_total_tokens - progress.gen_tokens))
            tokens = [min(each, room) for each in tokens]
        return Forecast(Estimate(*tokens), Estimate(*turns), Source.MODEL, self.checkpoint.version)


class Reading:
    """State of one trajectory. turns: steps that its reader has. read: what is read of its window.
    ahead: what is read of the next window. state: the state after all ids of `read`, where it is
    known. counted_bytes: its share of `Readings.kept_bytes`."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.turns = 0
        self.read: Read | None = None
        self.ahead: Read | None = None
        self.state: torch.Tensor | None = None
        self.counted_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all that is kept."""
        return READING_BYTES + sum(
            read.size_bytes for read in (self.read, self.ahead) if read is not None
        )

    @property
    def is_read(self) -> bool:
        """Return whether `state` is that of its whole window."""
        return self.state is not None and self.read is not None and self.read.ids == self.reader.ids

    @property
    def next_ids(self) -> Ids:
        """Return the ids to read ahead: the prompt, then the next window; none where that is
        read."""
        if not self.turns:
            return () if self.is_read else self.reader.ids
        ahead = len(self.ahead.ids) if self.ahead is not None else 0
        return self.reader.next_ids if self.is_read and ahead < len(self.reader.next_ids) else ()

    @property
    def room(self) -> int:
        """Return the number of ids that can still come before `next_ids` are needed."""
        return self.reader.room if self.turns else 0

    def take_before(self) -> Read | None:
        """Take the state from which its window is read on."""
        read, self.read, self.state = self.read, None, None
        if self.ahead is not None and self.ahead.ids == self.reader.ids[: len(self.ahead.ids)]:
            read, self.ahead = self.ahead, None
        return read

    def read_ahead(self, backbone: Backbone, most: int) -> None:
        """Read at most `most` more of `next_ids`."""
        ids = self.next_ids
        if not self.turns:
            before = self.take_before()
        elif self.ahead is not None:
            before, self.ahead = self.ahead, None
        else:
            before = self.read.usable_for(ids) if self.read is not None else None
        state, read = backbone.read_on(
            ids[: (len(before.ids) if before is not None else 0) + most], before
        )
        if self.turns:
            self.ahead = read
        else:
            self.read, self.state = read, state


class Readings:
    """Kept state of all running trajectories. most_bytes: its bound."""

    def __init__(self, backbone: Backbone, bounds: Bounds, most_bytes: int) -> None:
        self._backbone = backbone
        self._bounds = bounds
        self._most_bytes = most_bytes
        self._readings: OrderedDict[str, Reading] = OrderedDict()  # the oldest last question first
        self._id_bytes = 0  # size of one id; not known before something is read
        self.kept_bytes = 0

    def states(self, questions: Sequence[Question]) -> torch.Tensor:
        """Return the state after the newest step of each question's trajectory, [n,
        hidden_size]."""
        readings = [self._update(question) for question in questions]
        unread = [reading for reading in readings if not reading.is_read]
        if unread:
            asked = [(reading.reader.ids, reading.take_before()) for reading in unread]
            for reading, (state, read) in zip(
                unread, read_together(self._backbone, asked), strict=True
            ):
                reading.state, reading.read = state, read
                self._count(reading)
            self._keep_within_bound()
        return torch.stack([reading.state for reading in readings if reading.state is not None])

    def begin(self, trajectory_id: str, prompt: str) -> None:
        """Note a trajectory whose first step runs, where there is room to read its prompt ahead."""
        more_bytes = READING_BYTES + self._bounds.prompt_tokens * self._id_bytes
        if trajectory_id not in self._readings and self.kept_bytes + more_bytes <= self._most_bytes:
            self._begin(trajectory_id, prompt)

    def read_ahead(self) -> bool:
        """Read a step's worth of what will be needed soonest; return False where there is nothing,
        or no room for it."""
        due = [reading for reading in self._readings.values() if reading.next_ids]
        if not due:
            return False
        reading = min(due, key=lambda each: each.room)
        ids = reading.next_ids
        if self.kept_bytes + len(ids) * self._id_bytes > self._most_bytes:
            return False
        reading.read_ahead(self._backbone, self._bounds.step_tokens + self._bounds.obs_tokens)
        self._count(reading)
        self._keep_within_bound()
        return True

    def forget(self, trajectory_id: str) -> None:
        """Drop what is kept of a trajectory, if anything is."""
        reading = self._readings.pop(trajectory_id, None)
        if reading is not None:
            self.kept_bytes -= reading.counted_bytes

    def _update(self, question: Question) -> Reading:
        name, tokenize = question.progress.trajectory_id, self._backbone.tokenize
        reading = self._readings.get(name)
        if reading is None or reading.turns > len(question.turns):
            self.forget(name)
            reading = self._begin(name, question.prompt)
        self._readings.move_to_end(name)
        for at in range(reading.turns, len(question.turns)):
            observation = question.turns[at - 1].obs_text if at else ""
            reading.reader.step(
                tuple(tokenize(observation)), tuple(tokenize(question.turns[at].text))
            )
        reading.turns = len(question.turns)
        return reading

    def _begin(self, name: str, prompt: str) -> Reading:
        reading = self._readings[name] = Reading(
            Reader(self._bounds, tuple(self._backbone.tokenize(prompt)))
        )
        reading.read = self._copy_shared(reading.reader.ids)
        self._count(reading)
        return reading

    def _copy_shared(self, ids: Ids) -> Read | None:
        """Return a copy of the longest beginning that another trajectory shares, e.g. a sample of
        the same prompt."""
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

    def _keep_within_bound(self) -> None:
        for reading in self._readings.values():
            if self.kept_bytes > self._most_bytes and reading.ahead is not None:
                reading.ahead = None
                self._count(reading)
        while self.kept_bytes > self._most_bytes and self._readings:
            self.forget(next(iter(self._readings)))
