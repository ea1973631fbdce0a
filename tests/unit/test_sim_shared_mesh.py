"""Jobs that share simulated engines: the real controller, queues and plans, under a virtual clock
(ADR 0039)."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from support.shared_mesh import SharedMesh, Turns
from treadle_core.model import Ordering, PlacementRule, Policy

WEIGHTS = {"heavy": 3.0, "light": 1.0}
AMPLE_KV = 10_000_000
WARM_S = 30.0  # until both jobs have what they are due
FCFS = Policy(ordering=Ordering.FCFS, placement=PlacementRule.PLANNED, migrate=False, reserve=True)

LEAST_LOAD = Policy(
    ordering=Ordering.FCFS, placement=PlacementRule.LEAST_LOAD, migrate=False, reserve=True
)


def agents(seed: int, least: int = 50, most: int = 250) -> Callable[[int], Turns]:
    """Three to six turns of so many tokens, each with a tool of up to a second."""
    rng = Random(seed)
    return lambda _: [(rng.randint(least, most), rng.random()) for _ in range(rng.randint(3, 6))]


def loaded(
    engines: int,
    slots: int,
    kv_tokens: int,
    seconds: float,
    open_each: int = 40,
    policy: Policy | None = None,
) -> tuple[SharedMesh, dict[str, float], dict[str, float]]:
    """Both jobs have more open than fits, all the time; light may have another policy. Also what
    each got: seconds of slots and of reserved KV tokens."""
    mesh = SharedMesh(engines, slots, kv_tokens)
    for seed, (job, weight) in enumerate(WEIGHTS.items()):
        mesh.job(job, weight, policy if job == "light" else None)
        mesh.flood(job, open_each, agents(seed))
    mesh.run(seconds)
    return mesh, mesh.slot_seconds(WARM_S, seconds), mesh.kv_token_seconds(WARM_S, seconds)


def ratio(got: dict[str, float]) -> float:
    return got["heavy"] / got["light"]


@pytest.mark.parametrize("policy", [None, FCFS], ids=["one policy", "two policies"])
def test_two_loaded_jobs_get_slots_and_kv_in_the_proportion_of_their_weights(
    policy: Policy | None,
) -> None:
    mesh, slots, kv = loaded(engines=3, slots=8, kv_tokens=12_000, seconds=120.0, policy=policy)
    assert ratio(slots) == pytest.approx(3.0, rel=0.1)
    assert ratio(kv) == pytest.approx(3.0, rel=0.1)
    assert sum(slots.values()) > 0.9 * 3 * 8 * (120.0 - WARM_S), "no slot is kept for anybody"
    assert mesh.evictions < 0.15 * sum(len(each.steps) for each in mesh.trajectories)


@pytest.mark.parametrize(
    ("engines", "slots", "tokens"), [(2, 4, 20), (2, 4, 100), (3, 8, 20), (3, 8, 100)]
)
def test_jobs_with_most_of_their_steps_on_different_engines_get_slots_in_the_proportion_of_their_weights(
    engines: int, slots: int, tokens: int
) -> None:
    """Steps of equal length with hardly a tool between them, so that they end together; KV for
    all."""
    mesh = SharedMesh(engines, slots, AMPLE_KV)
    for job, weight in WEIGHTS.items():
        mesh.job(job, weight, LEAST_LOAD if job == "light" else None)
        mesh.flood(job, 80, lambda _: [(tokens, 0.03)] * 3)
    mesh.run(75.0)
    assert ratio(mesh.slot_seconds(WARM_S, 75.0)) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_share_of_less_than_a_slot_is_kept_as_a_mean_over_time(slots: int) -> None:
    _, got, _ = loaded(engines=1, slots=slots, kv_tokens=AMPLE_KV, seconds=400.0, open_each=10)
    assert ratio(got) == pytest.approx(3.0, rel=0.1)


def test_a_plan_that_separates_the_jobs_does_not_decide_their_shares() -> None:
    """Equal weights; one job's trajectories are long and few, the other's short and many, so that
    plans put them on different engines. Result: each has at least half of what it needs most, KV or
    slots."""
    mesh = SharedMesh(4, 8, 12_000)
    for job, least, most, count in (("long", 400, 600, 40), ("short", 20, 60, 100)):
        mesh.job(job, 1.0)
        mesh.flood(job, count, agents(1, least, most))
    mesh.run(120.0)
    lasted_s = 120.0 - WARM_S
    kv, slots = mesh.kv_token_seconds(WARM_S, 120.0), mesh.slot_seconds(WARM_S, 120.0)
    dominant = {
        job: max(kv[job] / (4 * 12_000 * lasted_s), slots[job] / (4 * 8 * lasted_s))
        for job in ("long", "short")
    }
    assert min(dominant.values()) > 0.45


def test_a_job_alone_gets_everything_and_one_that_comes_back_after_an_hour_gets_its_share_and_no_more() -> (
    None
):
    mesh = SharedMesh(2, 4, 8_000)
    for job, weight in WEIGHTS.items():
        mesh.job(job, weight)
    mesh.flood("light", 20, agents(1))
    mesh.open("heavy", [(20, 0.0)])
    hour_s = 3600.0 / 12  # a twelfth of it shows the same, in a twelfth of the time
    mesh.run(hour_s)
    assert mesh.slot_seconds(WARM_S, hour_s)["light"] > 0.9 * 2 * 4 * (hour_s - WARM_S)
    mesh.flood("heavy", 20, agents(2))
    mesh.run(100.0)
    for begin_s in range(0, 100, 20):
        got = mesh.slot_seconds(hour_s + begin_s, hour_s + begin_s + 20.0)
        assert 0.6 < got["heavy"] / sum(got.values()) < 0.82, (
            "its share of three quarters, give or take a step"
        )


@pytest.mark.parametrize(
    ("kv_tokens", "most_s"),
    [(AMPLE_KV, 0.5 + 2.0 + 1.0), (12_000, 10.0)],
    ids=["slots are scarce", "KV is scarce"],
)
def test_a_flood_does_not_move_the_waits_of_a_job_within_its_share(
    kv_tokens: int, most_s: float
) -> None:
    """The light job has two short trajectories at a time, of 24 slots. Result: 99 of 100 steps wait
    for no more than a tick of the scheduler, the time after which a slot is given back, and one
    pass of prefill; where the flood has filled the KV too, for the longest step of it. Without
    shares they wait for trajectories of the flood."""
    waits_s = {}
    for flood, light in ((0, "light"), (200, "light"), (200, "heavy")):
        mesh = SharedMesh(3, 8, kv_tokens)
        for job, weight in WEIGHTS.items():
            mesh.job(job, weight)
        mesh.flood("heavy", flood, agents(1, 200, 800))
        mesh.run(20.0)
        opened = len(mesh.trajectories)
        mesh.flood(light, 2, lambda _: [(30, 1.0), (30, 1.0)])
        mesh.run(100.0)
        small = [each for each in mesh.trajectories[opened:] if len(each.turns) == 2]
        ended = [wait_s for each in small for wait_s in each.waits_s]
        waiting = [
            mesh.timeline.now - each.asked_s
            for each in small
            if each.step is None and each.turn < 2
        ]
        waits_s[flood, light] = float(np.percentile([*ended, *waiting], 99))
    assert waits_s[0, "light"] < 1.0
    assert waits_s[200, "light"] < most_s
    assert waits_s[200, "heavy"] > 2.0 * most_s
