"""Whatever the system, engines and workload: nothing is lost or counted twice, and every second is accounted for."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import Rollout, engine, play, trajectory
from treadle_core.actions import IssueTicket
from treadle_core.events import StepFinished, StepRequested, TrajectoryClosed
from treadle_sim.cluster import Cluster, Failure, Latencies, WeightUpdate
from treadle_sim.rollout import lower_bound_s
from treadle_sim.systems import SYSTEMS
from treadle_sim.workloads.workload import TrajectoryWork, Workload

# A token of slack a step: fluids and whole tokens part by less.
NEAR_S = 1e-6
LATENCIES = Latencies()

Works = list[TrajectoryWork]

steps = st.lists(st.tuples(st.integers(1, 2_500), st.integers(0, 400), st.floats(0.0, 3.0)), min_size=1, max_size=4)
works = st.lists(st.tuples(st.integers(0, 3), steps), min_size=1, max_size=10).map(
    lambda rows: [trajectory(prompt, each, prompt_tokens=100 + 50 * prompt) for prompt, each in rows]
)
# Slots and KV are scarce in some: the longest trajectory grows to 11,850 tokens.
clusters = st.lists(
    st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2, 64]), st.sampled_from([12_000, 40_000, 1_000_000])),
    min_size=1,
    max_size=3,
).map(lambda rows: Cluster(tuple(engine(*row) for row in rows)))
systems = st.sampled_from(sorted(SYSTEMS))


@settings(max_examples=60, deadline=None)
@given(works, clusters, systems)
def test_every_trajectory_ends_with_all_its_tokens_and_every_second_is_accounted_for(
    batch: Works, cluster: Cluster, system: str
) -> None:
    rollout = play(batch, cluster, system, record=True)

    check_counts(batch, system, rollout)
    check_times(batch, rollout)
    check_spans(rollout)


@settings(max_examples=40, deadline=None)
@given(works, clusters, systems)
def test_no_rollout_is_faster_than_the_lower_bound(batch: Works, cluster: Cluster, system: str) -> None:
    bound_s = lower_bound_s(Workload("test", tuple(batch)), tuple(set(cluster.engines)), cluster.gpus)

    assert play(batch, cluster, system).outcome.makespan_s >= bound_s * (1.0 - 1e-9)


@settings(max_examples=15, deadline=None)
@given(works, clusters, systems)
def test_the_same_rollout_comes_out_the_same(batch: Works, cluster: Cluster, system: str) -> None:
    first, second = (play(batch, cluster, system, record=True, seed=3) for _ in range(2))

    assert first.outcome == second.outcome
    assert first.heard == second.heard


@settings(max_examples=30, deadline=None)
@given(works, systems, st.floats(0.0, 20.0), st.floats(0.1, 40.0), st.floats(0.0, 20.0))
def test_an_engine_that_dies_and_weights_that_change_lose_no_token_and_no_trajectory(
    batch: Works, system: str, dies_s: float, away_s: float, updated_s: float
) -> None:
    cluster = Cluster(
        (engine(slots=2), engine(slots=2), engine(2, slots=2)),
        failures=(Failure(0, dies_s, dies_s + away_s),),
        weight_updates=(WeightUpdate(updated_s, 1.0),),
    )

    rollout = play(batch, cluster, system)

    check_counts(batch, system, rollout)
    for times in rollout.outcome.times:
        assert times.queue_s + times.prefill_s + times.decode_s + times.tool_s <= times.finished_s + NEAR_S


def calls(work: TrajectoryWork, call_tokens: int) -> int:
    """Generations of a trajectory: one a turn, or a chunk of a long one."""
    return sum(-(-step.gen_tokens // call_tokens) if call_tokens else 1 for step in work.steps)


def check_counts(batch: Works, system: str, rollout: Rollout) -> None:
    """Once each: trajectories, calls, tokens."""
    assert [times.gen_tokens for times in rollout.outcome.times] == [work.gen_tokens for work in batch]
    closed = [event.trajectory_id for _, event in rollout.events(TrajectoryClosed)]
    assert sorted(closed) == sorted(f"t{index}" for index in range(len(batch)))
    finished = [(event.trajectory_id, event.turn) for _, event in rollout.events(StepFinished)]
    call_tokens = SYSTEMS[system].call_tokens
    assert sorted(finished) == sorted(
        (f"t{index}", call) for index, work in enumerate(batch) for call in range(calls(work, call_tokens))
    )
    told = [0] * len(batch)
    for _, event in rollout.events(StepFinished):
        told[int(event.trajectory_id[1:])] += event.output_tokens
    assert told == [work.gen_tokens for work in batch]


def check_times(batch: Works, rollout: Rollout) -> None:
    """From the start to its end a trajectory waits for its first request, for tickets, at engines, or for tools."""
    rpc_s = LATENCIES.rpc_s
    waited = [0.0] * len(batch)
    for now_s, event in rollout.events(StepRequested):
        waited[int(event.trajectory_id[1:])] += now_s if event.turn == 0 else 0.0
    for _, action in rollout.actions(IssueTicket):
        waited[int(action.ticket.trajectory_id[1:])] += rpc_s
    for _, finished in rollout.events(StepFinished):
        waited[int(finished.trajectory_id[1:])] += rpc_s  # before the next chunk of a turn; not after its last
    for work, times, waited_s in zip(batch, rollout.outcome.times, waited, strict=True):
        parts = times.queue_s, times.prefill_s, times.decode_s, times.tool_s, times.move_s
        assert min(parts) >= 0.0
        assert sum(parts) + waited_s - len(work.steps) * rpc_s == pytest.approx(times.finished_s, abs=NEAR_S)


def check_spans(rollout: Rollout) -> None:
    """What is drawn is what is booked; an engine does one thing at a time."""
    outcome = rollout.outcome
    for times in outcome.times:
        booked = {"queue": times.queue_s, "prefill": times.prefill_s, "decode": times.decode_s, "tool": times.tool_s}
        booked["move"] = times.move_s
        for what, seconds in booked.items():
            drawn = sum(span.end_s - span.start_s for span in times.spans if span.what == what)
            assert drawn == pytest.approx(seconds, abs=NEAR_S), what
        spans = sorted(times.spans, key=lambda span: (span.start_s, span.end_s))
        assert all(one.end_s <= two.start_s + NEAR_S for one, two in pairwise(spans))
    for busy_s, drawn_spans in zip(outcome.engine_busy_s, outcome.engine_spans, strict=True):
        assert sum(end_s - start_s for start_s, end_s, _ in drawn_spans) == pytest.approx(busy_s, abs=NEAR_S)
        assert all(one[1] <= two[0] + NEAR_S for one, two in pairwise(sorted(drawn_spans)))
        assert busy_s <= outcome.makespan_s + NEAR_S
