"""What the scheduler learns from the fact of a migration's end."""

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from treadle.telemetry.v1.facts_pb2 import Fact, MigrationEnded
from treadle_core.events import MoveEnded
from treadle_scheduler.convert import event_of


@pytest.mark.parametrize(
    ("began", "moved", "reason", "took_s"),
    [
        (True, True, "", 2.0),
        (True, False, "GAVE_UP", 2.0),
        (True, False, "TARGET_UNAVAILABLE", 0.0),
        (False, False, "GAVE_UP", 0.0),
    ],
)
def test_only_a_move_that_began_and_was_not_broken_off_says_how_long_moves_take(
    began: bool, moved: bool, reason: str, took_s: float
) -> None:
    ended = MigrationEnded(
        migration_id="m",
        trajectory_id="t",
        moved=moved,
        failure_reason=reason,
        elapsed=Duration(seconds=2),
    )
    if began:
        ended.started_at.CopyFrom(Timestamp(seconds=5))
    expected = MoveEnded("t", "m", moved=moved, reason=reason, took_s=took_s)
    assert event_of(Fact(migration_ended=ended)) == expected
