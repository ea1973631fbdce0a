"""Judging placements: a plan is never followed to somewhere worse, and a rebalance helps or leaves alone."""

from hypothesis import given
from hypothesis import strategies as st
from support.control import CURVE, Scenario, all_of
from treadle_core import actions as act
from treadle_core import balance
from treadle_core import events as ev
from treadle_core.balance import Work
from treadle_core.model import EngineSpec
from treadle_core.tuning import Tuning

MARGIN = 0.1
LENGTHS = st.lists(st.floats(1.0, 30_000.0), min_size=1, max_size=14)


def engines(count: int, slots: int) -> dict[str, EngineSpec]:
    return {f"e{i}": EngineSpec(f"e{i}", f"e{i}:1", slot_limit=slots, decode_curve=CURVE) for i in range(count)}


def works(lengths: list[float]) -> dict[str, Work]:
    return {f"t{i:02}": Work(f"t{i:02}", tokens, 100, tokens * CURVE.base_s) for i, tokens in enumerate(lengths)}


def last(times: dict[str, float]) -> float:
    return max(times.values())


@given(LENGTHS, st.integers(2, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_rebalance_never_makes_the_last_engine_later(
    lengths: list[float], count: int, slots: int, random: object
) -> None:
    specs, jobs = engines(count, slots), works(lengths)
    present = {name: random.choice(sorted(specs)) for name in jobs}  # type: ignore[attr-defined]
    before = balance.finish_times(present, jobs, specs)
    after = balance.finish_times(balance.rebalanced(present, jobs, specs, MARGIN, set(jobs)), jobs, specs)
    assert last(after) <= last(before) * (1 + 1e-9)
    assert not balance.better(before, after, 1e-9)


@given(LENGTHS)
def test_what_may_not_move_stays(lengths: list[float]) -> None:
    specs, jobs = engines(2, 1), works(lengths)
    present = dict.fromkeys(jobs, "e0")
    movable = set(sorted(jobs)[::2])
    result = balance.rebalanced(present, jobs, specs, MARGIN, movable)
    assert all(result[name] == "e0" for name in jobs if name not in movable)


def test_a_heap_on_one_engine_is_spread() -> None:
    specs, jobs = engines(4, 2), works([1_000.0] * 16)
    result = balance.rebalanced(dict.fromkeys(jobs, "e0"), jobs, specs, MARGIN, set(jobs))
    assert sorted(list(result.values()).count(engine) for engine in specs) == [4, 4, 4, 4]


def test_one_trajectory_that_sets_the_bound_does_not_hide_the_imbalance_of_the_rest() -> None:
    """Degenerate minimax (reference point 5): the giant cannot be relieved; the other engines still are."""
    specs, jobs = engines(3, 1), works([1e6, *[1_000.0] * 6])
    present = {name: "e0" if name == "t00" else "e1" for name in jobs}
    result = balance.rebalanced(present, jobs, specs, MARGIN, set(jobs))
    assert result["t00"] == "e0"
    assert sorted(list(result.values()).count(engine) for engine in specs) == [1, 3, 3]
    assert balance.better(balance.finish_times(result, jobs, specs), balance.finish_times(present, jobs, specs), MARGIN)


def test_groups_of_equal_engines_keep_the_names_that_leave_most_context_where_it_is() -> None:
    specs, jobs = engines(2, 2), works([500.0] * 4)
    present = {"t00": "e0", "t01": "e0", "t02": "e1", "t03": "e1"}
    swapped = {"t00": "e1", "t01": "e1", "t02": "e0", "t03": "e0"}
    assert balance.relabelled(swapped, present, jobs, specs) == present


def test_engines_that_differ_are_not_renamed() -> None:
    specs = {**engines(1, 2), "e1": EngineSpec("e1", "e1:1", slot_limit=8, decode_curve=CURVE)}
    jobs = works([500.0] * 2)
    planned = {"t00": "e1", "t01": "e0"}
    assert balance.relabelled(planned, {"t00": "e0", "t01": "e1"}, jobs, specs) == planned


def test_an_engine_is_never_done_before_its_longest_trajectory_alone() -> None:
    spec = engines(1, 4)["e0"]
    assert balance.finish_s(spec, balance.total([Work("t", 10.0, 100, alone_s=99.0)])) == 99.0
    assert balance.finish_s(spec, balance.total([])) == 0.0


@given(
    st.lists(st.floats(50.0, 20_000.0), min_size=2, max_size=16),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_following_plans_on_two_small_engines_is_never_worse_than_staying(
    lengths: list[float], slots: int, random: object
) -> None:
    """Any plan, however bad: where the trajectories then run finishes no later, by the core's own cost, than where they
    were."""
    scenario = Scenario(None, Tuning(plan_every_events=1, plan_interval_s=0.0))
    scenario.engine("e0", slots=slots)
    scenario.engine("e1", slots=slots)
    jobs = works(lengths)
    for name, job in jobs.items():
        scenario.open(name)
        scenario.predict(name, job.tokens)
    specs = {engine.spec.engine_id: engine.spec for engine in scenario.controller.engines()}
    present = {name: scenario.controller.trajectory(name).engine_id for name in jobs}
    scenario.now += scenario.tuning.plan_timeout_s  # whatever was asked before is void
    scenario.open("late")
    scenario.close("late")
    asked = all_of(scenario.heard, act.AskPlan)[-1]
    groups: dict[str, list[str]] = {"e0": [], "e1": []}
    for name in jobs:
        groups[random.choice(["e0", "e1"])].append(name)  # type: ignore[attr-defined]
    scenario.send(ev.PlanArrived(asked.plan_id, tuple((engine, tuple(names)) for engine, names in groups.items())))
    after = {name: scenario.step(name, 0).engine_id for name in jobs}  # none has run yet: a move is free
    assert last(balance.finish_times(after, jobs, specs)) <= last(balance.finish_times(present, jobs, specs)) * (
        1 + 1e-6
    )
