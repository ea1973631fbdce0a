"""Heddle's transmission scheduler (section 5.3)."""

import math

from hypothesis import given
from hypothesis import strategies as st
from treadle_core.transfers import MeasuredMoves, Transfer, next_transfers


def move(
    name: str, source: str, target: str, remaining: float, asked_at_s: float = 0.0
) -> Transfer:
    return Transfer(name, source, target, remaining, asked_at_s)


def test_the_longest_goes_first_and_a_short_move_between_free_engines_does_not_wait() -> None:
    """The longest move holds e0 and e1; the second shares e1 and waits; the shortest runs beside
    it.

    Result: long and short start, middle waits.
    """
    waiting = [
        move("short", "e2", "e3", 10),
        move("middle", "e1", "e2", 50),
        move("long", "e0", "e1", 90),
    ]
    assert [t.transfer_id for t in next_transfers(waiting, ())] == ["long", "short"]


def test_an_engine_that_is_busy_takes_part_in_nothing_else_and_of_equal_lengths_the_first_asked_goes() -> (
    None
):
    waiting = [move("a", "e0", "e1", 90), move("b", "e2", "e0", 80), move("c", "e2", "e3", 1)]
    assert [t.transfer_id for t in next_transfers(waiting, {"e0"})] == ["c"]
    alike = [
        move("later", "e0", "e1", 5, asked_at_s=2.0),
        move("sooner", "e0", "e1", 5, asked_at_s=1.0),
    ]
    assert [t.transfer_id for t in next_transfers(alike, ())] == ["sooner"]


ENGINES = st.sampled_from([f"e{i}" for i in range(6)])
MOVES = st.lists(
    st.tuples(ENGINES, ENGINES, st.floats(0, 1e6)).filter(lambda move: move[0] != move[1]),
    max_size=20,
).map(lambda rows: [move(f"m{i}", s, t, r, float(i)) for i, (s, t, r) in enumerate(rows)])


@given(waiting=MOVES, busy=st.sets(ENGINES))
def test_a_batch_is_strictly_parallel_and_leaves_out_only_what_collides_with_something_longer(
    waiting: list[Transfer], busy: set[str]
) -> None:
    chosen = next_transfers(waiting, busy)
    ends = [end for t in chosen for end in (t.source, t.target)]
    assert len(ends) == len(set(ends)) and not busy & set(ends)
    lengths = [t.remaining_tokens for t in chosen]
    assert lengths == sorted(lengths, reverse=True)
    for left in set(waiting) - set(chosen):
        rivals = [
            t.remaining_tokens for t in chosen if {left.source, left.target} & {t.source, t.target}
        ]
        blocked = [math.inf] if {left.source, left.target} & busy else []
        assert max(rivals + blocked) >= left.remaining_tokens


@given(waiting=MOVES)
def test_epochs_finish_every_move_exactly_once(waiting: list[Transfer]) -> None:
    left, done = list(waiting), []
    while left:
        batch = next_transfers(left, ())
        assert batch
        done.extend(batch)
        left = [t for t in left if t not in batch]
    assert sorted(t.transfer_id for t in done) == sorted(t.transfer_id for t in waiting)


def test_measured_moves_correct_what_is_expected_of_the_next_one() -> None:
    """The first move of a pair counts whole, later ones by their weight; other pairs take the mean
    over all."""
    measured = MeasuredMoves(newest_weight=0.5)
    assert measured.slowness("e0", "e1") == 1.0
    measured.note_end("e0", "e1", 0.1, 0.4, moved=True)
    assert measured.slowness("e0", "e1") == measured.slowness("e1", "e0") == 4.0
    measured.note_end("e1", "e0", 0.1, 0.2, moved=True)
    assert [measured.slowness(*pair) for pair in (("e0", "e1"), ("e1", "e0"), ("e2", "e0"))] == [
        4.0,
        2.0,
        3.0,
    ]
    measured.note_end("e0", "e1", 0.1, 0.2, moved=True)
    assert measured.slowness("e0", "e1") == 3.0


def test_a_move_that_was_given_up_never_makes_its_engines_look_faster() -> None:
    measured = MeasuredMoves(newest_weight=0.5)
    measured.note_end("e0", "e1", 0.1, 0.4, moved=True)
    measured.note_end("e0", "e1", 0.1, 0.1, moved=False)
    assert measured.slowness("e0", "e1") == 4.0
    measured.note_end("e0", "e1", 0.1, 0.8, moved=False)
    assert measured.slowness("e0", "e1") == 6.0
