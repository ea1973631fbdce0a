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
from treadle_migrator.servicer import page_of

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
    switching = preparing.to(State.SWITCHING, 3.5, prefix=Prefix(Path.STORAGE, 9, 8, 1))
    failed = switching.to(State.FAILED, 4.5, failure_reason="REVISION_MISMATCH")
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
        before = migration
        try:
            migration = migration.to(state, 1.0)
        except ValueError:
            continue
        assert not before.ended and migration.revision == before.revision + 1
        assert state in ENDED or order.index(state) == order.index(before.state) + 1
        assert state is not State.DONE or before.state is State.SWITCHING
        assert state is not State.CANCELLED or before.state is not State.SWITCHING


@settings(deadline=None)
@given(times=st.lists(st.integers(0, 5), max_size=30), page_size=st.integers(1, 7))
def test_pages_show_every_migration_once_in_order_of_age(times: list[int], page_size: int) -> None:
    migrations = [Migration(f"m{index}", MOVE, created_at_s=time / 3) for index, time in enumerate(times)]
    listed: list[Migration] = []
    token = ""
    while True:
        page, token = page_of(migrations, page_size, token)
        listed += page
        if not token:
            break
        assert len(page) == page_size
    assert listed == sorted(migrations, key=lambda m: (m.created_at_s, m.migration_id))
