"""Pages of trajectories: each once, whatever opens and is forgotten meanwhile."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.model import Policy, TrajectoryRecord, TrajectoryState
from treadle_runtime.errors import InvalidArgument
from treadle_scheduler.servicer import page_of


def records(count: int) -> list[TrajectoryRecord]:
    """Opened two at a time."""
    return [
        TrajectoryRecord(
            f"t{number:03}", "p", Policy(), opened_s=number // 2 / 7, open_request_id="r", rollout_id=f"r{number % 3}"
        )
        for number in range(count)
    ]


def walk(of: list[TrajectoryRecord], size: int, *, rollout_id: str = "", open_only: bool = False) -> list[str]:
    names, token = list[str](), ""
    while True:
        page, token = page_of(of, rollout_id=rollout_id, open_only=open_only, size=size, token=token)
        assert 0 < len(page) <= size or not names
        names += [record.trajectory_id for record in page]
        if not token:
            return names


@given(st.integers(0, 40), st.integers(1, 12))
def test_pages_show_each_trajectory_once_in_the_order_of_opening(count: int, size: int) -> None:
    assert walk(records(count), size) == [record.trajectory_id for record in records(count)]


def test_filters_hold_across_pages() -> None:
    of = [replace(r, state=TrajectoryState.FAILED) if number % 2 else r for number, r in enumerate(records(12))]
    assert walk(of, 2, rollout_id="r1") == ["t001", "t004", "t007", "t010"]
    assert walk(of, 2, rollout_id="r1", open_only=True) == ["t004", "t010"]


def test_forgetting_and_opening_between_pages_hides_and_repeats_nothing() -> None:
    of = records(6)
    _, token = page_of(of, rollout_id="", open_only=False, size=3, token="")
    of = [*of[4:], replace(of[5], trajectory_id="t900", opened_s=99.0)]  # the last one given is gone too
    rest, _ = page_of(of, rollout_id="", open_only=False, size=10, token=token)
    assert [record.trajectory_id for record in rest] == ["t004", "t005", "t900"]


@pytest.mark.parametrize("token", ["x", "????", "é", "soon/t0", "/t0", "0x1p99999/t0"])
def test_a_token_that_was_never_given_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        page_of(records(3), rollout_id="", open_only=False, size=1, token=token)
    assert refused.value.field == "page_token"
