"""Group advantages, drift between two policies, staleness."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle import VersionSpan
from treadle.training import (
    IGNORED,
    PackedRow,
    group_advantages,
    measure_drift,
    measure_staleness,
    pack,
)
from treadle.training.objective import LEAST_STD


@dataclass(frozen=True)
class Made:
    """A trajectory as `pack` and `measure_staleness` read it."""

    trajectory_id: str = "t0"
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: tuple[VersionSpan, ...] = ()


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_advantages_of_a_group_have_mean_0_and_deviation_1_or_teach_nothing(
    rewards: list[float],
) -> None:
    advantages = group_advantages(rewards)
    if np.std(rewards) < LEAST_STD:
        assert not advantages.any()
        return
    assert advantages.mean() == pytest.approx(0.0, abs=1e-6)
    assert advantages.std() == pytest.approx(1.0)
    assert group_advantages(rewards, scale_by_std=False) == pytest.approx(
        np.array(rewards) - np.mean(rewards)
    )


def test_advantages_of_a_group_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]).tolist() == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([3.0, 1.0], scale_by_std=False).tolist() == [1.0, -1.0]
    assert group_advantages([0.7]).tolist() == [0.0]
    assert group_advantages([0.1 + 0.2, 0.3]).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="rewards must be finite"):
        group_advantages([1.0, math.nan])


def rows_of(*logprobs: list[float]) -> list[PackedRow]:
    """One trajectory for each list, after a prompt of one token, in one row."""
    batch = [
        Made(f"t{index}", [5] * (len(each) + 1), [0] + [1] * len(each), [0.0, *each])
        for index, each in enumerate(logprobs)
    ]
    return pack(batch, 64)


def shifted(row: PackedRow, by: dict[int, float]) -> np.ndarray:
    """The row's old logprobs, those of each member higher by so much; nonsense where no label is
    trained on."""
    member = np.array(row.members)[row.segments]
    new = row.old_logprobs + np.array([by.get(int(each), 0.0) for each in member])
    return np.where(row.labels == IGNORED, np.nan, new)


def test_equal_policies_have_no_drift() -> None:
    [row] = rows_of([-1.0, -2.0], [-0.5])
    report = measure_drift([row], [shifted(row, {})])
    assert (report.batch.tokens, report.batch.k1, report.batch.k3) == (3, 0.0, 0.0)
    assert (report.batch.clip_fraction, report.batch.max_ratio, report.batch.is_large) == (
        0.0,
        1.0,
        False,
    )
    assert "which is large" not in report.batch.describe()


def test_drift_is_told_for_the_batch_and_for_the_trajectory_that_causes_it() -> None:
    """The trainer gives one of two trajectories half the probability a token, and the other the
    same.

    Result: k1 = log 2, k3 = 1/2 - 1 + log 2 for the first, 0 for the second, and the mean over
    tokens for the batch.
    """
    [row] = rows_of([-1.0, -2.0], [-0.5, -0.5])
    report = measure_drift([row], [shifted(row, {0: -math.log(2.0)})])
    first, second, batch = report.trajectories[0], report.trajectories[1], report.batch
    assert first.k1 == pytest.approx(math.log(2.0), rel=1e-6)
    assert first.k3 == pytest.approx(math.log(2.0) - 0.5, rel=1e-6)
    assert first.max_ratio == pytest.approx(2.0, rel=1e-6)
    assert (first.clip_fraction, second.clip_fraction, batch.clip_fraction) == (1.0, 0.0, 0.5)
    assert second.k3 == 0.0
    assert batch.k3 == pytest.approx(first.k3 / 2.0)
    assert batch.is_large
    assert "which is large" in batch.describe()


def test_the_clip_fraction_counts_both_sides_and_follows_the_bound() -> None:
    [row] = rows_of([-1.0], [-1.0], [-1.0])
    new = shifted(row, {0: math.log(1.3), 1: math.log(0.7), 2: math.log(1.1)})
    assert measure_drift([row], [new]).batch.clip_fraction == pytest.approx(2 / 3)
    assert measure_drift([row], [new], clip=0.05).batch.clip_fraction == 1.0
    assert measure_drift([row], [new], clip=0.5).batch.clip_fraction == 0.0


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=20), st.floats(-500, 500))
def test_k3_is_never_negative_and_finite_however_far_the_policies_are_apart(
    old: list[float], by: float
) -> None:
    [row] = rows_of(old)
    drift = measure_drift([row], [shifted(row, {0: by})]).batch
    assert drift.k3 >= -1e-6
    assert math.isfinite(drift.k3) and math.isfinite(drift.max_ratio)


def test_logprobs_that_do_not_belong_to_the_rows_are_refused() -> None:
    [row] = rows_of([-1.0])
    with pytest.raises(ValueError, match="one array a row: 0 for 1 rows"):
        measure_drift([row], [])
    with pytest.raises(ValueError, match=r"row 0 must have the shape \(2,\), have \(3,\)"):
        measure_drift([row], [np.zeros(3)])
    with pytest.raises(ValueError, match="row 0 must be finite"):
        measure_drift([row], [np.full(2, -np.inf)])
    with pytest.raises(ValueError, match="at least one trajectory"):
        measure_drift([], [])


def test_staleness_is_that_of_the_oldest_token() -> None:
    spans = (VersionSpan("default", 3, 5), VersionSpan("2", 5, 9))
    assert measure_staleness(Made(version_spans=spans), 3) == 3
    assert measure_staleness(Made(version_spans=spans[1:]), 3) == 1
    assert measure_staleness(Made(), 3) == 0
    with pytest.raises(
        ValueError, match="trajectory t0: weight versions must be integers for a staleness, are v2"
    ):
        measure_staleness(Made(version_spans=(VersionSpan("v2", 0, 1),)), 3)
