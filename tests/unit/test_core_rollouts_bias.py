"""The bias guard: distributions of what is trained beside what was sampled, and alarms in words."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from treadle_core.rollouts.bias import LENGTH_EDGES, BiasGuard, Histogram, distance, judge_kept
from treadle_core.rollouts.group import Candidate


def group(lengths: Sequence[int], rewards: Sequence[float | None]) -> list[Candidate]:
    return [
        Candidate(str(at), length, reward)
        for at, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]


def test_a_histogram_knows_quantiles_to_the_width_of_a_bin() -> None:
    counted = Histogram(LENGTH_EDGES)
    for length in range(1, 2_001):
        counted.add(length)
    for fraction in (0.1, 0.5, 0.9):
        assert 2_000 * fraction <= counted.quantile(fraction) <= 2_000 * fraction * 2 ** (1 / 8)
    counted.add(1e9)
    assert counted.counts[-1] == 1.0, "beyond the last edge"
    assert Histogram(LENGTH_EDGES).quantile(0.5) == 0.0
    with pytest.raises(ValueError, match="bins"):
        Histogram((1.0, 2.0), [1.0])


def test_the_distance_of_distributions() -> None:
    one, other = (
        Histogram((1.0, 2.0, 3.0), [1.0, 1.0, 0.0]),
        Histogram((1.0, 2.0, 3.0), [0.0, 0.0, 5.0]),
    )
    assert distance(one, one) == 0.0
    assert distance(one, other) == 1.0
    assert distance(one, Histogram((1.0, 2.0, 3.0), [1.0, 1.0, 2.0])) == pytest.approx(0.5)


def test_training_all_that_is_sampled_is_no_bias() -> None:
    guard = BiasGuard()
    for at in range(50):
        samples = group([10, 20, 40, 80], [1.0, 0.0, float(at % 2), 1.0])
        guard.observe(samples, [each.key for each in samples], stale_tokens={0: 100, 2: 50})
    assert guard.length.distance == guard.reward.distance == guard.rate.distance == 0.0
    assert guard.kept.regime == "all"
    assert guard.mean_staleness == pytest.approx(2 / 3)
    assert (guard.sampled_tokens, guard.trained_tokens) == (7_500, 7_500)
    assert not guard.drops and not guard.alarms()


def test_starved_long_samples_raise_an_alarm_that_says_what_to_change() -> None:
    guard = BiasGuard()
    for _ in range(50):
        guard.observe(group([10, 12, 14, 16, 900], [1.0, 0.0, 1.0, 0.0, 1.0]), ["0", "1", "2", "3"])
    assert guard.drops == {"not_chosen": 50}
    assert guard.length.quantiles()["sampled"][2] > 800 > guard.length.quantiles()["trained"][2]
    assert not guard.alarms(), "900 is the 90th percentile itself"
    for _ in range(100):
        guard.observe(
            group([10, 12, 14, 16], [1.0, 0.0, 1.0, 0.0]),
            ["0", "1", "2", "3"],
            aborted_tokens=[600],
        )
    assert guard.drops["aborted"] == 100
    (alarm,) = guard.alarms()
    assert alarm.startswith(
        "Long samples are starved: 6.7% of sampled and 0.0% of trained samples have more than"
    )
    assert "raise the cap" in alarm


def test_dropping_groups_where_all_fail_starves_hard_prompts() -> None:
    guard = BiasGuard()
    for at in range(60):
        hard = at % 2 == 0
        samples = group([10] * 4, [0.0] * 4 if hard else [1.0, 0.0, 1.0, 1.0])
        guard.observe(
            samples, [] if hard else ["0", "1", "2", "3"], reasons=dict.fromkeys("0123", "uniform")
        )
    assert guard.drops == {"uniform": 120}
    assert guard.rate.distance == pytest.approx(0.5)
    (alarm,) = guard.alarms()
    assert alarm.startswith("Hard prompts are starved: 50.0% of sampled and 0.0% of trained")
    assert guard.kept == judge_kept(120, 240)


def test_few_samples_raise_no_alarm() -> None:
    guard = BiasGuard()
    guard.observe(group([10] * 99, [0.0] * 99), [])
    assert not guard.alarms()


@pytest.mark.parametrize(
    ("trained", "regime"), [(100, "all"), (94, "working"), (50, "working"), (49, "wasteful")]
)
def test_the_regimes_of_the_kept_fraction(trained: int, regime: str) -> None:
    assert judge_kept(trained, 100).regime == regime
    assert judge_kept(0, 0).value == 1.0


def test_a_failed_sample_has_a_length_and_no_reward() -> None:
    guard = BiasGuard()
    failed = Candidate("x", 30, 1.0, failed=True)
    guard.observe([failed, Candidate("y", 40, 0.0)], ["y"])
    assert guard.drops == {"failed": 1}
    assert guard.length.sampled.total == 2.0
    assert guard.rate.sampled.quantile(0.5) == 0.05 and guard.reward.sampled.total == 1.0
    with pytest.raises(ValueError, match="'z'"):
        guard.observe([failed], ["z"])


def test_counts_can_be_stored() -> None:
    guard = BiasGuard()
    guard.observe(group([10, 20], [1.0, None]), ["0"], stale_tokens={1: 10})
    stored = json.loads(json.dumps(asdict(guard)))
    assert Histogram(
        tuple(stored["length"]["sampled"]["edges"]), stored["length"]["sampled"]["counts"]
    ) == (guard.length.sampled)
