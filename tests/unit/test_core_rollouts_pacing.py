"""The pace of an asynchronous rollout: when groups begin, when a batch is given, and what would end
too late."""

import math

import pytest
from treadle_core.rollouts.pacing import LEAST_GROUPS, SAMPLES_KEPT, Durations, Pace


def pace_of(*, late_z: float = math.inf, bound: int = 1) -> Pace:
    return Pace(bound, batch_groups=10, late_z=late_z)


def take(pace: Pace, at_s: float, *, train_s: float | None = 0.0) -> None:
    pace.note_taken(10, at_s)
    if train_s is not None:
        pace.note_published(pace.version + 1, at_s + train_s)


def measured(bound: int = 1, took_s: tuple[float, ...] = (60.0, 80.0)) -> Pace:
    """A pace with batches at 0 and 100 s, 40 s of training, and groups that take as long as is
    said. Its newest weights are there since 140 s."""
    pace = pace_of(bound=bound)
    take(pace, 0.0, train_s=40.0)
    take(pace, 100.0, train_s=40.0)
    for _ in range(LEAST_GROUPS):
        for each in took_s:
            pace.note_group(each, ended=True)
    return pace


def test_no_more_groups_begin_than_batches_may_still_take() -> None:
    pace = pace_of(bound=1)
    assert pace.may_begin(19, 0.0)
    assert not pace.may_begin(20, 0.0)
    take(pace, 50.0, train_s=None)
    assert pace.may_begin(9, 60.0), "while one is trained, the next one alone may take them"
    assert not pace.may_begin(10, 60.0)
    pace.note_published(pace.version + 1, 90.0)
    assert pace.may_begin(19, 90.0)


def test_a_batch_may_be_taken_in_parts_and_versions_have_the_trainers_numbers() -> None:
    pace = pace_of(bound=1)
    pace.note_published(17, 0.0)
    assert not pace.is_lost(16) and pace.is_lost(15)
    pace.note_taken(4, 50.0)
    assert pace.may_begin(19, 50.0), "it does not train yet"
    pace.note_taken(6, 60.0)
    assert pace.is_lost(16) and not pace.may_begin(10, 60.0)
    pace.note_published(18, 90.0)
    pace.note_taken(4, 95.0)
    assert pace.may_begin(19, 95.0), "a part of the next batch"


def test_without_a_version_of_tolerance_nothing_begins_while_a_batch_is_trained() -> None:
    pace = pace_of(bound=0)
    assert pace.may_begin(9, 0.0) and not pace.may_begin(10, 0.0)
    take(pace, 50.0, train_s=None)
    assert not pace.may_begin(0, 60.0)
    pace.note_published(pace.version + 1, 90.0)
    assert pace.may_begin(0, 90.0)


def test_a_group_that_would_miss_its_last_batch_begins_with_the_next_weights() -> None:
    """The trainer takes a batch each 100 s and publishes its weights 40 s later."""
    pace = measured()
    take(pace, 200.0, train_s=None)
    assert pace.last_take_s(2, 200.0) == 300.0
    assert pace.may_begin(5, 201.0), "both kinds end in time"
    assert not pace.may_begin(5, 225.0), "the longer ones do not, and weights come at 240 s"
    assert not pace.may_begin(5, 239.0)
    pace.note_published(pace.version + 1, 240.0)
    assert pace.may_begin(5, 240.0)


def test_a_trainer_that_waits_gets_its_batch_however_late_it_is() -> None:
    pace = measured()
    assert pace.may_begin(9, 10_000.0)


def test_a_batch_waits_for_groups_that_no_later_batch_may_take() -> None:
    pace = measured()
    assert pace.is_last_batch(1) and not pace.is_last_batch(2)
    assert not pace.is_lost(1) and pace.is_lost(0)
    assert pace.wait_s([], 10, 0.0, 200.0) == 0.0, "there are none"
    # Each has run for 70 s of 80 that the longer kind takes.
    assert 0.0 < pace.wait_s([130.0] * 4, 10, 0.0, 200.0) < 10.0
    assert pace.wait_s([130.0], 10, 0.0, 200.0) == 0.0, "a tenth of the work of a batch"
    assert pace.wait_s([130.0] * 4, 10, 60.0, 200.0) == 0.0, "too many slots are idle"
    assert pace.wait_s([130.0] * 4, 20, 0.0, 200.0) == 0.0, "the next batch is complete too"
    assert pace.wait_s([100.0] * 4, 10, 0.0, 200.0) == 0.0, "longer than any that has ended"
    take(pace, 200.0, train_s=None)
    assert pace.is_lost(1), "the batch that it could be in is taken"


def test_durations_count_what_was_dropped_before_it_ended() -> None:
    durations = Durations()
    for took_s in (10.0, 20.0, 30.0, 40.0):
        durations.note(took_s, ended=True)
    assert not durations.is_known
    assert [durations.lasting(at_s) for at_s in (5.0, 10.0, 25.0, 40.0)] == [1.0, 0.75, 0.5, 0.0]
    assert durations.work_s(25.0) == pytest.approx((10.0 + 20.0) / 4)
    for _ in range(4):
        durations.note(20.0, ended=False)
    # Kaplan and Meier: 8 are known, of which 7 last longer than 10 s, 6 longer than 20 s, and two
    # of those were seen longer.
    assert durations.lasting(10.0) == pytest.approx(7 / 8)
    assert durations.lasting(20.0) == pytest.approx(6 / 8)
    assert durations.lasting(30.0) == pytest.approx(3 / 8)
    assert durations.work_s(30.0) == pytest.approx(10 / 8 + 20 / 8 + 30 * 3 / 8)


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
    take(pace, 400.0, train_s=None)  # 100 s apart: half of that counts
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
