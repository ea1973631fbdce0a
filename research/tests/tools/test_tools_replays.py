"""Replays of action traces: everything runs once, nothing is handed out twice, pods share cores,
models stay loaded."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.tools.action import CPU_CORES, GPUS, Amdahl, Fixed, Range
from treadle_core.tools.cpu import Machine
from treadle_sim.workloads.workload import Step, TrajectoryWork

from treadle_bench.tools.api_calls import (
    MOST_RETRIES,
    PROVIDER,
    Limits,
    ManagedCalls,
    ProviderModel,
    UnmanagedCalls,
    manager_of,
    search_batch,
)
from treadle_bench.tools.coding import ACTIVE_SHARE, coding_batch
from treadle_bench.tools.elastic_cores import ElasticCores, equal_machines
from treadle_bench.tools.gpu_groups import ElasticGpus, LoadingGroups, StaticGroups
from treadle_bench.tools.pods import PodRules, Pods, SharedCores
from treadle_bench.tools.reward_models import (
    DEGREES,
    JUDGE,
    Restoring,
    reading,
    scored_batch,
    services,
    teachers,
)
from treadle_bench.tools.trace import (
    Asked,
    Call,
    Executor,
    Make,
    Record,
    Replay,
    StuckError,
    Trace,
    play,
)

GIB = 1 << 30


def elastic(nodes: Sequence[Machine], overhead_s: float = 0.0) -> Make:
    return lambda timeline, report: ElasticCores(timeline, report, tuple(nodes), overhead_s)


def pods(nodes: Sequence[Machine], **rules: Any) -> Make:
    return lambda timeline, report: Pods(timeline, report, nodes, PodRules(**rules))


def command(seconds: float, generation_s: float = 0.0) -> Call:
    return Call(generation_s, {CPU_CORES: Fixed(1)}, seconds)


def suite(seconds: float, most: int = 8) -> Call:
    return Call(0.0, {CPU_CORES: Range(1, most)}, seconds, True, CPU_CORES, Amdahl(0.1), seconds)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Trace, ...]:
    seconds = st.floats(0.01, 20.0)
    traces = []
    for index in range(draw(st.integers(1, 12))):
        steps = [command(draw(seconds), draw(seconds)) for _ in range(draw(st.integers(0, 4)))]
        traces.append(Trace(f"t{index}", "coding", (*steps, suite(draw(seconds))), GIB))
    return tuple(traces)


def everything_ran_once(replay: Replay) -> None:
    ran = sorted((record.asked.trace.trajectory_id, record.asked.at) for record in replay.records)
    assert ran == sorted(
        (trace.trajectory_id, at) for trace in replay.traces for at in range(len(trace.calls))
    )
    for record in replay.records:
        assert record.asked.arrived_s <= record.started_s <= record.finished_s
        assert record.completion_s == pytest.approx(
            record.queue_s + record.overhead_s + record.execution_s
        )


def most_at_once(records: Sequence[Record]) -> int:
    """Units held, an end before a beginning at the same time."""
    edges = sorted(
        [(r.finished_s, -r.units) for r in records] + [(r.started_s, r.units) for r in records]
    )
    held, most = 0, 0
    for _, units in edges:
        held += units
        most = max(most, held)
    return most


@given(batches())
@settings(max_examples=40)
def test_every_action_runs_once_on_cores_that_nobody_else_has_or_in_its_trajectorys_pod(
    traces: tuple[Trace, ...],
) -> None:
    nodes = equal_machines(2, 4, 8 * GIB)
    replay = play(traces, elastic(nodes))
    everything_ran_once(replay)
    assert most_at_once(replay.records) <= 8
    assert play(traces, elastic(nodes)).records == replay.records
    in_pods = play(traces, pods(equal_machines(2, 2, 8 * GIB)))
    everything_ran_once(in_pods)
    assert all(
        record.execution_s >= record.asked.call.single_unit_s - 1e-6 for record in in_pods.records
    )


def test_commands_of_a_burst_run_in_the_order_of_their_arrival() -> None:
    traces = [Trace(f"t{index}", "coding", (command(1.0, 0.001 * index),)) for index in range(9)]
    started = sorted(
        play(traces, elastic(equal_machines(1, 2, GIB))).records,
        key=lambda record: record.started_s,
    )
    assert [record.asked.trace.trajectory_id for record in started] == [
        f"t{index}" for index in range(9)
    ]


def test_a_trajectory_stays_where_its_memory_is_and_waits_for_it_without_passing_anybody() -> None:
    """Two nodes with memory for one trajectory each: the third begins when one of the others has
    ended."""
    traces = [
        Trace(f"t{index}", "coding", (command(2.0, 0.001 * index), command(2.0)), GIB)
        for index in range(4)
    ]
    replay = play(traces, elastic(equal_machines(2, 4, GIB)))
    assert [replay.ends_s[trace.trajectory_id] for trace in traces] == pytest.approx(
        [4.0, 4.0, 8.0, 8.0], abs=0.01
    )


def test_a_reward_alone_gets_all_cores_that_help_it_and_a_pods_runs_on_one() -> None:
    traces = [Trace("t", "coding", (suite(90.0),), GIB)]
    (alone,) = play(traces, elastic(equal_machines(1, 16, GIB), overhead_s=0.5)).records
    assert alone.units == 8
    assert alone.completion_s == pytest.approx(0.5 + 90.0 * (0.1 + 0.9 / 8))
    (in_pod,) = play(traces, pods(equal_machines(1, 16, GIB))).records
    assert in_pod.execution_s == pytest.approx(90.0)
    (four,) = play(traces, pods(equal_machines(1, 16, GIB), reward_processes=8)).records
    assert four.units == 4
    assert four.execution_s == pytest.approx(90.0 * (0.1 + 0.9 / 4))


def test_pods_start_one_after_the_other_and_wait_where_requests_do_not_fit() -> None:
    """One core is two pods; the third is bound when one of them leaves. One a second, and half a
    second each."""
    traces = [Trace(f"t{index}", "coding", (command(1.0),), 0) for index in range(3)]
    replay = play(
        traces, pods(equal_machines(1, 1, GIB), binds_per_s=1e9, starts_per_s=1.0, start_s=0.5)
    )
    assert [record.started_s for record in replay.records] == pytest.approx([1.5, 2.5, 3.0 + 1.0])


def test_a_pod_that_is_late_is_given_up_and_asked_for_again() -> None:
    traces = [Trace(f"t{index}", "coding", (command(1.0),), 0) for index in range(2)]
    patient_pods = partial(
        pods, equal_machines(1, 4, GIB), binds_per_s=1e9, starts_per_s=1.0, start_s=0.0
    )
    patient, hasty = (
        play(traces, patient_pods()),
        play(traces, patient_pods(ready_timeout_s=1.5, retry_s=1.0)),
    )
    everything_ran_once(hasty)
    assert sorted(patient.ends_s.values()) == pytest.approx([2.0, 3.0])
    assert sorted(hasty.ends_s.values()) == pytest.approx([2.0, 4.5])


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.sampled_from([1, 4])), min_size=1, max_size=12),
    st.integers(1, 8),
)
def test_jobs_that_start_together_share_as_small_steps_would_have_it(
    jobs: list[tuple[float, int]], cores: int
) -> None:
    """Against water filling worked out anew between any two ends."""
    shared: SharedCores[int] = SharedCores(cores)
    for index, (seconds, width) in enumerate(jobs):
        shared.add(index, width, seconds, 0.0)
    found = {}
    while shared.next_s() < float("inf"):
        at_s = shared.next_s()
        found[shared.take_next()] = at_s
    left = {index: seconds for index, (seconds, _) in enumerate(jobs)}
    now_s = 0.0
    expected: dict[int, float] = {}
    while left:
        speeds, share, rest = {}, float(cores), len(left)
        for index in sorted(left, key=lambda each: jobs[each][1]):
            level = min(float(jobs[index][1]), share / rest)
            speeds[index], share, rest = level / jobs[index][1], share - level, rest - 1
        step_s = min(left[index] / speeds[index] for index in left)
        now_s += step_s
        left = {index: seconds - step_s * speeds[index] for index, seconds in left.items()}
        expected |= {index: now_s for index, seconds in left.items() if seconds <= 1e-9}
        left = {index: seconds for index, seconds in left.items() if seconds > 1e-9}
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_batch_acts_for_as_much_of_its_life_as_the_papers() -> None:
    shares = [
        trace.single_unit_s / (trace.single_unit_s + trace.generation_s)
        for trace in coding_batch(1_024, 0)
    ]
    assert sum(shares) / len(shares) == pytest.approx(ACTIVE_SHARE, abs=0.03)


def test_an_executor_that_forgets_an_action_is_caught() -> None:
    class Forgetful(Executor):
        def submit(self, asked: Asked) -> None: ...

    with pytest.raises(StuckError, match="1 of 1"):
        play([Trace("t", "coding", (command(1.0),))], Forgetful)


def test_tokens_of_a_trace_file_are_drawn_as_they_are() -> None:
    works = [
        TrajectoryWork(f"p{length}", 0, 100, tuple(Step(50, 10, 1.0) for _ in range(length)))
        for length in (2, 5)
    ]
    lengths = [len(trace.calls) for trace in coding_batch(32, 0, among=works)]
    assert set(lengths) == {3, 6}  # and the reward


NAMES = [*teachers(3), JUDGE]


def pool(gpus: int) -> Make:
    return lambda timeline, report: ElasticGpus(
        timeline, report, gpus, services(NAMES), Restoring()
    )


@pytest.mark.parametrize("gpus", [3, 8, 13])
def test_every_reward_runs_once_on_gpus_that_are_there(gpus: int) -> None:
    traces = scored_batch(60, 1, NAMES, pace=0.05)
    replay = play(traces, pool(gpus))
    everything_ran_once(replay)
    assert most_at_once(replay.records) <= gpus
    assert {record.units for record in replay.records} <= set(DEGREES)
    assert play(traces, pool(gpus)).records == replay.records


def test_a_model_is_restored_once_and_stays_in_memory() -> None:
    calls = tuple(reading("teacher-0", 8_000) for _ in range(3))
    records = play([Trace("t", "teacher-0", calls)], pool(8)).records
    assert [record.units for record in records] == [8, 8, 8]
    assert [record.overhead_s for record in records] == [Restoring().seconds(8), 0.0, 0.0]


def test_a_static_group_serves_its_own_model_alone_one_after_the_other() -> None:
    same = [Trace(f"a{index}", "teacher-0", (reading("teacher-0", 8_000),)) for index in range(2)]
    other = Trace("b", "teacher-1", (reading("teacher-1", 8_000),))
    replay = play([*same, other], lambda timeline, report: StaticGroups(timeline, report, NAMES, 4))
    took_s = other.calls[0].seconds_on(4)
    assert [record.finished_s for record in replay.records] == pytest.approx(
        [took_s, took_s, 2 * took_s]
    )


def test_a_request_waits_for_its_model_only_where_that_is_sooner_than_loading_it() -> None:
    """Two groups, one of which loads the model; who comes a moment later loads a copy of its own
    where that is fast."""

    def loaded(loading: Restoring, later_s: float) -> list[float]:
        traces = [
            Trace(f"t{at}", "", (reading("teacher-0", 8_000),), starts_s=later_s * at)
            for at in range(2)
        ]
        return [
            r.overhead_s
            for r in play(traces, lambda t, r: LoadingGroups(t, r, 2, 4, loading)).records
        ]

    slow, fast = Restoring(5e10, 1.0), Restoring(1e13, 0.0)
    assert loaded(slow, later_s=0.5) == [slow.seconds(4), 0.0]
    assert loaded(fast, later_s=0.1) == [fast.seconds(4), fast.seconds(4)]


TIGHT = Limits(concurrency=3, quota=10, period_s=5.0)


def calling(count: int) -> list[Trace]:
    cost = manager_of(TIGHT, PROVIDER).cost()
    return [
        Trace(f"t{index}", "search", (Call(0.0, cost, 1.0), Call(0.5, cost, 1.0)))
        for index in range(count)
    ]


def test_the_manager_never_asks_for_more_than_the_provider_gives() -> None:
    provider = ProviderModel(TIGHT)
    replay = play(calling(20), lambda timeline, report: ManagedCalls(timeline, report, provider))
    everything_ran_once(replay)
    assert not any(record.failed for record in replay.records)
    assert (provider.refused, provider.most_at_once) == (0, TIGHT.concurrency)
    assert provider.most_in_a_window == TIGHT.quota


def test_calls_that_nobody_manages_are_refused_tried_again_and_fail_in_the_end() -> None:
    provider = ProviderModel(TIGHT)
    replay = play(
        calling(20), lambda timeline, report: UnmanagedCalls(timeline, report, provider, seed=0)
    )
    everything_ran_once(replay)
    failed = [record for record in replay.records if record.failed]
    assert failed
    assert all(record.tries == MOST_RETRIES + 1 and record.units == 0 for record in failed)
    assert provider.refused == sum(record.tries - (not record.failed) for record in replay.records)
    assert provider.most_at_once <= TIGHT.concurrency
    assert provider.most_in_a_window <= TIGHT.quota


def test_batches_are_the_same_for_the_same_seed_and_refuse_to_be_empty() -> None:
    makers: list[Callable[[int, int], object]] = [
        coding_batch,
        search_batch,
        partial(scored_batch, services=NAMES),
    ]
    for make in makers:
        assert make(8, 2) == make(8, 2) != make(8, 3)
        with pytest.raises(ValueError, match=r"at least|must be >= 1"):
            make(0, 0)
    skewed = scored_batch(40, 2, NAMES, skew=2.0)
    assert sum(trace.task == "teacher-0" for trace in skewed) > 20
    assert all(call.cost[GPUS] != Fixed(1) for trace in skewed for call in trace.calls)
