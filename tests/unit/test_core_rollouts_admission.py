"""When the groups of a stored rollout begin, which are dropped, and when a batch is given, for a
trainer that does not wait."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.rollouts.buffer import Event, SampleBuffer
from treadle_core.rollouts.group import DropReason, Sample
from treadle_core.rollouts.pacing import LEAST_GROUPS, Admission
from treadle_core.rollouts.spec import RolloutSpec

SAMPLES = 2


class Rollout:
    """A rollout of many prompts with two samples each; batches have two groups."""

    def __init__(
        self, *, bound: int = 1, prompts: int = 200, replace: bool = False, in_flight: int = 0
    ) -> None:
        spec = RolloutSpec(
            tuple(f"p{number}" for number in range(prompts)),
            SAMPLES,
            SAMPLES,
            max_staleness=bound,
            batch_groups=2,
            replace_stale=replace,
            samples_in_flight=in_flight or None,
        )
        self.buffer = SampleBuffer(spec)
        self.admission = Admission(self.buffer)
        self.batches = itertools.count()

    def happen(self, event: Event | None, at_s: float) -> bool:
        """Apply an event, if there is one, and what follows of it."""
        if event is not None:
            self.buffer.apply(event)
            self.admission.note(event, at_s)
        return event is not None

    def follow(self, at_s: float) -> int:
        """Drop and admit what should be; return how many groups may have begun."""
        while self.happen(self.admission.decide_drop(), at_s):
            pass
        self.happen(self.admission.decide_admission(at_s), at_s)
        return self.buffer.groups_admitted

    def end(self, number: int, at_s: float, *, version: int = 0, samples: int = SAMPLES) -> None:
        """Let samples of a group arrive."""
        for index in range(samples):
            sample = Sample(f"p{number}-{index}", f"p{number}", index, oldest_version=version)
            self.happen(self.buffer.decide_arrival(sample), at_s)

    def take(self, at_s: float) -> list[str]:
        """Take a batch of two groups, or none; return its prompts."""
        batch = self.buffer.decide_batch(f"b{next(self.batches)}", 2, wait=True)
        self.happen(batch, at_s)
        return [prompt_id for prompt_id, _ in batch.groups] if batch is not None else []

    def publish(self, version: int, at_s: float) -> None:
        self.happen(self.buffer.decide_version(version), at_s)


def test_so_many_groups_begin_as_the_next_batches_may_take() -> None:
    rollout = Rollout(bound=1)
    assert rollout.follow(0.0) == 4
    rollout.end(0, 10.0)
    assert rollout.follow(10.0) == 4, "it waits to be taken"
    rollout.end(1, 11.0)
    assert rollout.take(12.0) == ["p0", "p1"]
    assert rollout.follow(12.0) == 4, "the next batch alone may take what begins now"
    rollout.publish(1, 20.0)
    assert rollout.follow(20.0) == 6


def test_a_trainer_that_waits_gets_groups_though_it_has_named_no_newer_weights() -> None:
    """It takes its next batch before it publishes, or never names a version. The bound is 0."""
    rollout = Rollout(bound=0)
    rollout.publish(0, 0.0)
    assert rollout.follow(0.0) == 2
    for number in (0, 1):
        rollout.end(number, 10.0)
    assert rollout.take(10.0) == ["p0", "p1"] and rollout.follow(11.0) == 2
    rollout.happen(rollout.admission.decide_admission(12.0, trainer_waits=True), 12.0)
    assert rollout.buffer.groups_admitted == 4
    assert rollout.admission.decide_admission(13.0, trainer_waits=True) is None


def test_no_more_samples_run_than_may_but_one_group_does_always() -> None:
    rollout = Rollout(bound=4, in_flight=6)
    assert rollout.follow(0.0) == 3
    rollout.end(0, 1.0, samples=1)
    assert rollout.follow(1.0) == 3, "a group begins whole"
    rollout.end(1, 2.0, samples=1)
    assert rollout.follow(2.0) == 4
    assert Rollout(in_flight=1).follow(0.0) == 1


def test_a_bound_on_open_groups_holds_too() -> None:
    spec = RolloutSpec(("a", "b", "c"), 1, 1, 3, batch_groups=2, max_open_groups=1)
    buffer = SampleBuffer(spec)
    admitted = Admission(buffer).decide_admission(0.0)
    assert admitted is not None and admitted.groups == 1


def test_a_group_that_grew_too_old_is_dropped_whole_and_makes_room() -> None:
    """The bound is one version, and the first sample of a group has tokens of version 0.

    Result: with version 2 it is dropped, also its sample that still runs, and another group begins.
    """
    rollout = Rollout(bound=1)
    rollout.publish(0, 0.0)
    rollout.follow(0.0)
    rollout.end(0, 5.0, samples=1)
    for version in (1, 2):
        rollout.publish(version, 10.0 * version)
        rollout.follow(10.0 * version)
    group = rollout.buffer.groups["p0"]
    assert group.settled and group.gone and rollout.buffer.drops == {DropReason.STALE: 1}
    assert rollout.buffer.groups_admitted > 4


def test_a_sample_that_comes_too_old_drops_its_group() -> None:
    rollout = Rollout(bound=0)
    rollout.publish(3, 0.0)
    rollout.follow(0.0)
    rollout.end(1, 5.0, version=2, samples=1)
    rollout.follow(5.0)
    assert rollout.buffer.groups["p1"].gone and not rollout.buffer.groups["p0"].gone


def test_where_samples_are_replaced_no_group_is_dropped() -> None:
    rollout = Rollout(bound=0, replace=True)
    rollout.publish(0, 0.0)
    rollout.follow(0.0)
    rollout.end(0, 5.0)
    rollout.publish(1, 10.0)
    rollout.follow(10.0)
    group = rollout.buffer.groups["p0"]
    assert not group.settled and group.started == 2 * SAMPLES


def test_a_batch_waits_for_groups_that_no_later_one_may_take() -> None:
    """Groups take 60 s or 80 s, the bound is one version, and a batch is taken 80 s after each new
    version. Then two other groups begin, and the trainer publishes 20 s later.

    Result: those two can be in the next batch alone. Two newer groups are complete before them, and
    that batch waits, but not once they have ended, nor once the trainer is far behind.
    """
    rollout = Rollout(bound=1)
    for version in range(LEAST_GROUPS):
        begin_s = 100.0 * version
        rollout.publish(version, begin_s)
        rollout.follow(begin_s)
        rollout.end(2 * version, begin_s + 60.0, version=version)
        rollout.end(2 * version + 1, begin_s + 80.0, version=version)
        assert rollout.admission.wait_s(begin_s + 80.0) == 0.0
        assert len(rollout.take(begin_s + 80.0)) == 2
        rollout.follow(begin_s + 80.0)
    first, now = 2 * LEAST_GROUPS, 100.0 * LEAST_GROUPS
    assert rollout.buffer.groups_admitted == first + 2
    rollout.publish(LEAST_GROUPS, now)
    assert rollout.follow(now) == first + 4
    for newer in (first + 2, first + 3):
        rollout.end(newer, now + 10.0, version=LEAST_GROUPS)
    assert 0.0 < rollout.admission.wait_s(now + 10.0) < 10.0
    for older in (first, first + 1):
        rollout.end(older, now + 20.0, version=LEAST_GROUPS - 1)
    assert rollout.admission.wait_s(now + 20.0) == 0.0
    assert rollout.take(now + 20.0) == [f"p{first}", f"p{first + 1}"]


@pytest.mark.parametrize(("max_staleness", "keep_groups"), [(None, None), (1, 1)])
def test_a_pace_needs_a_bound_and_all_groups(
    max_staleness: int | None, keep_groups: int | None
) -> None:
    with pytest.raises(ValueError, match="batch_groups"):
        RolloutSpec(("a",), 1, 1, max_staleness, keep_groups=keep_groups, batch_groups=1)
    with pytest.raises(ValueError, match="samples_in_flight"):
        RolloutSpec(("a",), 1, 1, 1, samples_in_flight=1)


@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60),
    bound=st.integers(0, 3),
    in_flight=st.integers(0, 9),
)
def test_a_trainer_that_goes_on_always_gets_its_next_batch(
    steps: list[tuple[int, bool]], bound: int, in_flight: int
) -> None:
    """Groups that run end in any order, some of them after their bound.

    Result: while prompts are left, some group runs, a batch is complete, or one is trained.
    """
    rollout = Rollout(bound=bound, prompts=30, in_flight=in_flight)
    version, now = 0, 0.0
    rollout.publish(0, now)
    for which, lingers in steps:
        now += 7.0
        rollout.follow(now)
        running = [
            number
            for number in range(rollout.buffer.groups_admitted)
            if not rollout.buffer.groups[f"p{number}"].settled
        ]
        if rollout.take(now):
            version += 1
            rollout.publish(version, now + 3.0)
        elif running:
            age = bound + 1 if lingers else 0
            rollout.end(running[which % len(running)], now, version=max(0, version - age))
        elif not rollout.buffer.over:
            ready = sum(group.ready for group in rollout.buffer.groups.values())
            assert ready >= 2 or rollout.buffer.groups_admitted == 30
