"""Heddle's dynamic program, as the figure of placement plays it."""

import numpy as np
import pytest
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.solver import tabulate

from treadle_bench.placement.measure import aggregate, least_makespan


@pytest.mark.parametrize("model", list(CostModel))
@pytest.mark.parametrize("seed", range(4))
def test_bundles_of_short_trajectories_lose_little_and_only_what_one_bundle_adds(
    model: CostModel, seed: int
) -> None:
    """Heddle's aggregation (§5.2), and what it saves: the program is quadratic in the ranks at
    which it may cut."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(6.5, 1.0, 600)
    spec = PlanEngine("e", 40, 0, 1, DecodeCurve(0.01, 2e-4, 1e-8))
    costs = tabulate(model, lengths, rng.uniform(0, 900, 600), np.zeros(600, bool), [spec] * 6)
    exact_s = least_makespan(costs)
    cuts = aggregate(costs, float(np.quantile(lengths, 0.8)), 8)
    assert len(cuts) < 200
    assert exact_s <= least_makespan(costs, cuts) <= exact_s * 1.02
