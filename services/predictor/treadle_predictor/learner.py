"""From facts to evidence: the one place where the predictor's state changes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp
from treadle.telemetry.v1.facts_pb2 import Fact

from treadle_predictor.convert import learn
from treadle_predictor.history_store import HistoryStore

if TYPE_CHECKING:
    from treadle_predictor.recordings import Recordings


class Learner:
    """Hears facts. `updated_at` is the time of the newest one heard, None before the first. on_ended: told of each
    trajectory that newly ended; recordings: where they are kept for a learned model."""

    def __init__(
        self,
        store: HistoryStore,
        recordings: "Recordings | None" = None,
        on_ended: Callable[[str], None] = lambda trajectory_id: None,
    ) -> None:
        self._store = store
        self._recordings = recordings
        self._on_ended = on_ended
        self.updated_at: Timestamp | None = None

    async def hear(self, fact: Fact) -> None:
        """Folds one fact in; told again it changes nothing."""
        ended = learn(self._store.evidence, fact)
        if self._recordings is not None:
            self._recordings.hear(fact)
        if ended is not None:
            self._on_ended(ended.trajectory_id)
            self._store.changed(ended.prompt_id)
        if self.updated_at is None or fact.time.ToNanoseconds() > self.updated_at.ToNanoseconds():
            self.updated_at = fact.time
