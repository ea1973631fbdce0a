"""The migration itself: its states, its stored form, its pages."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_migrator.migrations import (
    ENDED,
    STORED,
    Endpoint,
    Migration,
    Move,
    Path,
    Prefix,
    State,
)

MOVE = Move(
    trajectory_id="t",
    source=Endpoint("e0", "127.0.0.1:1"),
    target=Endpoint("e1", "127.0.0.1:2"),
    expected_revision=3,
    remaining_tokens=12.5,
    cache_salt="w",
    allow_prefill=True,
    give_up_after_s=4.0,
)


AS_STORED = {
    "migration_id": "m",
    "move": {
        "trajectory_id": "t",
        "source": ["e0", "127.0.0.1:1"],
        "target": ["e1", "127.0.0.1:2"],
        "expected_revision": 3,
        "remaining_tokens": 12.5,
        "cache_salt": "w",
        "allow_prefill": True,
        "give_up_after_s": 4.0,
    },
    "created_at_s": 1.5,
    "state": "failed",
    "revision": 4,
    "prefix": ["storage", 9, 8, 1],
    "started_at_s": 2.5,
    "ended_at_s": 4.5,
    "failure_reason": "REVISION_MISMATCH",
    "announced": False,
}


def test_a_migration_comes_out_of_storage_as_it_went_in() -> None:
    pending = Migration("m", MOVE, created_at_s=1.5)
    preparing = pending.to(State.PREPARING, 2.5)
    assert preparing is not None
    switching = preparing.to(State.SWITCHING, 3.5, prefix=Prefix(Path.STORAGE, 9, 8, 1))
    assert switching is not None
    failed = switching.to(State.FAILED, 4.5, failure_reason="REVISION_MISMATCH")
    assert failed is not None
    for migration in (pending, preparing, switching, failed, replace(failed, announced=True)):
        assert STORED.validate_json(STORED.dump_json(migration)) == migration
    assert (json.loads(STORED.dump_json(failed))) == AS_STORED
    assert (failed.revision, failed.started_at_s, failed.ended_at_s) == (4, 2.5, 4.5)


@settings(deadline=None)
@given(steps=st.lists(st.sampled_from(list(State)), max_size=6))
def test_states_go_forward_only_and_an_end_is_final(steps: list[State]) -> None:
    migration = Migration("m", MOVE, created_at_s=0.0)
    order = [State.PENDING, State.PREPARING, State.SWITCHING]
    for state in steps:
        before, following = migration, migration.to(state, 1.0)
        if following is None:
            continue
        migration = following
        assert not before.ended and migration.revision == before.revision + 1
        assert state in ENDED or order.index(state) == order.index(before.state) + 1
        assert state is not State.DONE or before.state is State.SWITCHING
        assert state is not State.CANCELLED or before.state is not State.SWITCHING
