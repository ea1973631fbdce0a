"""From facts to evidence: the one place where the predictor's state changes."""

from google.protobuf.timestamp_pb2 import Timestamp
from treadle.telemetry.v1.facts_pb2 import Fact

from treadle_predictor.convert import learn
from treadle_predictor.history_store import HistoryStore


class Learner:
    """Hears facts. `updated_at` is the time of the newest one heard, None before the first."""

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self.updated_at: Timestamp | None = None

    async def hear(self, fact: Fact) -> None:
        """Folds one fact in; told again it changes nothing."""
        ended = learn(self._store.evidence, fact)
        if ended is not None:
            self._store.changed(ended.prompt_id)
        if self.updated_at is None or fact.time.ToNanoseconds() > self.updated_at.ToNanoseconds():
            self.updated_at = fact.time
