"""Engines that stand still, die or take in KV, at awkward moments."""

from __future__ import annotations

import pytest
from support.simulated import SLOW, engine, play, trajectory
from treadle_core.actions import AnnounceClosed
from treadle_core.events import EngineRegistered
from treadle_sim.batch import EngineStep
from treadle_sim.cluster import Cluster, Failure, Latencies, WeightUpdate
from treadle_sim.engine import SimEngine
from treadle_sim.timeline import Timeline


class Ear:
    def __init__(self) -> None:
        self.timeline = Timeline()
        self.finished: dict[str, float] = {}
        self.preempted: dict[str, float] = {}

    def step_preempted(self, step: EngineStep) -> None:
        self.preempted[step.step_id] = self.timeline.now

    def step_finished(self, step: EngineStep) -> None:
        self.finished[step.step_id] = self.timeline.now


def step(name: str, index: int, context: int, gen: int) -> EngineStep:
    return EngineStep(name, index, f"p{index}", context, context, gen, 0.0)


def test_a_step_that_an_update_stopped_is_not_evicted_before_it_runs_again() -> None:
    ear = Ear()
    sim = SimEngine("e", engine(slots=1), ear.timeline, ear, preempt=True)
    ear.timeline.at(0.0, sim.submit, step("low", 0, 100, 1_000), 1.0)
    ear.timeline.at(1.0, sim.submit, step("lowest", 1, 100, 10), 0.0)
    ear.timeline.at(5.0, sim.pause, 3.0)
    ear.timeline.at(6.0, sim.submit, step("high", 2, 100, 100), 2.0)
    ear.timeline.run(lambda: True)

    again_s = 8.0 + SLOW.prefill_s(600, 0)  # it has some 500 tokens by then
    assert list(ear.preempted) == ["low"]
    assert ear.preempted["low"] > again_s
    assert sorted(ear.finished, key=ear.finished.__getitem__) == ["high", "low", "lowest"]


def test_what_a_failure_cuts_short_counts_as_far_as_it_came() -> None:
    ear = Ear()
    sim = SimEngine("e", engine(), ear.timeline, ear, preempt=False)
    sim.spans = []
    long = step("a", 0, 100_000, 10)
    ear.timeline.at(0.0, sim.submit, long, 0.0)
    ear.timeline.at(1.0, sim.fail)
    ear.timeline.run(lambda: True)

    assert SLOW.prefill_s(100_000, 0) > 2.0
    assert (sim.busy_s, sim.spans) == (1.0, [(0.0, 1.0, -1)])
    assert (long.queue_s, long.prefill_s) == (0.0, 1.0)


def test_an_engine_that_dies_standing_still_works_as_soon_as_it_is_back() -> None:
    ear = Ear()
    sim = SimEngine("e", engine(), ear.timeline, ear, preempt=False)
    ear.timeline.at(0.5, sim.pause, 30.0)
    ear.timeline.at(1.0, sim.fail)
    ear.timeline.at(5.0, sim.submit, step("a", 0, 100, 100), 0.0)
    ear.timeline.run(lambda: True)

    assert ear.finished["a"] < 10.0


def test_kv_that_comes_takes_the_room_of_what_was_left_longest_ago() -> None:
    ear = Ear()
    sim = SimEngine("e", engine(kv_tokens=2_000), ear.timeline, ear, preempt=False)
    sim.receive(0, 900)
    sim.receive(1, 900)
    sim.receive(2, 900)

    assert [sim.cache.peek(index) for index in range(3)] == [0, 900, 900]


@pytest.mark.parametrize("rpc_s", [0.0, 0.002])
@pytest.mark.parametrize("away_s", [5.0, 60.0])
def test_clients_ask_again_until_the_only_engine_is_back(rpc_s: float, away_s: float) -> None:
    """Before its lease is over, when it is refused, and after, when there is no engine at all."""
    work = trajectory(0, [(1_000, 10, 1.0), (1_000, 0, 0.0)])
    cluster = Cluster((engine(),), latencies=Latencies(rpc_s=rpc_s), failures=(Failure(0, 3.0, 3.0 + away_s),))

    rollout = play([work], cluster)

    assert rollout.outcome.times[0].gen_tokens == 2_000
    assert rollout.outcome.makespan_s > 3.0 + away_s


def test_an_engine_that_comes_back_serves_the_weights_of_the_day() -> None:
    works = [trajectory(index, [(2_000, 10, 1.0)] * 3) for index in range(4)]
    cluster = Cluster(
        (engine(), engine()), failures=(Failure(0, 3.0, 20.0),), weight_updates=(WeightUpdate(10.0, 1.0),)
    )

    registered = play(works, cluster).events(EngineRegistered)

    assert [event.spec.weight_version for _, event in registered] == ["0", "0", "1"]


def test_a_closing_is_announced_once() -> None:
    works = [trajectory(0, [(10, 0, 0.0)]), trajectory(1, [(5_000, 0, 0.0)])]

    assert len(play(works, Cluster((engine(),))).actions(AnnounceClosed)) == 2
