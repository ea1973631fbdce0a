"""The curve behind every estimate, against Kaplan-Meier and against the distribution that the
totals came from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.ranking.evidence import (
    TOKEN_KNOTS,
    Tally,
    count_totals,
    lognormal,
    posterior,
    remaining_quantiles,
)

BASE = lognormal(TOKEN_KNOTS, 1_000.0, 1.0)

totals = st.lists(st.integers(0, 200_000).map(float), max_size=30)


def kaplan_meier(ended: list[float], censored: list[float], at: float) -> float:
    alive = 1.0
    for value in sorted(set(ended)):
        if value > at:
            break
        at_risk = sum(each >= value for each in ended) + sum(each >= value for each in censored)
        alive *= 1.0 - ended.count(value) / at_risk
    return alive


@given(totals, totals, st.floats(0.5, 20.0), st.floats(0, 100_000))
def test_a_curve_never_rises_and_stays_between_one_and_zero_nor_do_quantiles_of_what_remains_fall(
    ended: list[float], censored: list[float], weight: float, done: float
) -> None:
    curve = posterior(TOKEN_KNOTS, BASE, weight, count_totals(ended, censored))
    assert (np.diff(curve) <= 0).all()
    assert 0.0 <= curve[-1] <= curve[0] <= 1.0
    p10, p50, p90 = remaining_quantiles(TOKEN_KNOTS, curve, done)
    assert 0.0 <= p10 <= p50 <= p90 < TOKEN_KNOTS[-1]


@given(totals.filter(bool), totals)
def test_when_the_base_counts_next_to_nothing_the_curve_is_kaplan_meiers(
    ended: list[float], censored: list[float]
) -> None:
    """Below the largest total: beyond it Kaplan-Meier says nothing, and the base speaks."""
    curve = posterior(TOKEN_KNOTS, BASE, 1e-9, count_totals(ended, censored))
    for at in range(0, len(TOKEN_KNOTS), 60):
        if TOKEN_KNOTS[at] < max(ended + censored) and BASE[at] > 1e-3:
            assert curve[at] == pytest.approx(
                kaplan_meier(ended, censored, float(TOKEN_KNOTS[at])), abs=1e-5
            )


def test_the_same_trajectory_still_running_says_nothing_about_its_own_rest() -> None:
    without = posterior(TOKEN_KNOTS, BASE, 2.0, count_totals([300.0, 900.0, 2_000.0], [700.0]))
    with_itself = posterior(
        TOKEN_KNOTS, BASE, 2.0, count_totals([300.0, 900.0, 2_000.0], [700.0, 800.0])
    )
    assert remaining_quantiles(TOKEN_KNOTS, without, 820.0) == pytest.approx(
        remaining_quantiles(TOKEN_KNOTS, with_itself, 820.0), rel=0.02
    )


def test_beyond_all_that_was_seen_the_base_says_how_much_remains() -> None:
    assert posterior(TOKEN_KNOTS, BASE, 3.0, count_totals([], [])) is BASE
    curve = posterior(TOKEN_KNOTS, BASE, 2.0, count_totals([100.0, 200.0], []))
    assert remaining_quantiles(TOKEN_KNOTS, curve, 5_000.0) == pytest.approx(
        remaining_quantiles(TOKEN_KNOTS, BASE, 5_000.0), rel=1e-6
    )


def test_with_many_observations_the_quantiles_converge_to_the_true_ones() -> None:
    rng = np.random.default_rng(1)
    true = np.array([3_000.0 * np.exp(0.5 * z) for z in (-1.2816, 0.0, 1.2816)])
    errors = []
    for count in (4, 64, 4_096):
        samples = rng.lognormal(np.log(3_000.0), 0.5, count)
        # some are cut before their end, at random
        cuts = rng.lognormal(np.log(6_000.0), 0.5, count)
        ended, censored = samples[samples <= cuts].tolist(), cuts[samples > cuts].tolist()
        found = remaining_quantiles(
            TOKEN_KNOTS, posterior(TOKEN_KNOTS, BASE, 2.0, count_totals(ended, censored)), 0.0
        )
        errors.append(float(np.abs(np.log(np.array(found) / true)).max()))
    assert errors[2] < 0.06
    assert errors[2] < errors[1] < errors[0]


def test_what_is_added_to_a_tally_and_taken_away_leaves_no_trace() -> None:
    tally = Tally(TOKEN_KNOTS)
    tally.add(500, own_end=True)
    before = posterior(TOKEN_KNOTS, BASE, 2.0, tally.observed).tolist()
    tally.add(700, own_end=False)
    tally.add(90_000_000, own_end=True)
    assert posterior(TOKEN_KNOTS, BASE, 2.0, tally.observed).tolist() != before
    tally.add(90_000_000, own_end=True, times=-1)
    tally.add(700, own_end=False, times=-1)
    assert posterior(TOKEN_KNOTS, BASE, 2.0, tally.observed).tolist() == before
