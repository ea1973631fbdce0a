"""What happens to a simulated rollout when an engine dies, comes back, or gets other weights."""

from __future__ import annotations

import pytest
from support.simulated import SLOW, engine, play, trajectory
from treadle_core.actions import IssueTicket
from treadle_core.events import EngineDeregistered, EngineRegistered, StepFinished, StepRequested, WeightsUpdated
from treadle_core.tuning import Tuning
from treadle_sim.cluster import Cluster, Failure, Latencies, WeightUpdate

RPC_S = Latencies().rpc_s


def test_a_step_that_an_engine_takes_with_it_goes_on_elsewhere_from_the_tokens_that_its_client_has() -> None:
    """Its context is computed again there, what was sampled included; nothing is sampled twice."""
    work = trajectory(0, [(1_000, 0, 0.0)], prompt_tokens=500)
    whole = play([work], Cluster((engine(), engine())))

    broken = play([work], Cluster((engine(), engine()), failures=(Failure(0, 5.0, 1e3),)))

    asked_s, again = broken.events(StepRequested)[1]
    assert again.replaces_ticket_id == broken.actions(IssueTicket)[0][1].ticket.ticket_id
    assert asked_s == pytest.approx(5.0 + RPC_S)
    assert 400 < again.resumed_tokens < 500, "about 10 ms a token"
    times, undisturbed = broken.outcome.times[0], whole.outcome.times[0]
    assert times.gen_tokens == 1_000
    assert times.prefilled_tokens == 500 + 500 + again.resumed_tokens
    assert times.decode_s == pytest.approx(undisturbed.decode_s, abs=SLOW.decode_s(1) + 1e-3), (
        "but for a part of a token"
    )
    assert [ticket.ticket.engine_id for _, ticket in broken.actions(IssueTicket)] == ["e0000", "e0001"]


def test_an_engine_is_taken_away_when_its_lease_has_run_out_and_not_before() -> None:
    work = trajectory(0, [(3_000, 0, 0.0)])

    rollout = play([work], Cluster((engine(), engine()), failures=(Failure(1, 2.0, 1e3),)))

    ((gone_s, gone),) = rollout.events(EngineDeregistered)
    assert gone.engine_id == "e0001"
    assert gone_s == pytest.approx(2.0 + Tuning().lease_ttl_s)


def test_who_returns_from_a_tool_to_a_dead_engine_is_refused_there_and_runs_elsewhere() -> None:
    """Its KV died with the engine."""
    work = trajectory(0, [(100, 50, 5.0), (100, 0, 0.0)], prompt_tokens=300)
    ends_s = play([work], Cluster((engine(), engine()))).events(StepFinished)[0][0]

    rollout = play([work], Cluster((engine(), engine()), failures=(Failure(0, ends_s + 1.0, 1e3),)))

    engines = [action.ticket.engine_id for _, action in rollout.actions(IssueTicket)]
    assert engines == ["e0000", "e0000", "e0001"]
    assert rollout.outcome.times[0].prefilled_tokens == 300 + (300 + 100 + 50)


def test_an_engine_that_comes_back_before_its_lease_is_over_registers_anew_and_works_again() -> None:
    works = [trajectory(index, [(500, 10, 1.0)] * 4) for index in range(4)]

    rollout = play(works, Cluster((engine(), engine()), failures=(Failure(0, 5.0, 7.0),)), "slime")

    assert [event.lease_id for _, event in rollout.events(EngineRegistered)] == ["l0.0", "l1.0", "l0.1"]
    assert not rollout.events(EngineDeregistered)
    late = [action.ticket.engine_id for now_s, action in rollout.actions(IssueTicket) if now_s > 7.0]
    assert "e0000" in late


@pytest.mark.parametrize("system", ["verl", "affinity-las", "heddle", "treadle"])
def test_with_all_engines_but_one_dead_everything_ends_on_that_one(system: str) -> None:
    works = [trajectory(index, [(300, 20, 0.5)] * 3) for index in range(6)]
    failures = tuple(Failure(index, 3.0 + index, 1e4) for index in range(3))

    rollout = play(works, Cluster((engine(slots=2),) * 4, failures=failures), system)

    assert [times.gen_tokens for times in rollout.outcome.times] == [900] * 6
    assert rollout.actions(IssueTicket)[-1][1].ticket.engine_id == "e0003"


def test_an_update_of_the_weights_stops_all_engines_and_each_context_is_computed_again() -> None:
    works = [trajectory(index, [(1_000, 0, 0.0)], prompt_tokens=400) for index in range(2)]
    cluster = Cluster((engine(), engine()))
    whole = play(works, cluster)

    updated = play(works, Cluster(cluster.engines, weight_updates=(WeightUpdate(5.0, 3.0),)))

    assert [event.engine_id for _, event in updated.events(WeightsUpdated)] == ["e0000", "e0001"]
    for times, before in zip(updated.outcome.times, whole.outcome.times, strict=True):
        again_tokens = times.prefilled_tokens - 400
        step_s = SLOW.decode_s(1) + 1_400 * SLOW.per_kv_token_s  # the one under way is lost, the prefill yields one
        assert 400 + 400 < again_tokens < 400 + 500, "about 10 ms a token for 5 s"
        assert times.finished_s == pytest.approx(before.finished_s + 3.0 + SLOW.prefill_s(again_tokens, 0), abs=step_s)
        assert times.decode_s == pytest.approx(before.decode_s, abs=step_s)


def test_later_tickets_carry_the_new_weights() -> None:
    work = trajectory(0, [(100, 0, 1.0)] * 6)

    rollout = play([work], Cluster((engine(),), weight_updates=(WeightUpdate(3.0, 0.5), WeightUpdate(6.0, 0.5))))

    versions = [action.ticket.weight_version for _, action in rollout.actions(IssueTicket)]
    assert versions == sorted(versions)
    assert set(versions) == {"0", "1", "2"}
