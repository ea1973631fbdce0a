"""Asynchronous training in the simulator: batches of whole groups, weights that make groups too
old, and the rules that waste less."""

import math
from typing import Any

import pytest
from support.simulated import engine, trajectory
from treadle_core.tuning import Tuning
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.predictors import make_predictor
from treadle_sim.systems import SYSTEMS
from treadle_sim.training import Counted, Trained, TrainingPlan
from treadle_sim.workloads.workload import TrajectoryWork, Workload

GROUP = 4
ENDLESS = 1_000_000


def works_of(prompts: int, samples: int = GROUP, longest: int = 2_000) -> list[TrajectoryWork]:
    """Prompts of which every fifth has a sample ten times as long as the others, or as is said;
    later samples are short."""
    return [
        TrajectoryWork(
            f"p{prompt}",
            sample,
            100,
            trajectory(
                0, [(longest if prompt % 5 == 0 and sample == 1 else 200 + 10 * sample, 5, 0.5)] * 2
            ).steps,
        )
        for prompt in range(prompts)
        for sample in range(samples)
    ]


def driver_of(prompts: int = 150, predictor: str = "none", **changed: Any) -> Driver:
    plan: dict[str, Any] = {
        "batch_groups": 4,
        "train_s": 4.0,
        "in_flight": 32,
        "bound": 1,
        "batches": 8,
        "warm_up": 2,
        **changed,
    }
    works = works_of(prompts, GROUP + plan.get("spares", 0), plan.pop("longest", 2_000))
    workload = Workload("w", tuple(works))
    return Driver(
        workload,
        Cluster((engine(slots=8),) * 2),
        SYSTEMS["sticky"].policy,
        Tuning(),
        None if predictor == "none" else make_predictor(predictor, workload, 0, ()),
        training=TrainingPlan(**plan),
    )


def train(**options: Any) -> Trained:
    driver = driver_of(**options)
    driver.run()
    assert driver.training is not None
    return driver.training.result()


def test_without_a_bound_nothing_is_lost_and_long_samples_are_trained_too() -> None:
    trained = train(bound=ENDLESS)
    assert (trained.drops, trained.dropped_share, trained.replaced) == ({}, 0.0, 0)
    assert trained.bias == pytest.approx(0.0, abs=0.3)
    assert trained.samples_h * trained.step_s / 3600.0 == pytest.approx(4 * GROUP)


def test_groups_that_are_too_old_are_dropped_whole_and_none_is_trained() -> None:
    driver = driver_of()
    driver.run()
    assert driver.training is not None
    trained = driver.training.result()
    assert set(trained.drops) == {"stale"}
    assert 0.0 < trained.dropped_share < 1.0
    assert trained.staleness <= 1.0
    assert trained.bias < 0.0, "groups with a long sample are the ones that are too old"
    left = [record for record in driver.controller.trajectories() if record.is_open]
    assert len(left) <= 32 + GROUP, "nothing of a dropped group stays open"


@pytest.mark.parametrize("bound", [1, 2])
@pytest.mark.parametrize("train_s", [4.0, 12.0])
def test_at_its_pace_a_rollout_trains_more_and_starves_long_samples_less(
    bound: int, train_s: float
) -> None:
    plan = {"prompts": 400, "batches": 20, "longest": 600, "bound": bound, "train_s": train_s}
    free, paced = train(**plan), train(**plan, paced=True)
    assert paced.dropped_share < 0.7 * free.dropped_share
    assert paced.neutral_h > 1.04 * free.neutral_h
    assert paced.bias > free.bias


def test_at_its_pace_a_rollout_feeds_a_slow_trainer_and_starves_long_samples_less() -> None:
    """The rollout could make three batches in the time of one."""
    plan: dict[str, Any] = {"prompts": 600, "train_s": 30.0, "batches": 20, "bound": 2}
    free, paced = train(**plan), train(**plan, paced=True)
    assert paced.step_s == free.step_s == pytest.approx(30.0), "the trainer never waits"
    assert paced.dropped_share < free.dropped_share / 2
    assert paced.bias > free.bias


def test_late_samples_are_given_up_and_replaced() -> None:
    """Told every length. Result: a group with a sample that cannot end in time is trained with
    another one, and nothing is too old."""
    dropped = train(prompts=800, predictor="oracle", late_z=0.0)
    replaced = train(prompts=800, predictor="oracle", late_z=0.0, spares=2)
    assert "late" in dropped.drops and not dropped.replaced
    assert replaced.replaced
    assert sum(replaced.drops.values()) < sum(dropped.drops.values())


def test_samples_may_be_counted_instead_of_groups() -> None:
    """A straggler holds the place of its group, but only its own as a sample."""
    groups, samples = (train(bound=ENDLESS, in_flight=16, counted=counted) for counted in Counted)
    assert samples.samples_h > groups.samples_h


def test_a_plan_that_cannot_be_played_is_refused() -> None:
    with pytest.raises(RuntimeError, match="batches came together"):
        train(prompts=20)
    works = works_of(2)[:-1]
    with pytest.raises(ValueError, match="equally many samples"):
        Driver(
            Workload("w", tuple(works)),
            Cluster((engine(),)),
            SYSTEMS["sticky"].policy,
            Tuning(),
            None,
            training=TrainingPlan(1, 1.0, 8, 1, 1),
        )


def test_the_same_plan_gives_the_same_figures() -> None:
    how: dict[str, Any] = {"predictor": "noisy", "paced": True, "late_z": 0.5, "spares": 1}
    first, again = (train(**how) for _ in range(2))
    assert first == again
    assert not math.isnan(first.neutral_h)
