"""The length cap: where it goes, when it opens, and what it does to rewards."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from treadle_core.rollouts.group import Candidate
from treadle_core.rollouts.length_cap import CapPolicy, CapReport, CapState, CutReward, shape_reward

POLICY = CapPolicy(
    ceiling_tokens=1_000,
    floor_tokens=50,
    percentile=0.9,
    soft_percentile=0.8,
    step_share=0.2,
    least_successes=10,
    window=100,
    open_every=5,
    most_cut_share=0.15,
)


def play(state: CapState, lengths: Sequence[int], rewards: Sequence[float] = ()) -> CapReport:
    """A step whose trajectories would have these lengths: its limit cuts them, and what is cut
    fails."""
    limit = state.limit_tokens
    samples = [
        Candidate(
            str(at),
            min(length, limit),
            reward if length <= limit else 0.0,
            truncated=length > limit,
        )
        for at, (length, reward) in enumerate(
            zip(lengths, rewards or [1.0] * len(lengths), strict=True)
        )
    ]
    return state.update(samples)


def test_the_cap_falls_in_bounded_steps_to_the_percentile_of_successes() -> None:
    state = CapState(POLICY)
    caps = [state.cap_tokens]
    for _ in range(20):
        play(state, range(10, 310, 10), [1.0] * 20 + [0.0] * 10)
        caps.append(state.cap_tokens)
    assert caps[:3] == [1_000, 800, 640]
    assert all(after >= 0.8 * before - 1 for before, after in itertools.pairwise(caps))
    assert state.cap_tokens == 181, "of the successes, 10 to 200; what failed does not count"
    assert state.soft_limit_tokens <= state.limit_tokens


def test_a_cap_that_cuts_does_not_draw_itself_down() -> None:
    """Seen through the cap, the 90th percentile of successes would fall with every update."""
    state = CapState(POLICY)
    caps = []
    for _ in range(200):
        play(state, range(10, 210, 10))
        caps.append(state.cap_tokens)
    assert set(caps[20:]) == {181}


def test_every_few_updates_a_step_has_no_cap() -> None:
    state = CapState(POLICY)
    limits = []
    for _ in range(40):
        limits.append(state.limit_tokens)
        report = play(state, range(10, 210, 10))
    assert [at for at, limit in enumerate(limits) if limit == POLICY.ceiling_tokens] == list(
        range(0, 40, 5)
    )
    assert report.limit_tokens == state.limit_tokens
    assert report.cut_share == pytest.approx(0.1)


def test_the_cap_opens_where_successes_have_grown() -> None:
    state = CapState(replace(POLICY, window=20))
    for _ in range(20):
        play(state, range(10, 210, 10))
    for _ in range(5):
        report = play(state, range(20, 420, 20))
        if state.open and "successes" in report.opened:
            break
    assert report.opened == "the cap would cut 50.0% of successes, more than 15.0%"
    assert state.limit_tokens == POLICY.ceiling_tokens
    assert state.cap_tokens == 362


def test_the_cap_opens_where_it_truncates_too_many() -> None:
    state = CapState(POLICY)
    for _ in range(21):
        play(state, range(10, 210, 10))
    assert state.limit_tokens < POLICY.ceiling_tokens
    report = play(state, [100] * 3 + [900] * 7)
    assert report.truncated_share == pytest.approx(0.7)
    assert state.limit_tokens == POLICY.ceiling_tokens
    assert "cut 70.0% of trajectories" in report.opened


def test_what_the_ceiling_cuts_does_not_keep_the_cap_open() -> None:
    state = CapState(POLICY)
    play(state, [*range(10, 210, 10), *[5_000] * 10])
    assert state.limit_tokens == 800


def test_there_is_no_cap_before_enough_successes_and_none_below_the_floor() -> None:
    state = CapState(POLICY)
    report = play(state, [10] * 9)
    assert (state.limit_tokens, report.opened) == (1_000, "9 of 10 successes are known")
    assert state.soft_limit_tokens == 1_000
    for _ in range(40):
        play(state, [10] * 9)
    assert state.cap_tokens == POLICY.floor_tokens


def test_the_state_survives_storage() -> None:
    state = CapState(POLICY)
    for _ in range(7):
        play(state, range(10, 210, 10))
    stored = json.loads(
        json.dumps({key: value for key, value in asdict(state).items() if key != "policy"})
    )
    again = CapState(POLICY, **stored)
    assert again == state
    assert play(again, range(10, 210, 10)) == play(state, range(10, 210, 10))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("floor_tokens", 1_001),
        ("percentile", 1.0),
        ("soft_percentile", 0.95),
        ("most_cut_share", 0.05),
        ("step_share", 0.0),
        ("least_successes", 101),
        ("open_every", 1),
        ("most_truncated_share", 0.0),
    ],
)
def test_a_wrong_policy_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(POLICY, **{field: value})


def test_the_share_that_the_percentile_cuts_by_itself_may_be_the_most() -> None:
    assert (
        replace(POLICY, percentile=0.95, soft_percentile=0.9, most_cut_share=0.05).most_cut_share
        == 0.05
    )


def test_rewards_of_cut_trajectories() -> None:
    short, near, cut = (Candidate("", n, 2.0, truncated=n == 200) for n in (100, 150, 200))
    assert [shape_reward(CutReward.SOFT, each, 100, 200) for each in (short, near, cut)] == [
        2.0,
        1.0,
        0.0,
    ]
    assert [shape_reward(CutReward.ZERO, each, 100, 200) for each in (short, near, cut)] == [
        2.0,
        2.0,
        0.0,
    ]
    assert [shape_reward(CutReward.IGNORE, each, 100, 200) for each in (short, near, cut)] == [
        2.0,
        2.0,
        None,
    ]
    punished = replace(cut, reward=-1.0)
    assert shape_reward(CutReward.SOFT, punished, 100, 200) == -1.0, "a penalty does not shrink"
    assert shape_reward(CutReward.IGNORE, punished, 100, 200) is None
    assert shape_reward(CutReward.ZERO, replace(short, reward=None), 100, 200) is None
    assert shape_reward(CutReward.SOFT, replace(near, length_tokens=200), 200, 200) == 0.0
