"""First-K verdicts of one group."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.rollouts.buffer import DropReason, Group, RolloutSpec, Sample, SampleTakenError, Verdict, is_stale


def spec_of(samples: int, keep: int, bound: int | None = None) -> RolloutSpec:
    return RolloutSpec(("p",), samples_per_prompt=samples, keep_per_prompt=keep, max_staleness=bound)


def hand_in(group: Group, spec: RolloutSpec, sample: Sample, newest: int | None = None) -> tuple[Group, Verdict]:
    verdict = group.judge(sample, spec, newest, cancelled=False)
    return group.with_sample(sample, verdict, settled_order=0), verdict


def test_a_group_settles_when_enough_samples_are_kept_and_drops_the_rest() -> None:
    """Two of three samples are wanted. The second settles the group; the third is dropped as GROUP_SETTLED.

    Result: kept, kept and settled, dropped.
    """
    spec, group = spec_of(3, 2), Group("p")
    group, first = hand_in(group, spec, Sample("a", "p", 0))
    group, second = hand_in(group, spec, Sample("b", "p", 1))
    group, third = hand_in(group, spec, Sample("c", "p", 2))
    assert (first.kept, first.group_settled) == (True, False)
    assert (second.kept, second.group_settled) == (True, True)
    assert (third.drop_reason, third.group_settled) == (DropReason.GROUP_SETTLED, True)
    assert [sample.trajectory_id for sample in group.kept] == ["a", "b"]


def test_a_failed_sample_is_dropped_and_a_group_with_failures_settles_once_all_are_in() -> None:
    spec, group = spec_of(2, 2), Group("p")
    group, first = hand_in(group, spec, Sample("a", "p", 0, failed=True))
    assert first.drop_reason is DropReason.FAILED and not first.group_settled
    group, second = hand_in(group, spec, Sample("b", "p", 1))
    assert second.kept and second.group_settled
    assert group.ready


def test_a_group_in_which_everything_failed_settles_and_never_goes_out() -> None:
    spec, group = spec_of(1, 1), Group("p")
    group, verdict = hand_in(group, spec, Sample("a", "p", 0, failed=True))
    assert verdict.group_settled
    assert group.settled and not group.ready


def test_the_same_trajectory_gets_its_first_verdict_again_even_after_its_group_settled() -> None:
    spec, group = spec_of(3, 1), Group("p")
    group, first = hand_in(group, spec, Sample("a", "p", 0))
    again = group.judge(Sample("a", "p", 0), spec, None, cancelled=True)
    assert again == first


def test_a_sample_index_belongs_to_the_first_trajectory_that_hands_it_in() -> None:
    spec, group = spec_of(3, 2), Group("p")
    group, _ = hand_in(group, spec, Sample("a", "p", 0))
    with pytest.raises(SampleTakenError) as refused:
        group.judge(Sample("b", "p", 0), spec, None, cancelled=False)
    assert refused.value.trajectory_id == "a"


def test_a_sample_older_than_the_bound_is_stale_on_arrival() -> None:
    spec, group = spec_of(2, 2, bound=1), Group("p")
    _, verdict = hand_in(group, spec, Sample("a", "p", 0, oldest_version=3), newest=5)
    assert verdict.drop_reason is DropReason.STALE
    _, verdict = hand_in(group, spec, Sample("a", "p", 0, oldest_version=4), newest=5)
    assert verdict.kept


@pytest.mark.parametrize(
    ("oldest", "newest", "bound", "stale"),
    [
        (3, 5, 1, True),
        (4, 5, 1, False),
        (9, 5, 0, False),
        (0, 99, None, False),
        (None, 99, 0, False),
        (0, None, 0, False),
    ],
)
def test_staleness_is_the_lag_of_the_oldest_token_behind_the_newest_version(
    oldest: int | None, newest: int | None, bound: int | None, stale: bool
) -> None:
    assert is_stale(oldest, newest, bound) is stale


@pytest.mark.parametrize(
    ("prompts", "samples", "keep", "bound", "cap"),
    [((), 1, 1, None, None), (("p", "p"), 1, 1, None, None), (("p",), 2, 0, None, None), (("p",), 2, 3, None, None),
     (("p",), 1, 1, -1, None), (("p",), 1, 1, None, 0)],
)  # fmt: skip
def test_a_spec_no_group_could_satisfy_is_refused(
    prompts: tuple[str, ...], samples: int, keep: int, bound: int | None, cap: int | None
) -> None:
    with pytest.raises(ValueError, match="must be"):
        RolloutSpec(prompts, samples, keep, bound, cap)


@settings(deadline=None)
@given(
    keep=st.integers(1, 5),
    extra=st.integers(0, 4),
    fates=st.lists(st.booleans(), max_size=12),
)
def test_a_group_never_keeps_more_than_k_and_settles_exactly_when_it_has_k_or_everything(
    keep: int, extra: int, fates: list[bool]
) -> None:
    spec, group = spec_of(keep + extra, keep), Group("p")
    for index, failed in enumerate(fates[: spec.samples_per_prompt]):
        was_settled = group.settled
        group, verdict = hand_in(group, spec, Sample(f"t{index}", "p", index, failed=failed))
        assert len(group.kept) <= keep
        assert group.settled == (len(group.kept) == keep or group.received == spec.samples_per_prompt)
        assert group.settled or not was_settled
        assert verdict.group_settled == group.settled
