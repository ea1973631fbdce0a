"""Which step ranks higher, under each ordering."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.control import Scenario, all_of, one
from treadle_core import actions as act
from treadle_core.model import Estimate, Objective, Ordering, Outcome, Policy
from treadle_core.placing.question import MOST_LOG_SIGMA
from treadle_core.ranking.priorities import log_deviation
from treadle_core.tuning import Tuning

TUNING = Tuning()
SECONDS = st.floats(0.0, 30.0)
TOKENS = st.integers(1, 32_768)


def ranked(policy: Policy) -> Scenario:
    """One engine, the policy in force."""
    return Scenario(policy, engines=("e0",))


def two_steps(policy: Policy, first: float, second: float, gap_s: float) -> tuple[float, float]:
    """Priorities of two steps, predicted to leave `first` and `second` tokens, asked for `gap_s`
    apart."""
    scenario = ranked(policy)
    scenario.open_all({"first": first, "second": second})
    one_priority = scenario.step("first", 0).priority
    scenario.now += gap_s
    return one_priority, scenario.step("second", 0).priority


@given(TOKENS, TOKENS, SECONDS)
def test_the_longest_or_by_mean_or_shortest_first_the_shortest_runs_first_and_no_step_starves(
    a: int, b: int, gap_s: float
) -> None:
    """Whatever ordinary waits there are; what is asked for later than a bounded time after a step
    ranks below it."""
    first_counts, second_counts = (max(tokens, TUNING.least_remaining_tokens) for tokens in (a, b))
    longest, mean, shortest = (
        two_steps(policy, a, b, gap_s)
        for policy in (
            Policy(),
            Policy(objective=Objective.MEAN),
            Policy(ordering=Ordering.SHORTEST_FIRST),
        )
    )
    if first_counts >= 1.2 * second_counts:
        assert longest[0] > longest[1]
    if second_counts >= 1.2 * first_counts:
        assert longest[1] > longest[0]
        assert mean[0] > mean[1]
        assert shortest[0] > shortest[1]
    # 32,768 tokens against least_remaining_tokens span 11, and a factor 2 for tool time either way
    doublings = 16
    for ordering in (Ordering.PROGRESSIVE, Ordering.SHORTEST_FIRST, Ordering.LEAST_ATTAINED):
        first, second = two_steps(
            Policy(ordering=ordering), a, b, doublings * TUNING.aging_doubling_s
        )
        assert first > second


def test_first_come_first_served_keeps_a_trajectorys_place() -> None:
    scenario = ranked(Policy(ordering=Ordering.FCFS))
    scenario.open("early")
    scenario.now += 1
    scenario.open("late")
    late = scenario.step("late", 0)
    scenario.now += 1
    early = scenario.step("early", 0)
    assert early.priority > late.priority


def test_round_robin_sends_a_returning_step_to_the_tail() -> None:
    scenario = ranked(Policy(ordering=Ordering.ROUND_ROBIN))
    for name in ("a", "b"):
        scenario.open(name)
        scenario.now += 1
    order = []
    for turn in range(2):
        for name in ("a", "b"):
            ticket = scenario.step(name, turn)
            order.append(ticket.priority)
            scenario.finish(ticket)
            scenario.now += 1
    assert order == sorted(order, reverse=True)


def test_least_attained_ranks_who_has_sampled_least_first() -> None:
    scenario = ranked(Policy(ordering=Ordering.LEAST_ATTAINED))
    scenario.open("much")
    scenario.open("little")
    scenario.finish(scenario.step("much", 0), 400)
    scenario.finish(scenario.step("little", 0), 4)
    assert scenario.step("little", 1).priority > scenario.step("much", 1).priority


def test_the_deadline_objective_runs_least_slack_first() -> None:
    scenario = ranked(Policy(objective=Objective.DEADLINE))
    scenario.open("soon", deadline_s=60.0)
    scenario.open("later", deadline_s=600.0)
    scenario.open("none")
    # 600 s at the curve's 14 ms a token
    scenario.open("later but long", tokens=40_000, deadline_s=600.0)
    ranks = {
        name: scenario.step(name, 0).priority
        for name in ("none", "later", "soon", "later but long")
    }
    assert sorted(ranks, key=lambda name: ranks[name], reverse=True) == [
        "later but long",
        "soon",
        "later",
        "none",
    ]


def test_tools_count_as_time_left() -> None:
    """Two trajectories with as many tokens left; the one with slow tools and turns to come is the
    longer."""
    scenario = ranked(Policy())
    for name, tool_s in (("slow tools", 30.0), ("quick tools", 0.1)):
        scenario.open(name)
        scenario.finish(scenario.step(name, 0))
        scenario.finish(scenario.step(name, 1, tool_s=tool_s))
        scenario.predict(name, 500, remaining_turns=Estimate(3, 5, 8))
    assert scenario.step("slow tools", 2).priority > scenario.step("quick tools", 2).priority


def test_a_late_prediction_reorders_a_step_that_waits_and_a_small_change_does_not() -> None:
    scenario = ranked(Policy())
    scenario.open("t", tokens=1_000)
    ticket = scenario.step("t", 0)
    assert all_of(scenario.predict("t", 1_050), act.Reprioritize) == []
    changed = one(scenario.predict("t", 8_000), act.Reprioritize)
    ((ticket_id, priority),) = changed.changes
    assert ticket_id == ticket.ticket_id
    assert priority == pytest.approx(ticket.priority + 3)
    assert scenario.ticket("t").priority == scenario.controller.trajectory("t").priority == priority


def group_of(
    lengths: dict[str, float], keep: int, policy: Policy | None = None, p90: float = 1.0
) -> Scenario:
    """Samples of one prompt, of which the group keeps the first. p90: of a prediction, over its
    median."""
    scenario = Scenario(policy or Policy(), engines=("e0",))
    for sample, (name, tokens) in enumerate(lengths.items()):
        scenario.open(name, sample=sample, group_keep=keep)
        scenario.predict(name, tokens, remaining_tokens=Estimate(tokens, tokens, p90 * tokens))
    return scenario


LENGTHS = {"a": 800.0, "b": 100.0, "c": 400.0, "d": 200.0}


def test_samples_that_their_group_does_not_need_rank_lower_than_by_their_work() -> None:
    """Two of four are kept: the two shortest are needed. The others rank below the longer one of
    them, of 200 tokens."""
    alone, grouped = group_of(LENGTHS, 0), group_of(LENGTHS, 2)
    lower = {
        name: alone.step(name, 0).priority - grouped.step(name, 0).priority for name in LENGTHS
    }
    first, step = TUNING.surplus_doublings, TUNING.surplus_step_doublings
    assert lower == pytest.approx({"a": 2 + first + step, "b": 0.0, "c": 1 + first, "d": 0.0})


def test_a_sample_ranks_lower_the_surer_it_is_that_its_group_does_not_need_it() -> None:
    lower = []
    for p90 in (8.0, 2.0, 1.2, 1.0):
        alone, grouped = group_of(LENGTHS, 0, p90=p90), group_of(LENGTHS, 2, p90=p90)
        lower.append(alone.step("c", 0).priority - grouped.step("c", 0).priority)
    assert lower == sorted(lower) and lower[0] < lower[-1]


@pytest.mark.parametrize(
    "policy",
    [Policy(ordering=Ordering.FCFS), Policy(objective=Objective.DEADLINE)],
    ids=["first come", "deadline"],
)
def test_where_a_priority_is_a_time_a_group_changes_nothing(policy: Policy) -> None:
    alone, grouped = group_of(LENGTHS, 0, policy), group_of(LENGTHS, 2, policy)
    for name in LENGTHS:
        assert alone.step(name, 0).priority == grouped.step(name, 0).priority


def test_a_sample_takes_the_place_of_one_that_turns_out_to_be_long_also_after_a_restart() -> None:
    """The steps of all four samples run. One of the two that are needed will now be the longest.

    Result: the third one is needed, which its engine hears, and so is it in a new process.
    """
    scenario = group_of(LENGTHS, 2)
    tickets = {name: scenario.step(name, 0) for name in LENGTHS}
    scenario.restart()
    changes = {
        ticket_id: priority
        for change in all_of(
            scenario.predict("d", 3_200, remaining_tokens=Estimate(3_200, 3_200, 3_200)),
            act.Reprioritize,
        )
        for ticket_id, priority in change.changes
    }
    raised = changes[tickets["c"].ticket_id] - tickets["c"].priority
    assert raised == pytest.approx(1 + TUNING.surplus_doublings)
    assert scenario.ticket("c").priority == changes[tickets["c"].ticket_id]
    # as long as the one of 400 tokens that is needed now, less what a second one ranks lower
    change = scenario.ticket("d").priority - tickets["d"].priority
    assert change == pytest.approx(1 - TUNING.surplus_doublings - TUNING.surplus_step_doublings)


@pytest.mark.parametrize("outcome", [Outcome.FINISHED, Outcome.FAILED])
def test_a_sample_that_failed_leaves_its_place_to_another_and_one_that_finished_does_not(
    outcome: Outcome,
) -> None:
    scenario = group_of(LENGTHS, 2)
    before = {name: scenario.step(name, 0).priority for name in LENGTHS}
    scenario.close("b", outcome)
    raised = scenario.ticket("c").priority - before["c"]
    failed = outcome is Outcome.FAILED
    assert raised == pytest.approx(1 + TUNING.surplus_doublings if failed else 0.0)


def test_an_older_prediction_does_not_replace_a_newer_one() -> None:
    scenario = ranked(Policy())
    scenario.open("t")
    scenario.finish(scenario.step("t", 0), 50)
    scenario.predict("t", 700)
    assert scenario.predict("t", 9_000, turn=0, gen_tokens=0) == []
    record = scenario.controller.trajectory("t")
    assert record.prediction is not None
    assert record.prediction.remaining_tokens.p50 == 700


def test_predictions_never_exceed_what_the_cap_leaves() -> None:
    scenario = ranked(Policy())
    scenario.open("capped", tokens=100_000, max_total_tokens=100)
    scenario.open("free", tokens=200)
    assert scenario.step("free", 0).priority > scenario.step("capped", 0).priority


@pytest.mark.parametrize("ordering", Ordering)
@pytest.mark.parametrize("preempt", [True, False])
def test_a_ticket_says_whether_the_policy_lets_its_step_be_evicted(
    ordering: Ordering, preempt: bool
) -> None:
    scenario = ranked(Policy(ordering=ordering, preempt=preempt))
    scenario.open("t")
    assert scenario.step("t", 0).preemptible is preempt


@pytest.mark.parametrize(
    ("p50", "p90", "expected"),
    [
        (100.0, 100.0 * math.exp(1.2815515655446004), 1.0),
        (100.0, 100.0, 0.0),
        (0.0, 100.0, 0.0),
        (1e-5, 1e5, MOST_LOG_SIGMA),
        (5e-324, 1e12, MOST_LOG_SIGMA),
    ],
)
def test_doubt_is_a_deviation_that_plans_take(p50: float, p90: float, expected: float) -> None:
    assert log_deviation(Estimate(0.0, p50, p90)) == pytest.approx(expected)
