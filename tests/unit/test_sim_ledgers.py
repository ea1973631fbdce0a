"""Ledgers in the simulator, where the clocks of all agree: each second of a trajectory is in one
part."""

from dataclasses import asdict, replace

import pytest
from support.simulated import SLOW, decode_s, engine, play, trajectory
from treadle_core.model import Ledger
from treadle_sim.cluster import Cluster, Failure, Latencies, WeightUpdate
from treadle_sim.outcome import Outcome
from treadle_sim.systems import SYSTEMS

RPC_S = Latencies().rpc_s
CLUSTER = Cluster(
    (engine(2, slots=3), engine(slots=3), engine(slots=3)),
    failures=(Failure(engine=1, at_s=9.0, back_s=14.0),),
    weight_updates=(WeightUpdate(at_s=20.0, pause_s=1.5),),
)


def sums(outcome: Outcome, part: str) -> float:
    spent_s: float = sum(getattr(ledger, part) for ledger in outcome.ledgers)
    return spent_s


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_sum_is_the_time_from_opening_to_closing_whatever_happens(system: str) -> None:
    """Steps queue, are preempted and move; an engine dies with its steps and comes back, and the
    weights change."""
    works = [
        trajectory(
            index % 6, [(120 + 90 * (index % 5), 60, 2.0)] * (2 + index % 5), prompt_tokens=200
        )
        for index in range(30)
    ]
    works = [replace(work, sample=index) for index, work in enumerate(works)]

    outcome = play(works, CLUSTER, system).outcome

    assert len(outcome.ledgers) == len(works)
    for work, ledger, times in zip(works, outcome.ledgers, outcome.times, strict=True):
        assert ledger.total_s == pytest.approx(times.finished_s, abs=1e-9)
        assert min(getattr(ledger, part) for part in Ledger.__slots__) >= -1e-9
        assert ledger.tool_s == pytest.approx(work.tool_s)
        waits_s = ledger.queue_s + ledger.preempted_s + ledger.weights_s
        # the simulator books the wait for a first ticket there
        first_wait_s = max(0.0, times.queue_s - waits_s)
        assert ledger.held_s + ledger.move_s == pytest.approx(first_wait_s + times.move_s, abs=1e-9)
        assert (ledger.prefill_s, ledger.decode_s) == pytest.approx(
            (times.prefill_s, times.decode_s)
        )
    assert sums(outcome, "weights_s") > 1.0
    if SYSTEMS[system].policy.preempt and outcome.preemptions:
        assert sums(outcome, "preempted_s") > 0.0


def test_the_parts_are_what_happened() -> None:
    """One trajectory of two turns, alone. Result: control is the four calls, and nothing else
    waits."""
    work = trajectory(0, [(100, 50, 2.0), (40, 9, 1.0)], prompt_tokens=300)

    (ledger,) = play([work], Cluster((engine(),))).outcome.ledgers

    wanted = Ledger(
        prefill_s=SLOW.prefill_s(300, 0) + SLOW.prefill_s(51, 399),
        decode_s=decode_s(300, 100) + decode_s(450, 40),
        tool_s=3.0,
        control_s=3 * RPC_S,  # to the first request, and from each ticket to its engine
    )
    assert asdict(ledger) == pytest.approx(asdict(wanted))


def test_what_waits_for_room_is_held_and_what_waits_at_the_engine_is_in_its_queue() -> None:
    works = [replace(trajectory(0, [(200, 10, 0.5)] * 2), sample=sample) for sample in range(4)]

    held = play(works, Cluster((engine(slots=1),)), "pausing").outcome
    queued = play(works, Cluster((engine(slots=1),)), "verl").outcome

    assert sums(held, "held_s") > 5.0
    assert sums(queued, "held_s") == 0.0
    assert sums(queued, "queue_s") > 5.0


def test_a_step_without_an_engine_is_held_until_one_is_there() -> None:
    work = trajectory(0, [(1_000, 10, 1.0), (1_000, 0, 0.0)])
    cluster = Cluster((engine(),), failures=(Failure(0, 3.0, 63.0),))

    (ledger,) = play([work], cluster).outcome.ledgers

    assert ledger.held_s == pytest.approx(50.0, abs=0.5), "the lease ran for 10 s before"
    assert ledger.control_s == pytest.approx(10.0, abs=0.5), (
        "in which the client was refused by the dead engine"
    )


def test_a_trajectory_that_ended_hours_before_the_others_has_a_ledger() -> None:
    """The controller forgets what closed an hour ago."""
    works = [trajectory(0, [(10, 5, 1.0)]), trajectory(1, [(10, 5, 9_000.0)] * 2)]

    outcome = play(works, Cluster((engine(),))).outcome

    for ledger, times in zip(outcome.ledgers, outcome.times, strict=True):
        assert ledger.total_s == pytest.approx(times.finished_s)
