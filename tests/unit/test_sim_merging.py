"""Engines that fall idle become one of a higher degree: when, what the controller hears, and where KV is not used."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import engine, play, trajectory
from treadle_core import events
from treadle_core.model import KvTransfer
from treadle_sim.cluster import Cluster
from treadle_sim.merging import Merger, Merging
from treadle_sim.outcome import Progress
from treadle_sim.systems import SYSTEMS
from treadle_sim.timeline import Timeline
from treadle_sim.workloads.workload import TrajectoryWork

SWITCH_S = 2.0
MODELS = (engine(1), engine(2), engine(4))
IDLE = Merging(SWITCH_S, models=MODELS)
SHORT, LONG = [(60, 10, 0.1)], [(500, 20, 0.2)] * 12


class FakeMesh:
    """A merger over engines of these degrees, whose trajectories run on the engines that the test says. Stands for the
    driver: it records what is retired and started."""

    def __init__(self, degrees: list[int], runs_on: list[int], merging: Merging = IDLE) -> None:
        self.timeline = Timeline()
        self.going = [
            Progress(index, trajectory(index, SHORT), context_tokens=0, engine=at) for index, at in enumerate(runs_on)
        ]
        self.count = len(degrees)
        self.retired: list[int] = []
        self.started: list[int] = []
        self.down: set[int] = set()
        self.merger = Merger(
            merging, self.going, self.timeline, lambda at: at in self.down, self.retired.append, self._start
        )
        self.merger.lay_out([engine(degree) for degree in degrees])

    def _start(self, model: object) -> int:
        self.started.append(model.gpus)  # type: ignore[attr-defined]
        self.count += 1
        return self.count - 1

    def look(self) -> None:
        self.merger.look()
        self.timeline.run(lambda: True)


def test_idle_engines_on_neighbouring_gpus_become_the_highest_degree_that_they_fill() -> None:
    mesh = FakeMesh([1] * 8, [7])
    mesh.look()
    assert (mesh.retired, mesh.started) == ([0, 1, 2, 3, 4, 5], [4, 2])
    mesh.look()
    assert mesh.started == [4, 2], "an engine that has just been merged is left alone until a trajectory has come"


@pytest.mark.parametrize(
    ("degrees", "runs_on", "why"),
    [
        ([1, 1, 1, 1], [0, -1], "a trajectory has not begun"),
        ([4, 2, 2], [0], "what goes on has as high a degree"),
        ([2, 2], [0], "its neighbour is not idle"),
    ],
)
def test_nothing_is_merged_where(degrees: list[int], runs_on: list[int], why: str) -> None:
    mesh = FakeMesh(degrees, runs_on, replace(IDLE, models=MODELS[:3]))
    mesh.look()
    assert not mesh.retired, why


def test_engines_that_are_down_are_not_merged_and_few_trajectories_may_be_interrupted() -> None:
    mesh = FakeMesh([1, 1], [0])
    mesh.look()
    assert not mesh.retired
    mesh = FakeMesh([1, 1], [0], replace(IDLE, most_left=1))
    mesh.down = {1}
    mesh.look()
    assert not mesh.retired
    mesh.down = set()
    mesh.look()
    assert mesh.retired == [0, 1]


def test_the_last_trajectories_move_to_the_merged_engine_and_are_prefilled_there() -> None:
    works = [trajectory(0, SHORT), trajectory(1, SHORT), trajectory(2, LONG), trajectory(3, LONG)]
    cluster = Cluster((engine(),) * 4)

    rollout = play(works, replace(cluster, merging=IDLE), "treadle", predictor="oracle")

    gone = rollout.events(events.EngineDeregistered)
    joined = rollout.events(events.EngineRegistered)[4:]
    assert len(gone) >= 2
    assert [event.spec.tensor_parallel for _, event in joined] == [2] * len(joined)
    assert joined[0][0] == pytest.approx(gone[0][0] + SWITCH_S)
    assert joined[0][1].spec.kv_transfer is KvTransfer.PREFILL
    plain = play(works, cluster, "treadle", predictor="oracle")
    assert rollout.outcome.makespan_s < plain.outcome.makespan_s
    moved = [times for times in rollout.outcome.times if times.migrations]
    assert moved and all(times.prefilled_tokens > 1_000 for times in moved), "the context again, not what tools said"


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(1, 1_500)), min_size=1, max_size=8),
    st.sampled_from(sorted(SYSTEMS)),
    st.integers(0, 4),
)
def test_a_rollout_that_merges_engines_loses_no_token(
    rows: list[tuple[int, int, int]], system: str, most_left: int
) -> None:
    works: list[TrajectoryWork] = [trajectory(prompt, [(gen, 20, 0.3)] * turns) for prompt, turns, gen in rows]
    cluster = Cluster((engine(slots=2),) * 4, merging=replace(IDLE, most_left=most_left))

    outcome = play(works, cluster, system).outcome

    assert [times.gen_tokens for times in outcome.times] == [work.gen_tokens for work in works]
