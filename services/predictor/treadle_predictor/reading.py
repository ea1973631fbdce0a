"""What was read of one trajectory: its window up to the newest step, and what is read before it is asked for.

Invariant: `state` is that of reading the window at once, to rounding, however much of it was read before.
"""

import torch
from treadle_learned.backbone import Backbone
from treadle_learned.read import Read
from treadle_learned.reading import Ids, Reader

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
