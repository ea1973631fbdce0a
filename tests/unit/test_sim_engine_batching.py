"""The simulated engine: its closed form against one that goes token by token, and what slots, KV and caches do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.steps.queue import DEFAULT_MIN_RUN_TOKENS
from treadle_sim.batch import EngineStep
from treadle_sim.engine import SimEngine
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.timeline import Timeline

CURVE = StepCurve((1.0, 8.0, 64.0), (0.010, 0.012, 0.030), 2e-7, 0.005, 2e-5, 1e-9)


def model(slots: int = 64, kv_tokens: int = 10_000_000) -> EngineModel:
    return EngineModel("toy", "toy", "toy", 1, slots, kv_tokens, 1000, CURVE)


@dataclass
class Ear:
    finished: dict[str, float] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)

    def step_preempted(self, step: EngineStep) -> None:
        self.preempted.append(step.step_id)

    def step_finished(self, step: EngineStep) -> None:
        self.finished[step.step_id] = self.timeline.now


def step(name: str, context: int, gen: int, *, index: int = 0, at_s: float = 0.0) -> EngineStep:
    return EngineStep(name, index, f"p{index}", context, context, gen, at_s)


def play(engine: SimEngine, ear: Ear, arrivals: list[tuple[float, EngineStep, float]]) -> dict[str, float]:
    for at_s, arriving, priority in arrivals:
        arriving.since_s = at_s
        ear.timeline.at(at_s, engine.submit, arriving, priority)
    ear.timeline.run(lambda: True)
    return ear.finished


def token_by_token(arrivals: list[tuple[float, int, int]]) -> list[float]:
    """Finish times of (arrival s, context, tokens), all of which fit: each decode step made one after the other."""
    now, done = 0.0, [0] * len(arrivals)
    finished = [0.0] * len(arrivals)
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i][0])
    running: list[int] = []
    while waiting or running:
        ready = [i for i in waiting if arrivals[i][0] < now]
        if not ready and not running:
            ready = waiting[:1]  # of those that come at once the first begins alone
            now = arrivals[ready[0]][0]
        if ready:
            waiting = [i for i in waiting if i not in ready]
            contexts = [arrivals[i][1] for i in ready]
            computed_s = sum(CURVE.prefill_token_s * c + CURVE.prefill_pair_s * c * c / 2 for c in contexts)
            decode_s = CURVE.decode_s(len(ready)) + CURVE.per_kv_token_s * sum(contexts)
            now += max(CURVE.prefill_fixed_s + computed_s, decode_s)
            running += ready
            sampling = ready
        else:
            kv = sum(arrivals[i][1] + done[i] for i in running)
            now += CURVE.decode_s(len(running)) + CURVE.per_kv_token_s * kv
            sampling = list(running)
        for i in sampling:
            done[i] += 1
            if done[i] == arrivals[i][2]:
                finished[i] = now
                running.remove(i)
    return finished


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 4_000), st.integers(1, 600)), min_size=1, max_size=20))
def test_the_closed_form_agrees_with_going_token_by_token(works: list[tuple[float, int, int]]) -> None:
    ear = Ear()
    engine = SimEngine("e", model(), ear.timeline, ear, preempt=False)
    arrivals = [(at_s, step(str(i), context, gen, index=i), 0.0) for i, (at_s, context, gen) in enumerate(works)]

    finished = play(engine, ear, arrivals)

    exact = np.array(token_by_token(works))
    fluid = np.array([finished[str(i)] for i in range(len(works))])
    assert fluid == pytest.approx(exact, rel=1e-9)


def test_one_sequence_takes_what_the_curve_says() -> None:
    ear = Ear()
    engine = SimEngine("e", model(), ear.timeline, ear, preempt=False)

    play(engine, ear, [(0.0, step("a", 1_000, 500), 0.0)])

    decode_s = sum(CURVE.decode_s(1) + CURVE.per_kv_token_s * (1_000 + i) for i in range(1, 500))
    assert ear.finished["a"] == pytest.approx(CURVE.prefill_s(1_000, 0) + decode_s, rel=1e-9)
    assert engine.busy_s == pytest.approx(ear.finished["a"], rel=1e-9)


def test_no_more_than_the_slots_run_at_once() -> None:
    ear = Ear()
    engine = SimEngine("e", model(slots=2), ear.timeline, ear, preempt=False)
    steps = [step(str(i), 100, 100, index=i) for i in range(4)]

    play(engine, ear, [(0.0, one, float(-i)) for i, one in enumerate(steps)])

    assert ear.finished["2"] > ear.finished["0"], "the third had to wait"
    assert steps[0].queue_s == 0.0
    assert steps[2].queue_s == pytest.approx(ear.finished["0"], rel=1e-6)


def test_a_step_of_higher_priority_evicts_the_lowest_which_loses_no_token_and_keeps_its_kv() -> None:
    ear = Ear()
    engine = SimEngine("e", model(slots=1), ear.timeline, ear, preempt=True)
    low, high = step("low", 1_000, 400, index=0), step("high", 100, 50, index=1)

    play(engine, ear, [(0.0, low, 1.0), (2.0, high, 2.0)])

    assert ear.preempted == ["low"]
    assert ear.finished["high"] < ear.finished["low"]
    assert low.prefilled_tokens == 1_000 + 1, "resumed from the radix tree, but for the last token"
    assert low.queue_s == pytest.approx(high.prefill_s + high.decode_s, rel=1e-6)


def test_where_kv_is_short_the_next_step_waits_and_the_oldest_cached_context_goes() -> None:
    ear = Ear()
    engine = SimEngine("e", model(kv_tokens=2_000), ear.timeline, ear, preempt=False)
    first, second = step("a", 1_200, 100, index=0), step("b", 1_200, 100, index=1)

    play(engine, ear, [(0.0, first, 0.0), (0.0, second, 0.0)])

    assert second.queue_s >= first.prefill_s + first.decode_s - 1e-9
    assert engine.cache.peek(0) == 0, "its room was needed"
    assert engine.cache.peek(1) == 1_299


def test_a_returning_step_prefills_only_what_is_new_and_a_sibling_finds_the_prompt() -> None:
    ear = Ear()
    engine = SimEngine("e", model(), ear.timeline, ear, preempt=False)
    again = EngineStep("a2", 0, "p0", 500, 900, 10, 0.0)  # 500 + 100 sampled + 300 observed
    sibling = EngineStep("s", 7, "p0", 500, 500, 10, 0.0)

    play(engine, ear, [(0.0, step("a1", 500, 100, index=0), 0.0), (30.0, again, 0.0), (60.0, sibling, 0.0)])

    assert again.prefilled_tokens == 301
    assert sibling.prefilled_tokens == 1


def test_a_failed_engine_gives_its_steps_back_with_the_tokens_they_had() -> None:
    ear = Ear()
    engine = SimEngine("e", model(), ear.timeline, ear, preempt=False)
    lost: list[EngineStep] = []
    ear.timeline.at(0.0, engine.submit, step("a", 100, 1_000), 0.0)
    ear.timeline.at(5.0, lambda: lost.extend(engine.fail()))
    ear.timeline.run(lambda: True)

    assert [one.step_id for one in lost] == ["a"]
    assert 400 < lost[0].done < 500, "about 10 ms a token"
    assert not ear.finished


def test_an_update_of_the_weights_makes_every_context_be_computed_again() -> None:
    ear = Ear()
    engine = SimEngine("e", model(), ear.timeline, ear, preempt=False)
    running = step("a", 1_000, 1_000)
    ear.timeline.at(0.0, engine.submit, running, 0.0)
    ear.timeline.at(5.0, engine.pause, 3.0)
    ear.timeline.run(lambda: True)

    assert running.prefilled_tokens > 2_300, "the prompt twice, and what was sampled"
    assert running.queue_s == pytest.approx(3.0)


def test_what_comes_during_a_decode_step_begins_at_its_end_and_is_evicted_at_one() -> None:
    ear = Ear()
    engine = SimEngine("e", model(slots=1), ear.timeline, ear, preempt=True)
    low, high = step("low", 1_000, 400, index=0), step("high", 100, 50, index=1)

    play(engine, ear, [(0.0, low, 1.0), (2.0, high, 2.0)])

    began_s = CURVE.prefill_s(1_000, 0)
    ends_s = began_s + np.cumsum([CURVE.decode_s(1) + CURVE.per_kv_token_s * (1_000 + i) for i in range(1, 400)])
    evicted_s = float(ends_s[ends_s > 2.0][0])
    assert high.queue_s == pytest.approx(evicted_s - 2.0, rel=1e-9)
    assert ear.finished["high"] == pytest.approx(evicted_s + high.prefill_s + high.decode_s, rel=1e-9)


def test_a_running_step_is_evicted_as_soon_as_it_has_its_least_tokens() -> None:
    ear = Ear()
    engine = SimEngine("e", model(slots=1), ear.timeline, ear, preempt=True)
    low, high = step("low", 1_000, 400, index=0), step("high", 100, 50, index=1)

    play(engine, ear, [(0.0, low, 1.0), (0.03, high, 2.0)])

    decode_s = sum(CURVE.decode_s(1) + CURVE.per_kv_token_s * (1_000 + i) for i in range(1, DEFAULT_MIN_RUN_TOKENS))
    assert high.queue_s == pytest.approx(CURVE.prefill_s(1_000, 0) + decode_s - 0.03, rel=1e-9)


def test_what_is_cached_is_found_in_whole_pages() -> None:
    ear = Ear()
    engine = SimEngine("e", replace(model(), page_tokens=16), ear.timeline, ear, preempt=False)
    again = EngineStep("a2", 0, "p0", 500, 900, 10, 0.0)  # 500 + 100 sampled + 300 observed

    play(engine, ear, [(0.0, step("a1", 500, 100, index=0), 0.0), (30.0, again, 0.0)])

    assert again.prefilled_tokens == 900 - 599 // 16 * 16
