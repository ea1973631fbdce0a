"""Migrations over the simulated link: how long each takes, which one waits, and that each ends
once."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import LoneEngine, trajectory
from treadle_core.actions import CancelMigration, StartMigration
from treadle_core.events import Event, MoveAccepted, MoveEnded
from treadle_core.model import EngineSpec, KvTransfer
from treadle_sim.cluster import Link, Timeline
from treadle_sim.migrator import Migrator
from treadle_sim.outcome import Progress

LINK = Link(bytes_per_s=1_000_000_000, fixed_s=0.1)
LONG_S = 1e6  # a give-up that never comes


class Moves:
    """A migrator between five engines, a trajectory for each move with so many bytes of KV, and how
    each move ended."""

    def __init__(self, kv_bytes: dict[str, int]) -> None:
        self.timeline = Timeline()
        self.ended: list[tuple[str, str, float]] = []
        self.ids: dict[str, str] = {}
        work = trajectory(0, [(1, 0, 0.0)])
        trajectories = {
            f"t-{name}": Progress(index, work, context_tokens=size)
            for index, (name, size) in enumerate(kv_bytes.items())
        }
        engines = [LoneEngine().engine for _ in range(5)]
        self.migrator = Migrator(
            LINK, self.timeline, trajectories, engines, self._hear, lambda engine: False
        )

    def _hear(self, event: Event) -> None:
        if isinstance(event, MoveAccepted):
            self.ids[event.trajectory_id] = event.migration_id
        if isinstance(event, MoveEnded):
            how = "arrived" if event.moved else event.reason
            self.ended.append((event.trajectory_id.removeprefix("t-"), how, self.timeline.now))

    def cancel(self, name: str) -> None:
        self.migrator.cancel(CancelMigration(f"t-{name}", self.ids[f"t-{name}"]))

    def play(self) -> dict[str, Any]:
        """Until nothing moves: how and when each ended."""
        self.timeline.run(lambda: True)
        return {name: (how, at_s) for name, how, at_s in self.ended}


def move(
    name: str, source: str, target: str, *, left: float = 100.0, give_up_after_s: float = LONG_S
) -> StartMigration:
    return StartMigration(
        name, f"t-{name}", spec(source), spec(target), 1, left, "", True, give_up_after_s
    )


def spec(engine: str) -> EngineSpec:
    return EngineSpec(engine, engine, kv_bytes_per_token=1, kv_transfer=KvTransfer.STORAGE)


def test_a_transfer_takes_its_fixed_time_and_its_bytes_over_the_bandwidth() -> None:
    moves = Moves({"a": 500_000_000})
    moves.timeline.at(2.0, moves.migrator.start, move("a", "e0", "e1"))

    assert moves.play() == {"a": ("arrived", pytest.approx(2.6))}


def test_an_engine_takes_part_in_one_transfer_at_a_time_and_the_longest_trajectory_goes_first() -> (
    None
):
    moves = Moves({"short": 1_000_000_000, "long": 1_000_000_000, "elsewhere": 1_000_000_000})
    for name, source, target, left in (
        ("short", 0, 1, 10.0),
        ("long", 2, 0, 900.0),
        ("elsewhere", 3, 4, 1.0),
    ):
        moves.migrator.start(move(name, f"e{source}", f"e{target}", left=left))

    assert moves.play() == {
        "long": ("arrived", pytest.approx(1.1)),
        "elsewhere": ("arrived", pytest.approx(1.1)),
        "short": ("arrived", pytest.approx(2.2)),
    }


def test_a_move_that_waits_or_runs_for_longer_than_it_is_worth_is_given_up_and_frees_its_engines() -> (
    None
):
    moves = Moves({"slow": 5_000_000_000, "waits": 1_000_000_000, "next": 1_000_000_000})
    moves.migrator.start(move("slow", "e0", "e1", left=3.0, give_up_after_s=2.0))
    moves.migrator.start(move("waits", "e1", "e2", left=2.0, give_up_after_s=1.0))
    moves.migrator.start(move("next", "e0", "e2", left=1.0))

    assert moves.play() == {
        "waits": ("took too long", 1.0),
        "slow": ("took too long", 2.0),
        "next": ("arrived", pytest.approx(3.1)),
    }


def test_a_move_that_is_cancelled_ends_at_once_and_the_next_one_starts() -> None:
    moves = Moves({"a": 5_000_000_000, "b": 1_000_000_000})
    moves.migrator.start(move("a", "e0", "e1", left=2.0))
    moves.migrator.start(move("b", "e1", "e0", left=1.0))
    moves.timeline.at(1.0, moves.cancel, "a")

    assert moves.play() == {"a": ("cancelled", 1.0), "b": ("arrived", pytest.approx(2.1))}


names = st.sampled_from(["e0", "e1", "e2", "e3"])
asked = st.lists(
    st.tuples(
        st.floats(0.0, 5.0),
        names,
        names,
        st.integers(0, 3 * 10**9),
        st.floats(1.0, 1e4),
        st.floats(0.1, 9.0),
    ),
    max_size=12,
).map(lambda rows: [row for row in rows if row[1] != row[2]])


@settings(max_examples=80)
@given(asked)
def test_each_move_ends_once_and_those_that_arrive_never_overlap_at_an_engine(
    rows: list[tuple[float, str, str, int, float, float]],
) -> None:
    moves = Moves({str(number): row[3] for number, row in enumerate(rows)})
    for number, (at_s, source, target, _, left, worth_s) in enumerate(rows):
        wanted = move(str(number), source, target, left=left, give_up_after_s=worth_s)
        moves.timeline.at(at_s, moves.migrator.start, wanted)

    ended = moves.play()

    assert Counter(name for name, _, _ in moves.ended) == Counter(
        str(number) for number in range(len(rows))
    )
    spans: list[tuple[float, float, str]] = []
    for name, (how, end_s) in ended.items():
        at_s, source, target, size, _, worth_s = rows[int(name)]
        if how == "took too long":
            assert end_s == pytest.approx(at_s + worth_s)
            continue
        assert end_s <= at_s + worth_s + 1e-9
        begin_s = end_s - LINK.fixed_s - size / LINK.bytes_per_s
        assert begin_s >= at_s - 1e-9
        spans += [(begin_s, end_s, source), (begin_s, end_s, target)]
    for begin_s, end_s, engine in spans:
        others = [span for span in spans if span[2] == engine and span != (begin_s, end_s, engine)]
        assert all(other[1] <= begin_s + 1e-9 or other[0] >= end_s - 1e-9 for other in others)
