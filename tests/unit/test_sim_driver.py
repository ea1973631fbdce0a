"""When the simulator's driver sends which event, what a move brings along, and what failures and
new weights do."""

from dataclasses import replace

import pytest
from support.simulated import SLOW, Rollout, decode_s, engine, play, trajectory
from treadle_core import actions, events
from treadle_core.tuning import Tuning
from treadle_sim.cluster import Cluster, Failure, Latencies, Link, WeightUpdate
from treadle_sim.workloads.workload import TrajectoryWork

LATENCIES = Latencies()
RPC_S = LATENCIES.rpc_s


def test_a_step_is_a_ticket_a_prefill_its_tokens_and_a_tool_and_each_is_heard_when_it_is_over() -> (
    None
):
    work = trajectory(0, [(100, 50, 2.0), (40, 9, 1.0)], prompt_tokens=300)

    rollout = play([work], Cluster((engine(),)))

    first_s = SLOW.prefill_s(300, 0) + decode_s(300, 100)
    second_s = SLOW.prefill_s(51, 399) + decode_s(450, 40)
    end_s = [2 * RPC_S + first_s, 2 * RPC_S + first_s + 2.0 + RPC_S + second_s]
    told = [
        (type(heard.event), heard.now_s)
        for heard in rollout.heard
        if not isinstance(heard.event, events.Tick)
    ]
    assert told[1:] == [
        (events.TrajectoryOpened, 0.0),
        (events.StepRequested, pytest.approx(RPC_S)),
        (events.StepFinished, pytest.approx(end_s[0])),
        (events.ToolStarted, pytest.approx(end_s[0])),
        (events.ToolFinished, pytest.approx(end_s[0] + 2.0)),
        (events.StepRequested, pytest.approx(end_s[0] + 2.0)),
        (events.StepFinished, pytest.approx(end_s[1])),
        (events.TrajectoryClosed, pytest.approx(end_s[1] + 1.0)),
    ]
    assert rollout.outcome.makespan_s == pytest.approx(end_s[1] + 1.0), (
        "the last step's tool runs too"
    )
    ticks = [now_s for now_s, _ in rollout.events(events.Tick)]
    assert ticks == [pytest.approx(0.5 * (number + 1)) for number in range(len(ticks))]
    assert rollout.outcome.makespan_s - ticks[-1] <= 0.5


def test_predictions_are_of_the_moment_they_were_asked_for_and_come_later() -> None:
    work = trajectory(0, [(100, 0, 5.0), (60, 0, 5.0)])

    rollout = play([work], Cluster((engine(), engine())), "treadle", predictor="oracle")

    asked = [0.0] + [now_s for now_s, _ in rollout.events(events.StepFinished)]
    told = rollout.events(events.PredictionArrived)
    assert [now_s for now_s, _ in told] == [
        pytest.approx(at_s + LATENCIES.predict_s) for at_s in asked
    ]
    assert [event.prediction.remaining_tokens.p50 for _, event in told] == [160.0, 60.0, 0.0]


def test_a_trajectory_that_moves_takes_its_kv_along_unless_the_link_is_too_slow() -> None:
    """And prefills only what its tools said."""
    rollout, works = moving(Link())

    moved = [times.migrations for times in rollout.outcome.times]
    assert sum(moved) >= 2
    for work, times in zip(works, rollout.outcome.times, strict=True):
        # the last token sampled has no KV yet
        observed = sum(step.obs_tokens + 1 for step in work.steps[:-1])
        assert times.prefilled_tokens == work.prompt_tokens + observed
    # every move is given up or called off, and the source keeps the trajectory
    slow, _ = moving(Link(bytes_per_s=1e5))
    assert slow.actions(actions.StartMigration)
    assert slow.outcome.migrations == 0
    assert [times.gen_tokens for times in slow.outcome.times] == [work.gen_tokens for work in works]


