"""What an estimate says of its own doubt, in the terms of plans."""

import math

import pytest
from treadle_core.model import Estimate
from treadle_core.placing.question import MOST_LOG_SIGMA
from treadle_core.ranking.priorities import log_deviation


@pytest.mark.parametrize(
    ("p50", "p90", "expected"),
    [
        (100.0, 100.0 * math.exp(1.2815515655446004), 1.0),
        (100.0, 100.0, 0.0),
        (0.0, 100.0, 0.0),
        (1e-5, 1e5, MOST_LOG_SIGMA),
        (5e-324, 1e12, MOST_LOG_SIGMA),
    ],
)
def test_doubt_is_a_deviation_that_plans_take(p50: float, p90: float, expected: float) -> None:
    assert log_deviation(Estimate(0.0, p50, p90)) == pytest.approx(expected)
