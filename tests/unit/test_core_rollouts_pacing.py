"""The pace of an asynchronous rollout: how many groups may be open, and what would end too late."""

import math

import pytest
from treadle_core.rollouts.pacing import SAMPLES_KEPT, Pace, PaceRules


def pace_of(gate: float | None = None, late_z: float = math.inf, bound: int = 1) -> Pace:
    return Pace(PaceRules(gate, late_z), bound, batch_groups=10)


def take(pace: Pace, at_s: float, *, publish: bool = True) -> None:
    pace.note_taken(at_s)
    if publish:
        pace.note_published()


def test_without_a_gate_there_is_always_room() -> None:
    assert pace_of().room(1_000_000) > 0


def test_a_taken_batch_keeps_its_places_until_its_weights_are_published() -> None:
    pace = pace_of(gate=1.8)
    assert pace.room(0) == 18
    assert pace.room(18) == 0
    take(pace, 50.0, publish=False)  # ten of the eighteen have left
    assert pace.room(8) == 0
    pace.note_published()
    assert pace.room(8) == 10
    assert pace.room(30) == 0


def test_the_last_batch_of_a_version_is_reckoned_from_the_interval_of_batches() -> None:
    pace = pace_of(bound=1)
    assert pace.last_take_s(0, 5.0) == math.inf
    take(pace, 100.0)
    assert pace.last_take_s(1, 110.0) == math.inf
    take(pace, 300.0)  # 200 s apart; version 2 now, two batches are taken
    assert pace.last_take_s(2, 310.0) == pytest.approx(700.0)
    assert pace.last_take_s(1, 310.0) == pytest.approx(500.0)
    assert pace.last_take_s(0, 310.0) == -math.inf
    assert pace.last_take_s(1, 900.0) == 900.0, "a batch that is overdue may be taken at any moment"
    assert pace.last_take_s(2, 900.0) == 1_500.0, "and the one behind it comes as late"
    take(pace, 400.0, publish=False)  # 100 s apart: half of that counts
    assert pace.last_take_s(2, 410.0) == pytest.approx(550.0)
    assert pace.last_take_s(1, 410.0) == -math.inf, "the last batch that it could be in is taken"


def test_a_sample_is_late_by_its_shortened_rest() -> None:
    pace = pace_of(late_z=1.0)
    take(pace, 0.0)
    take(pace, 100.0)
    assert not pace.is_late(2, 199.0, 0.0, 100.0)
    assert pace.is_late(2, 201.0, 0.0, 100.0)
    assert not pace.is_late(2, 400.0, math.log(2.5), 100.0)
    assert pace.is_late(0, 0.0, 0.0, 100.0)
    never = pace_of()
    take(never, 0.0)
    take(never, 100.0)
    assert not never.is_late(0, 1e9, 0.0, 100.0)


def test_a_sample_is_replaced_while_a_typical_one_ends_in_time() -> None:
    pace = pace_of()
    take(pace, 0.0)
    take(pace, 100.0)
    assert not pace.can_replace(2, 100.0), "no sample has ended"
    for took_s in (10.0, 150.0, 150.0, 150.0, 500.0):
        pace.note_sample(took_s)
    assert pace.can_replace(2, 150.0)  # the last batch is taken at 300 s
    assert not pace.can_replace(2, 151.0)
    for _ in range(SAMPLES_KEPT):
        pace.note_sample(101.0)
    assert pace.can_replace(2, 199.0), "samples of long ago are forgotten"
