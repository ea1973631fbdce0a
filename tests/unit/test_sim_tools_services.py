"""Replays on reward GPUs and before a provider: what is in memory, who loads, who is refused."""

import pytest
from treadle_core.tools.action import GPUS, Fixed
from treadle_sim.timeline import Timeline
from treadle_sim.tools.api_calls import (
    MOST_RETRIES,
    PROVIDER,
    Limits,
    ManagedCalls,
    ProviderModel,
    UnmanagedCalls,
    manager_of,
    search_batch,
)
from treadle_sim.tools.gpus import ElasticGpus, LoadingGroups, StaticGroups
from treadle_sim.tools.reward_models import DEGREES, JUDGE, Restoring, reading, scored_batch, services, teachers
from treadle_sim.tools.trace import Asked, Call, Executor, Make, Record, Replay, Report, Trace, play, ran_s

NAMES = [*teachers(3), JUDGE]


def elastic(gpus: int) -> Make:
    return lambda timeline, report: ElasticGpus(timeline, report, gpus, services(NAMES), Restoring())


def ran_once(replay: Replay) -> None:
    ran = sorted(record.asked.action_id for record in replay.records)
    assert ran == sorted(f"{trace.trajectory_id}/{at}" for trace in replay.traces for at in range(len(trace.calls)))


def most_at_once(records: tuple[Record, ...]) -> int:
    edges = [(record.finished_s, -record.units) for record in records]
    edges += [(record.started_s, record.units) for record in records]
    held, most = 0, 0
    for _, units in sorted(edges):
        held += units
        most = max(most, held)
    return most


@pytest.mark.parametrize("gpus", [3, 8, 13])
def test_every_reward_runs_once_on_gpus_that_are_there(gpus: int) -> None:
    traces = scored_batch(60, 1, NAMES, pace=0.05)
    replay = play(traces, elastic(gpus))
    ran_once(replay)
    assert most_at_once(replay.records) <= gpus
    assert {record.units for record in replay.records} <= set(DEGREES)
    assert play(traces, elastic(gpus)).records == replay.records


def test_a_model_is_restored_once_and_stays_in_memory() -> None:
    calls = tuple(reading("teacher-0", 8_000) for _ in range(3))
    records = play([Trace("t", "teacher-0", calls)], elastic(8)).records
    assert [record.units for record in records] == [8, 8, 8]
    assert [record.overhead_s for record in records] == [Restoring().seconds(8), 0.0, 0.0]


def test_a_static_group_serves_its_own_model_alone_one_after_the_other() -> None:
    same = [Trace(f"a{index}", "teacher-0", (reading("teacher-0", 8_000),)) for index in range(2)]
    other = Trace("b", "teacher-1", (reading("teacher-1", 8_000),))
    replay = play([*same, other], lambda timeline, report: StaticGroups(timeline, report, NAMES, 4))
    took_s = ran_s(Asked(other, 0, 0.0), 4)
    assert [record.finished_s for record in replay.records] == pytest.approx([took_s, took_s, 2 * took_s])


def test_a_request_waits_for_its_model_only_where_that_is_sooner_than_loading_it() -> None:
    """Two groups, one of which loads the model; who comes a moment later loads a copy of its own where that is fast."""

    def loaded(loading: Restoring, later_s: float) -> list[float]:
        traces = [Trace(f"t{at}", "", (reading("teacher-0", 8_000),), starts_s=later_s * at) for at in range(2)]
        return [r.overhead_s for r in play(traces, lambda t, r: LoadingGroups(t, r, 2, 4, loading)).records]

    slow, fast = Restoring(5e10, 1.0), Restoring(1e13, 0.0)
    assert loaded(slow, later_s=0.5) == [slow.seconds(4), 0.0]
    assert loaded(fast, later_s=0.1) == [fast.seconds(4), fast.seconds(4)]


TIGHT = Limits(concurrency=3, quota=10, period_s=5.0)


def calling(count: int) -> list[Trace]:
    cost = manager_of(TIGHT, PROVIDER).cost()
    return [Trace(f"t{index}", "search", (Call(0.0, cost, 1.0), Call(0.5, cost, 1.0))) for index in range(count)]


def test_the_manager_never_asks_for_more_than_the_provider_gives() -> None:
    provider = ProviderModel(TIGHT)
    replay = play(calling(20), lambda timeline, report: ManagedCalls(timeline, report, provider))
    ran_once(replay)
    assert not any(record.failed for record in replay.records)
    assert (provider.refused, provider.most_at_once) == (0, TIGHT.concurrency)
    assert provider.most_in_a_window == TIGHT.quota


def test_calls_that_nobody_manages_are_refused_tried_again_and_fail_in_the_end() -> None:
    provider = ProviderModel(TIGHT)

    def make(timeline: Timeline, report: Report) -> Executor:
        return UnmanagedCalls(timeline, report, provider, seed=0)

    replay = play(calling(20), make)
    ran_once(replay)
    failed = [record for record in replay.records if record.failed]
    assert failed
    assert all(record.tries == MOST_RETRIES + 1 and record.units == 0 for record in failed)
    assert provider.refused == sum(record.tries - (not record.failed) for record in replay.records)
    assert provider.most_at_once <= TIGHT.concurrency
    assert provider.most_in_a_window <= TIGHT.quota


def test_batches_are_the_same_for_the_same_seed_and_refuse_to_be_empty() -> None:
    assert search_batch(8, 2) == search_batch(8, 2)
    assert scored_batch(8, 2, NAMES) == scored_batch(8, 2, NAMES)
    assert scored_batch(8, 2, NAMES) != scored_batch(8, 3, NAMES)
    skewed = scored_batch(40, 2, NAMES, skew=2.0)
    assert sum(trace.task == "teacher-0" for trace in skewed) > 20
    with pytest.raises(ValueError, match="at least one"):
        scored_batch(0, 0, NAMES)
    assert all(call.cost[GPUS] != Fixed(1) for trace in skewed for call in trace.calls)
