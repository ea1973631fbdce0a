"""When the simulator's driver sends what, and what a move brings along."""

from __future__ import annotations

import pytest
from support.simulated import SLOW, Rollout, engine, play, trajectory
from treadle_core.actions import IssueTicket, StartMigration
from treadle_core.events import (
    MoveEnded,
    PredictionArrived,
    StepFinished,
    StepRequested,
    SwitchRequested,
    Tick,
    ToolFinished,
    ToolStarted,
    TrajectoryClosed,
    TrajectoryOpened,
)
from treadle_sim.cluster import Cluster, Latencies, Link
from treadle_sim.workloads.workload import TrajectoryWork

LATENCIES = Latencies()


def test_a_step_is_a_ticket_a_prefill_its_tokens_and_a_tool_and_each_is_heard_when_it_is_over() -> None:
    work = trajectory(0, [(100, 50, 2.0), (40, 9, 1.0)], prompt_tokens=300)

    rollout = play([work], Cluster((engine(),)))

    rpc_s = LATENCIES.rpc_s
    first_s = SLOW.prefill_s(300, 0) + decode_s(300, 100)
    second_s = SLOW.prefill_s(51, 399) + decode_s(450, 40)
    end_s = [2 * rpc_s + first_s, 2 * rpc_s + first_s + 2.0 + rpc_s + second_s]
    told = [(type(heard.event), heard.now_s) for heard in rollout.heard if not isinstance(heard.event, Tick)]
    assert told[1:] == [
        (TrajectoryOpened, 0.0),
        (StepRequested, pytest.approx(rpc_s)),
        (StepFinished, pytest.approx(end_s[0])),
        (ToolStarted, pytest.approx(end_s[0])),
        (ToolFinished, pytest.approx(end_s[0] + 2.0)),
        (StepRequested, pytest.approx(end_s[0] + 2.0)),
        (StepFinished, pytest.approx(end_s[1])),
        (TrajectoryClosed, pytest.approx(end_s[1] + 1.0)),
    ]
    assert rollout.outcome.makespan_s == pytest.approx(end_s[1] + 1.0), "the last step's tool runs too"


def test_predictions_are_of_the_moment_they_were_asked_for_and_come_later() -> None:
    work = trajectory(0, [(100, 0, 5.0), (60, 0, 5.0)])

    rollout = play([work], Cluster((engine(), engine())), "treadle", predictor="oracle")

    asked = [0.0] + [now_s for now_s, _ in rollout.events(StepFinished)]
    told = rollout.events(PredictionArrived)
    assert [now_s for now_s, _ in told] == [pytest.approx(at_s + LATENCIES.predict_s) for at_s in asked]
    assert [event.remaining_tokens.p50 for _, event in told] == [160.0, 60.0, 0.0]


def test_time_is_told_every_half_second() -> None:
    rollout = play([trajectory(0, [(500, 0, 0.0)])], Cluster((engine(),)))

    ticks = [now_s for now_s, _ in rollout.events(Tick)]
    assert ticks == [pytest.approx(0.5 * (number + 1)) for number in range(len(ticks))]
    assert rollout.outcome.makespan_s - ticks[-1] <= 0.5


def test_a_trajectory_that_moves_takes_its_kv_along_and_prefills_only_what_its_tools_said() -> None:
    rollout, works = moving(Link())

    moved = [times.migrations for times in rollout.outcome.times]
    assert sum(moved) >= 2
    for work, times in zip(works, rollout.outcome.times, strict=True):
        observed = sum(step.obs_tokens + 1 for step in work.steps[:-1])  # the last token sampled has no KV yet
        assert times.prefilled_tokens == work.prompt_tokens + observed


def test_a_move_takes_the_link_as_long_as_its_kv_is_big_and_the_owner_changes_at_its_end() -> None:
    link = Link(bytes_per_s=1e9, fixed_s=0.2)

    rollout, _ = moving(link)

    started = {action.move_id: (now_s, action) for now_s, action in rollout.actions(StartMigration)}
    ended = [(now_s, event) for now_s, event in rollout.events(MoveEnded) if event.moved]
    assert ended
    switched_s = [now_s for now_s, _ in rollout.events(SwitchRequested)]
    for now_s, event in ended:
        asked_s, move = started[event.move_id]
        least_s = link.fixed_s + 200 * move.source.kv_bytes_per_token / link.bytes_per_s
        assert asked_s + least_s <= now_s <= asked_s + move.give_up_after_s
        assert now_s in switched_s
        later = [
            action.ticket
            for issued_s, action in rollout.actions(IssueTicket)
            if issued_s >= now_s and action.ticket.trajectory_id == event.trajectory_id
        ]
        assert not later or later[0].engine_id == move.target.engine_id


def test_where_the_link_is_too_slow_every_move_is_given_up_or_called_off_and_the_source_keeps_the_trajectory() -> None:
    rollout, works = moving(Link(bytes_per_s=1e5))

    assert rollout.actions(StartMigration)
    assert rollout.outcome.migrations == 0
    assert [times.gen_tokens for times in rollout.outcome.times] == [work.gen_tokens for work in works]


def moving(link: Link) -> tuple[Rollout, list[TrajectoryWork]]:
    """Heddle as printed moves without asking what it costs; tools take long enough."""
    works = [
        trajectory(index, [(100 + 90 * (index % 5), 60, 4.0)] * (2 + index % 4), prompt_tokens=200)
        for index in range(16)
    ]
    return play(works, Cluster((engine(2), engine(), engine()), link=link), "heddle"), works


def decode_s(context: int, tokens: int) -> float:
    """Alone, after a prefill that yields the first token: each step reads what is there."""
    return sum(SLOW.decode_s(1) + SLOW.per_kv_token_s * (context + number) for number in range(1, tokens))