def test_a_move_takes_the_link_as_long_as_its_kv_is_big_and_the_owner_changes_at_its_end() -> None:
    link = Link(bytes_per_s=1e9, fixed_s=0.2)

    rollout, _ = moving(link)

    started = {
        action.move_id: (now_s, action) for now_s, action in rollout.actions(actions.StartMigration)
    }
    ended = [(now_s, event) for now_s, event in rollout.events(events.MoveEnded) if event.moved]
    assert ended
    switched_s = [now_s for now_s, _ in rollout.events(events.SwitchRequested)]
    for now_s, event in ended:
        asked_s, move = started[event.move_id]
        least_s = link.fixed_s + 200 * move.source.kv_bytes_per_token / link.bytes_per_s
        assert asked_s + least_s <= now_s <= asked_s + move.give_up_after_s
        assert now_s in switched_s
        later = [
            action.ticket
            for issued_s, action in rollout.actions(actions.IssueTicket)
            if issued_s >= now_s and action.ticket.trajectory_id == event.trajectory_id
        ]
        assert not later or later[0].engine_id == move.target.engine_id


def moving(link: Link) -> tuple[Rollout, list[TrajectoryWork]]:
    """Heddle as printed moves without asking what it costs; tools take long enough."""
    works = [
        trajectory(index, [(100 + 90 * (index % 5), 60, 4.0)] * (2 + index % 4), prompt_tokens=200)
        for index in range(16)
    ]
    return play(works, Cluster((engine(2), engine(), engine()), link=link), "heddle"), works


def test_a_step_that_an_engine_takes_with_it_goes_on_elsewhere_from_the_tokens_that_its_client_has() -> (
    None
):
    """Its context is computed again there, what was sampled included; nothing is sampled twice."""
    work = trajectory(0, [(1_000, 0, 0.0)], prompt_tokens=500)
    whole = play([work], Cluster((engine(), engine())))

    broken = play([work], Cluster((engine(), engine()), failures=(Failure(0, 5.0, 1e3),)))

    asked_s, again = broken.events(events.StepRequested)[1]
    assert again.replaces_ticket_id == broken.actions(actions.IssueTicket)[0][1].ticket.ticket_id
    assert asked_s == pytest.approx(5.0 + RPC_S)
    assert 400 < again.resumed_tokens < 500, "about 10 ms a token"
    times, undisturbed = broken.outcome.times[0], whole.outcome.times[0]
    assert times.gen_tokens == 1_000
    assert times.prefilled_tokens == 500 + 500 + again.resumed_tokens
    assert times.decode_s == pytest.approx(undisturbed.decode_s, abs=SLOW.decode_s(1) + 1e-3), (
        "but for a part of a token"
    )
    assert [ticket.ticket.engine_id for _, ticket in broken.actions(actions.IssueTicket)] == [
        "e0000",
        "e0001",
    ]


def test_who_returns_from_a_tool_to_a_dead_engine_is_refused_there_and_runs_elsewhere() -> None:
    """Its KV died with the engine."""
    work = trajectory(0, [(100, 50, 5.0), (100, 0, 0.0)], prompt_tokens=300)
    ends_s = play([work], Cluster((engine(), engine()))).events(events.StepFinished)[0][0]

    rollout = play([work], Cluster((engine(), engine()), failures=(Failure(0, ends_s + 1.0, 1e3),)))

    engines = [action.ticket.engine_id for _, action in rollout.actions(actions.IssueTicket)]
    assert engines == ["e0000", "e0000", "e0001"]
    assert rollout.outcome.times[0].prefilled_tokens == 300 + (300 + 100 + 50)


def test_an_engine_that_comes_back_before_its_lease_is_over_registers_anew_and_works_again() -> (
    None
):
    works = [trajectory(index, [(500, 10, 1.0)] * 4) for index in range(4)]

    rollout = play(works, Cluster((engine(), engine()), failures=(Failure(0, 5.0, 7.0),)), "slime")

    assert [event.lease_id for _, event in rollout.events(events.EngineRegistered)] == [
        "l0.0",
        "l1.0",
        "l0.1",
    ]
    assert not rollout.events(events.EngineDeregistered)
    late = [
        action.ticket.engine_id
        for now_s, action in rollout.actions(actions.IssueTicket)
        if now_s > 7.0
    ]
    assert "e0000" in late


