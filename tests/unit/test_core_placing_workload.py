"""Longest first, to the last tie: the counting sort against a comparing one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.placing.workload import LAG, Workspace, rank, rank_by_numpy

lengths = st.one_of(
    st.floats(0.0, 1e15),
    st.floats(0.0, 40_000.0),
    st.integers(0, 50).map(float),
    st.sampled_from([0.0, -0.0, 5e-324, 1.0, 1.0 + 2**-52, 1e15]),
)


def same(given: list[float], workspace: Workspace | None = None) -> None:
    values = np.array(given)
    n = len(values)
    contexts = np.array([index % 7 * 100.5 for index in range(n)])
    placed = np.arange(n) % 3 == 0
    order, ranks = rank(values, contexts, placed, workspace)
    expected_order, expected = rank_by_numpy(values, contexts, placed)
    assert order.tolist() == expected_order.tolist()
    assert (ranks == expected).all()


@settings(max_examples=300)
@given(st.lists(lengths, max_size=80))
def test_the_order_and_the_sums_are_those_of_a_stable_sort(given: list[float]) -> None:
    same(given)


@pytest.mark.parametrize("seed", range(6))
def test_many_that_share_the_upper_bits_are_in_exact_order_too(seed: int) -> None:
    """One length far above the rest leaves them few keys; neighbours in the last bits leave them
    one."""
    rng = np.random.default_rng(seed)
    for crowd in (
        1.0 + rng.integers(0, 40, 500) * 2.0**-52,
        rng.uniform(0.0, 1.0, 500),
        rng.lognormal(0.0, 0.001, 500),
        np.repeat(rng.uniform(0.0, 1.0, 5), 10 * LAG),
        np.concatenate([rng.uniform(0, 1e-9, LAG + 1), np.zeros(90)]),
    ):
        same(rng.permutation(np.append(crowd, 1e12)).tolist())
        same(crowd.tolist())


def test_a_workspace_serves_one_plan_after_another_of_any_size() -> None:
    rng = np.random.default_rng(1)
    workspace = Workspace()
    for n in (5, 700, 0, 1, 64, 700):
        same(rng.lognormal(7, 1, n).round().tolist(), workspace)
