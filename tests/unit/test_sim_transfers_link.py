"""Migrations on the simulated link: what each takes, who waits for whom, and that each ends once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.actions import StartMigration
from treadle_core.model import EngineSpec
from treadle_sim.cluster import Link
from treadle_sim.migrator import Transfers
from treadle_sim.timeline import Timeline

LINK = Link(bytes_per_s=1e9, fixed_s=0.1)
LONG_S = 1e6  # a give-up that never comes


class Moves:
    """A link, and what became of each move."""

    def __init__(self, sizes: dict[str, float]) -> None:
        self.timeline = Timeline()
        self.ended: list[tuple[str, str, float]] = []
        self.transfers = Transfers(LINK, self.timeline, lambda move: sizes[move.move_id], self._arrived, self._gave_up)

    def _arrived(self, move: StartMigration, migration_id: str) -> None:
        self.ended.append((move.move_id, "arrived", self.timeline.now))

    def _gave_up(self, move: StartMigration, migration_id: str) -> None:
        self.ended.append((move.move_id, "gave up", self.timeline.now))

    def ask(self, move: StartMigration) -> None:
        """Starts one."""
        self.transfers.start(move)

    def play(self) -> dict[str, Any]:
        """Until nothing moves: how and when each ended."""
        self.timeline.run(lambda: True)
        return {name: (how, at_s) for name, how, at_s in self.ended}


def move(
    name: str, source: str, target: str, *, left: float = 100.0, give_up_after_s: float = LONG_S
) -> StartMigration:
    return StartMigration(
        name, f"t-{name}", EngineSpec(source, source), EngineSpec(target, target), 1, left, "", True, give_up_after_s
    )


def test_a_transfer_takes_its_fixed_time_and_its_bytes_over_the_bandwidth() -> None:
    moves = Moves({"a": 5e8})
    moves.timeline.at(2.0, moves.ask, move("a", "e0", "e1"))

    assert moves.play() == {"a": ("arrived", pytest.approx(2.6))}


def test_an_engine_takes_part_in_one_transfer_at_a_time_and_the_longest_trajectory_goes_first() -> None:
    moves = Moves({"short": 1e9, "long": 1e9, "elsewhere": 1e9})
    for one in (
        move("short", "e0", "e1", left=10.0),
        move("long", "e2", "e0", left=900.0),
        move("elsewhere", "e3", "e4", left=1.0),
    ):
        moves.transfers.start(one)

    assert moves.play() == {
        "long": ("arrived", pytest.approx(1.1)),
        "elsewhere": ("arrived", pytest.approx(1.1)),
        "short": ("arrived", pytest.approx(2.2)),
    }


def test_a_move_that_waits_or_runs_for_longer_than_it_is_worth_is_given_up_and_frees_its_engines() -> None:
    moves = Moves({"slow": 5e9, "waits": 1e9, "next": 1e9})
    moves.transfers.start(move("slow", "e0", "e1", left=3.0, give_up_after_s=2.0))
    moves.transfers.start(move("waits", "e1", "e2", left=2.0, give_up_after_s=1.0))
    moves.transfers.start(move("next", "e0", "e2", left=1.0))

    assert moves.play() == {
        "waits": ("gave up", 1.0),
        "slow": ("gave up", 2.0),
        "next": ("arrived", pytest.approx(3.1)),
    }


def test_a_move_that_is_called_off_ends_silently_and_the_next_one_starts() -> None:
    moves = Moves({"a": 5e9, "b": 1e9})
    called_off = moves.transfers.start(move("a", "e0", "e1", left=2.0))
    moves.transfers.start(move("b", "e1", "e0", left=1.0))
    moves.timeline.at(1.0, moves.transfers.cancel, called_off)

    assert moves.play() == {"b": ("arrived", pytest.approx(2.1))}


names = st.sampled_from(["e0", "e1", "e2", "e3"])
asked = st.lists(
    st.tuples(st.floats(0.0, 5.0), names, names, st.floats(0.0, 3e9), st.floats(1.0, 1e4), st.floats(0.1, 9.0)),
    max_size=12,
).map(lambda rows: [row for row in rows if row[1] != row[2]])


@settings(max_examples=80, deadline=None)
@given(asked)
def test_each_move_ends_once_and_those_that_arrive_never_overlap_at_an_engine(
    rows: list[tuple[float, str, str, float, float, float]],
) -> None:
    moves = Moves({str(number): row[3] for number, row in enumerate(rows)})
    for number, (at_s, source, target, _, left, worth_s) in enumerate(rows):
        wanted = move(str(number), source, target, left=left, give_up_after_s=worth_s)
        moves.timeline.at(at_s, moves.ask, wanted)

    ended = moves.play()

    assert Counter(name for name, _, _ in moves.ended) == Counter(str(number) for number in range(len(rows)))
    spans: list[tuple[float, float, str]] = []
    for name, (how, end_s) in ended.items():
        at_s, source, target, size, _, worth_s = rows[int(name)]
        if how == "gave up":
            assert end_s == pytest.approx(at_s + worth_s)
            continue
        assert end_s <= at_s + worth_s + 1e-9
        begin_s = end_s - LINK.fixed_s - size / LINK.bytes_per_s
        assert begin_s >= at_s - 1e-9
        spans += [(begin_s, end_s, source), (begin_s, end_s, target)]
    for begin_s, end_s, engine in spans:
        others = [span for span in spans if span[2] == engine and span != (begin_s, end_s, engine)]
        assert all(other[1] <= begin_s + 1e-9 or other[0] >= end_s - 1e-9 for other in others)
