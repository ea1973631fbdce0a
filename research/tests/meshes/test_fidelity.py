"""The fidelity bench without engines: its work, its rows of a profile, its simulated side and its
figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from treadle import Span
from treadle.engine.v1.engine_pb2 import DecodeCurve as DeclaredMessage
from treadle.engine.v1.engine_pb2 import EngineInfo
from treadle.scheduler.v1.scheduler_pb2 import Ordering, PlacementRule, RegisteredEngine
from treadle_core.model import DecodeCurve
from treadle_sim.cluster import Latencies, Link
from treadle_sim.fitting import fit_measured
from treadle_sim.systems import SYSTEMS

from treadle_bench.fidelity.live import (
    GEN_TOKENS,
    OBS_TOKENS,
    STEPS,
    TOOL_S,
    Play,
    Played,
    make_workload,
    token_ids,
)
from treadle_bench.fidelity.measure import ENGINES, POLICIES, compare_plays, same_engine
from treadle_bench.fidelity.plot import draw
from treadle_bench.fidelity.profile import Control, decode_rows
from treadle_bench.fidelity.stage import (
    Case,
    delay_prefills,
    engine_models,
    find_pass_s,
    live_policy,
    short_turns,
    simulate_play,
    slow_down,
    slowness_of,
)

SLOTS = 3
CONTROL = Control(Latencies(predict_s=0.005, plan_s=0.002, rpc_s=0.0), Link())
BASE_S, SEQUENCE_S, TOKEN_S = 0.05, 0.01, 2e-5


def played(finished_s: float, *spans: tuple[str, float, float, str]) -> Played:
    turn, made = 0, []
    for kind, start_s, end_s, engine_id in spans:
        made.append(Span(kind, start_s, end_s, engine_id, turn))  # type: ignore[arg-type]
        turn += kind == "tool"
    return Played(finished_s, tuple(made), preemptions=0)


def registered(engine_id: str) -> RegisteredEngine:
    curve = DeclaredMessage(base_s=1.0, per_sequence_s=0.5, prefill_tokens_per_s=100.0)
    info = EngineInfo(
        engine_id=engine_id, slot_limit=SLOTS, kv_tokens_capacity=20_000, decode_curve=curve
    )
    return RegisteredEngine(info=info)


def profile() -> dict[str, object]:
    steps = [
        {"batch": n, "kv_tokens": n * c, "step_s": BASE_S + SEQUENCE_S * n + TOKEN_S * n * c}
        for n in range(1, SLOTS + 1)
        for c in (80, 320)
    ]
    prefills = [
        {"new_tokens": p, "cached_tokens": 0, "seconds": 0.06 + 0.002 * p} for p in (16, 64, 256)
    ]
    kind = {"accelerator": "core", "llm": "small", "gpus": 1, "slots": SLOTS, "kv_tokens": 20_000}
    return {**kind, "decode": steps, "prefill": prefills}


def test_the_work_is_the_seeds_alone_keeps_its_bounds_and_has_a_tail() -> None:
    assert make_workload(3) == make_workload(3) != make_workload(4)
    for seed in range(5):
        works = make_workload(seed).trajectories
        assert all(STEPS[0] <= len(work.steps) <= STEPS[1] for work in works)
        for step in (step for work in works for step in work.steps):
            assert GEN_TOKENS[0] <= step.gen_tokens <= GEN_TOKENS[1]
            assert OBS_TOKENS[0] <= step.obs_tokens <= OBS_TOKENS[1]
            assert TOOL_S[0] <= step.tool_s <= TOOL_S[1]
        lengths = sorted(work.gen_tokens for work in works)
        assert lengths[-1] > 2 * lengths[len(lengths) // 2]


def test_samples_share_their_prompts_tokens_and_nothing_else_and_another_salt_shares_nothing() -> (
    None
):
    one, other = (token_ids(work, "a") for work in make_workload(0).trajectories[:2])
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert [len(said) for said in one[1]] == [
        step.obs_tokens for step in make_workload(0).trajectories[0].steps
    ]
    assert token_ids(make_workload(0).trajectories[0], "b")[0] != one[0]


def test_only_tokens_of_a_whole_batch_count_as_its_steps() -> None:
    """The second sequence begins late and the first ends early: steps alone were faster."""
    first = [0.0, 0.1, 0.2, 0.4, 0.6, 0.8]
    second = [0.2, 0.4, 0.6, 0.8, 0.9, 1.0]
    rows = decode_rows([first, second], context=100)
    assert [row["step_s"] for row in rows] == [pytest.approx(0.2), pytest.approx(0.2)]
    assert [row["batch"] for row in rows] == [2, 2]
    assert rows[0]["kv_tokens"] == pytest.approx(2 * (100 + (2 + 5) / 2))
    assert decode_rows([[0.0, 0.1], [0.5, 0.6]], context=10) == []  # they never ran together


def test_the_simulator_steps_at_the_measured_curve_while_its_planner_sees_the_declared_one() -> (
    None
):
    ids = ["engine-0", "engine-1"]
    for model in engine_models(
        [registered(one) for one in ids], [fit_measured(profile())] * ENGINES
    ):
        assert model.curve.linear(SLOTS) == DecodeCurve(1.0, 0.5, 0.0, 100.0)
        assert model.curve.decode_s(2) == pytest.approx(BASE_S + 2 * SEQUENCE_S, rel=0.01)
        assert model.curve.prefill_s(100, 0) == pytest.approx(0.06 + 0.002 * 100, rel=0.01)


def test_a_pulse_that_takes_half_as_long_again_makes_the_engine_as_much_slower() -> None:
    measured = fit_measured(profile())
    rows = [
        {"batch": 3, "kv_tokens": 600, "step_s": 1.5 * (BASE_S + 3 * SEQUENCE_S + 600 * TOKEN_S)}
    ]
    factor = slowness_of(measured, rows)
    assert factor == pytest.approx(1.5, rel=0.01)
    (model,) = engine_models([registered("engine-0")], [measured])
    slow = slow_down(model, factor)
    assert slow.curve.decode_s(2) == pytest.approx(factor * model.curve.decode_s(2))
    assert slow.curve.prefill_s(50, 100) == pytest.approx(factor * model.curve.prefill_s(50, 100))
    assert slow.curve.linear(SLOTS) == model.curve.linear(SLOTS)


def simulated(seed: int, name: str, slots: int = SLOTS) -> Play:
    models = engine_models([registered("engine-0")], [fit_measured(profile())]) * ENGINES
    return simulate_play(
        make_workload(seed),
        [replace(model, slots=slots) for model in models],
        SYSTEMS[name],
        CONTROL,
    )


@pytest.mark.parametrize("name", ["verl", "treadle"])
def test_a_simulated_play_has_every_step_on_an_engine_and_all_of_its_time_in_parts(
    name: str,
) -> None:
    work, play = make_workload(1), simulated(1, name)
    for one, made in zip(work.trajectories, play.trajectories, strict=True):
        assert len(made.engines) == len(one.steps)
        assert set(made.engines) <= {"engine-0", "engine-1"}
        assert made.part_s("tool") == pytest.approx(one.tool_s)
        spent_s = sum(made.part_s(kind) for kind in ("queue", "prefill", "decode", "tool"))
        assert spent_s <= made.finished_s + 1e-9
    assert play.makespan_s > max(one.tool_s for one in work.trajectories)


def test_a_play_is_like_itself() -> None:
    play = simulated(0, "verl")
    found = compare_plays(Case("verl", make_workload(0), [play, play], play))
    assert (found["makespan_rel_err"], found["time_corr"], found["same_engine"]) == (0.0, 1.0, 1.0)
    assert (found["live_time_corr"], found["live_same_engine"]) == (1.0, 1.0)
    assert found["parts_live_s"] == found["parts_simulated_s"]
    assert "live_time_corr" not in compare_plays(Case("verl", make_workload(0), [play], play))


def test_figures_tell_how_far_the_simulated_play_is_from_the_mean_of_the_live_ones() -> None:
    """Twice as slow throughout: an error of 1 and a correlation of 1."""
    spans = (
        ("queue", 0.0, 1.0, "engine-0"),
        ("decode", 1.0, 3.0, "engine-0"),
        ("tool", 3.0, 4.0, ""),
    )
    live = Play((played(4.0, *spans), played(8.0, ("decode", 0.0, 8.0, "engine-1"))), migrations=1)
    slower = tuple(
        (kind, 2 * start_s, 2 * end_s, engine_id) for kind, start_s, end_s, engine_id in spans
    )
    slow = Play(
        (played(8.0, *slower), played(16.0, ("decode", 0.0, 16.0, "engine-0"))), migrations=0
    )
    found = compare_plays(Case("verl", make_workload(0), [live], slow))
    assert found["makespan_rel_err"] == 1.0
    assert found["time_abs_err_median"] == 1.0
    assert found["time_corr"] == pytest.approx(1.0)
    assert found["same_engine"] == 0.5
    assert found["parts_live_s"] == {
        "queue": 0.5,
        "prefill": 0.0,
        "decode": 5.0,
        "tool": 0.5,
        "other": 0.0,
    }
    assert found["migrations"] == [1, 0]
    both = compare_plays(Case("verl", make_workload(0), [live, slow], live))
    assert both["makespan_rel_err"] == pytest.approx(8.0 / 12.0 - 1.0, abs=1e-4)
    assert both["live_same_engine"] == 0.5
    json.dumps(found)


def test_engines_that_only_swapped_their_names_are_the_same() -> None:
    def play(first: str, second: str) -> Play:
        return Play(
            tuple(played(1.0, ("decode", 0.0, 1.0, name)) for name in (first, second, second)), 0
        )

    assert same_engine(play("engine-0", "engine-1"), play("engine-1", "engine-0")) == 1.0
    assert same_engine(play("engine-0", "engine-1"), play("engine-1", "engine-1")) == pytest.approx(
        2 / 3
    )


def test_a_policy_reaches_the_live_scheduler_as_the_simulator_has_it() -> None:
    for system in SYSTEMS.values():
        message, policy = live_policy(system.policy), system.policy
        assert Ordering.Name(message.ordering) == f"ORDERING_{policy.ordering.name}"
        assert PlacementRule.Name(message.placement) == f"PLACEMENT_RULE_{policy.placement.name}"
        assert (message.migrate, message.preempt, message.reserve) == (
            policy.migrate,
            policy.preempt,
            policy.reserve,
        )


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    work = make_workload(0)
    cases = [
        Case(name, work, [simulated(0, name)] * 2, simulated(0, name, slots=2)) for name in POLICIES
    ]
    draw(cases, tmp_path / "fidelity.png")
    assert (tmp_path / "fidelity.png").stat().st_size > 10_000


def test_a_round_of_short_turns_tells_how_much_longer_a_pass_of_prefill_takes() -> None:
    models = engine_models(
        [registered("a"), registered("b")], [fit_measured(profile()), fit_measured(profile())]
    )
    work = short_turns(2 * SLOTS)
    half_s = -0.5 * min(model.curve.prefill_fixed_s for model in models)
    for late_s in (half_s, 0.0, 0.04):
        slower = [delay_prefills(model, late_s) for model in models]
        lived_s = simulate_play(work, slower, SYSTEMS["verl"], CONTROL).makespan_s
        assert find_pass_s(work, models, CONTROL, lived_s) == pytest.approx(late_s, abs=2e-3)
    assert find_pass_s(work, models, CONTROL, 0.0) == pytest.approx(2.0 * half_s)
