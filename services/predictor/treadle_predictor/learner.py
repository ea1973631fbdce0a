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
    """Hears facts. `updated_at` is the time of the newest one heard, None before the first. recordings: where they are
    kept for a learned model. on_begun: told of each trajectory whose first step has started, with its prompt; on_ended:
    of each that newly ended."""

    def __init__(
        self,
        store: HistoryStore,
        recordings: "Recordings | None" = None,
        on_begun: Callable[[str, str], None] = lambda trajectory_id, prompt: None,
        on_ended: Callable[[str], None] = lambda trajectory_id: None,
    ) -> None:
        self._store = store
        self._recordings = recordings
        self._on_begun = on_begun
        self._on_ended = on_ended
        self.updated_at: Timestamp | None = None

    async def hear(self, fact: Fact) -> None:
        """Folds one fact in; told again it changes nothing."""
        recordings = self._recordings
        version = recordings.version_of(fact.trajectory_closed.trajectory_id) if recordings is not None else None
        ended = learn(self._store.evidence, fact, version)
        if recordings is not None:
            recordings.hear(fact)
            begun = recordings.of(fact.step_started.step.trajectory_id, turn=0)
            if begun is not None and begun.prompt:
                self._on_begun(begun.trajectory_id, begun.prompt)
        if ended is not None:
            self._on_ended(ended.trajectory_id)
            self._store.changed(ended.prompt_id)
        if self.updated_at is None or fact.time.ToNanoseconds() > self.updated_at.ToNanoseconds():
            self.updated_at = fact.time
