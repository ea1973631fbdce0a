"""Rules of selection: what each trains, and that a settled group needs no further sample."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.rollouts.group import (
    Candidate,
    DualEnd,
    FirstK,
    FirstMixed,
    Rule,
    ShortestFirst,
    darts_rule,
)

RULES: tuple[Rule, ...] = (
    FirstK(3),
    DualEnd(3, 1),
    ShortestFirst(3),
    FirstMixed(3),
    FirstMixed(3, drop_uniform=False),
)


def group(
    *lengths: int, rewards: Sequence[float | None] = (), truncated: str = "", failed: str = ""
) -> list[Candidate]:
    """Samples "a", "b", ... in order of arrival."""
    paired = itertools.zip_longest(lengths, rewards)
    names = "abcdefghijklmnop"
    return [
        Candidate(name, length, reward, truncated=name in truncated, failed=name in failed)
        for name, (length, reward) in zip(names, paired, strict=False)
    ]


def chosen(rule: Rule, candidates: Sequence[Candidate]) -> str:
    return "".join(rule.choose(candidates))


def test_first_k_takes_the_first_that_did_not_fail() -> None:
    samples = group(9, 1, 5, 3, failed="b")
    assert not FirstK(2).settled(samples[:2], 4)
    assert FirstK(2).settled(samples[:3], 4)
    assert chosen(FirstK(2), samples) == "ac"


def test_dual_end_waits_for_all_and_takes_both_ends() -> None:
    samples = group(50, 10, 40, 20, 90, 30)
    rule = DualEnd(keep=4, longest=1)
    assert not rule.settled(samples[:5], 6)
    assert rule.settled(samples, 6)
    assert chosen(rule, samples) == "bdef"  # 10, 20, 30 and 90, in order of arrival
    assert chosen(DualEnd(4, 2), samples) == "abde"


def test_dual_end_takes_no_truncated_sample_as_one_of_the_longest() -> None:
    samples = group(50, 10, 40, 20, 90, 90, truncated="ef", failed="a")
    assert chosen(DualEnd(3, 1), samples) == "bcd"
    assert chosen(DualEnd(4, 2), samples) == "bcde", (
        "too few are complete, so a truncated one fills the group"
    )


def test_equal_lengths_go_by_arrival() -> None:
    samples = group(7, 7, 7, 7)
    assert chosen(ShortestFirst(2), samples) == "ab"
    assert chosen(DualEnd(3, 1), samples) == "abc"


def test_tail_pruning_settles_with_enough_complete_samples_and_takes_the_shortest() -> None:
    samples = group(5, 30, 4, 6, truncated="b")
    assert not ShortestFirst(2).settled(samples[:2], 8)
    assert ShortestFirst(2).settled(samples[:3], 8)
    assert chosen(ShortestFirst(2), samples) == "ac"
    assert chosen(ShortestFirst(4), samples) == "abcd"
    assert chosen(ShortestFirst(2), group(3, 5, 4, truncated="a")) == "bc", "whatever cut it"


def test_dynamic_k_goes_on_until_outcomes_are_mixed() -> None:
    rule = FirstMixed(keep=2)
    samples = group(1, 2, 3, 4, rewards=(1.0, 1.0, None, 0.0))
    assert not rule.settled(samples[:3], 8)
    assert rule.settled(samples, 8)
    assert chosen(rule, samples) == "ad", "the first failure replaces the last of the first two"
    assert chosen(rule, group(1, 2, 3, rewards=(0.2, 1.0, 1.0))) == "ab"


def test_dynamic_k_drops_or_trains_a_group_of_one_outcome() -> None:
    samples = group(1, 2, 3, rewards=(0.0, 0.0, 0.0))
    assert FirstMixed(2).settled(samples, 3)
    assert chosen(FirstMixed(2), samples) == ""
    assert chosen(FirstMixed(2, drop_uniform=False), samples) == "ab"
    assert chosen(FirstMixed(2, success_at=0.0), samples) == "", "all succeed"


def test_a_saturated_prompt_is_pruned() -> None:
    assert darts_rule(16, 16, 8, 1) == ShortestFirst(8)
    assert darts_rule(15, 16, 8, 1) == DualEnd(8, 1)
    assert darts_rule(8, 8, 8, 1) == DualEnd(8, 1), "without redundancy there is nothing to prune"


def test_rules_that_keep_no_group_are_refused() -> None:
    for refused in (
        lambda: FirstK(0),
        lambda: FirstMixed(1),
        lambda: ShortestFirst(0),
        lambda: DualEnd(0, 0),
    ):
        with pytest.raises(ValueError, match="keep must be at least"):
            refused()
    with pytest.raises(ValueError, match="longest must be 0 to keep"):
        DualEnd(4, 5)


samples_of_a_group = st.lists(
    st.builds(
        Candidate,
        key=st.just(""),
        length_tokens=st.integers(1, 5),
        reward=st.sampled_from([None, 0.0, 1.0]),
        truncated=st.booleans(),
        failed=st.booleans(),
    ),
    max_size=8,
)


@given(samples_of_a_group, st.sampled_from(RULES))
def test_every_group_settles_and_trains_as_many_valid_samples_as_there_are(
    drawn: list[Candidate], rule: Rule
) -> None:
    samples = [
        Candidate(str(at), each.length_tokens, each.reward, each.truncated, each.failed)
        for at, each in enumerate(drawn)
    ]
    valid = [each.key for each in samples if not each.failed]
    keys = rule.choose(samples)
    assert rule.settled(samples, len(samples)), "all have come"
    assert [key for key in valid if key in keys] == list(keys), (
        "valid ones, once each, in order of arrival"
    )
    assert len(keys) == min(rule.keep, len(valid)) or (isinstance(rule, FirstMixed) and not keys)
    settled = [rule.settled(samples[:count], 9) for count in range(len(samples) + 1)]
    assert settled == sorted(settled), "a settled group stays settled"
    if True in settled and not isinstance(rule, ShortestFirst):
        at = settled.index(True)
        assert rule.choose(samples[:at]) == rule.choose(samples), "what comes later changes nothing"