@pytest.mark.parametrize("system", ["verl", "affinity-las", "heddle", "treadle"])
def test_engines_are_taken_away_when_their_leases_have_run_out_and_everything_ends_on_the_last_one(
    system: str,
) -> None:
    works = [trajectory(index, [(300, 20, 0.5)] * 3) for index in range(6)]
    failures = tuple(Failure(index, 3.0 + index, 1e4) for index in range(3))

    rollout = play(works, Cluster((engine(slots=2),) * 4, failures=failures), system)

    gone_s = {event.engine_id: now_s for now_s, event in rollout.events(events.EngineDeregistered)}
    assert gone_s == pytest.approx(
        {f"e{index:04}": 3.0 + index + Tuning().lease_ttl_s for index in range(3)}
    )
    assert [times.gen_tokens for times in rollout.outcome.times] == [900] * 6
    assert len(rollout.actions(actions.AnnounceClosed)) == 6
    assert rollout.actions(actions.IssueTicket)[-1][1].ticket.engine_id == "e0003"


def test_an_update_of_the_weights_stops_all_engines_and_each_context_is_computed_again() -> None:
    works = [trajectory(index, [(1_000, 0, 0.0)], prompt_tokens=400) for index in range(2)]
    cluster = Cluster((engine(), engine()))
    whole = play(works, cluster)

    updated = play(works, Cluster(cluster.engines, weight_updates=(WeightUpdate(5.0, 3.0),)))

    assert [event.engine_id for _, event in updated.events(events.WeightsUpdated)] == [
        "e0000",
        "e0001",
    ]
    for times, before in zip(updated.outcome.times, whole.outcome.times, strict=True):
        again_tokens = times.prefilled_tokens - 400
        # the one under way is lost, the prefill yields one
        step_s = SLOW.decode_s(1) + 1_400 * SLOW.per_kv_token_s
        assert 400 + 400 < again_tokens < 400 + 500, "about 10 ms a token for 5 s"
        assert times.finished_s == pytest.approx(
            before.finished_s + 3.0 + SLOW.prefill_s(again_tokens, 0), abs=step_s
        )
        assert times.decode_s == pytest.approx(before.decode_s, abs=step_s)


def test_later_tickets_carry_the_new_weights_and_a_returning_engine_serves_them() -> None:
    work = trajectory(0, [(100, 0, 1.0)] * 6)
    updates = (WeightUpdate(3.0, 0.5), WeightUpdate(6.0, 0.5))

    rollout = play(
        [work],
        Cluster((engine(), engine()), failures=(Failure(1, 2.0, 5.0),), weight_updates=updates),
    )

    versions = [action.ticket.weight_version for _, action in rollout.actions(actions.IssueTicket)]
    assert versions == sorted(versions)
    assert set(versions) == {"0", "1", "2"}
    registered = rollout.events(events.EngineRegistered)
    assert [event.spec.weight_version for _, event in registered] == ["0", "0", "1"]


@pytest.mark.parametrize("rpc_s", [0.0, 0.002])
@pytest.mark.parametrize("away_s", [5.0, 60.0])
def test_clients_ask_again_until_the_only_engine_is_back(rpc_s: float, away_s: float) -> None:
    """Before its lease is over, when it is refused, and after, when there is no engine at all."""
    work = trajectory(0, [(1_000, 10, 1.0), (1_000, 0, 0.0)])
    cluster = Cluster(
        (engine(),), latencies=Latencies(rpc_s=rpc_s), failures=(Failure(0, 3.0, 3.0 + away_s),)
    )

    rollout = play([work], cluster)

    assert rollout.outcome.times[0].gen_tokens == 2_000
    assert rollout.outcome.makespan_s > 3.0 + away_s


def test_tagged_work_runs_on_an_engine_that_carries_its_tag() -> None:
    work = replace(trajectory(0, [(10, 0, 0.0)]), hardware_tags=("other",))
    busy_s = play(
        [work], Cluster((engine(), replace(engine(), accelerator="other")))
    ).outcome.engine_busy_s
    assert busy_s[0] == 0.0 < busy_s[1]
