"""The decode curve that is learned from an engine's tokens is the engine's own, whatever else took
time."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.engine_queue.pace import EngineWork, MeasuredCurve, Window, fit_windows, predict_s
from treadle_core.model import DecodeCurve

# A small model on one core, and a large one on accelerators.
SMALL = DecodeCurve(0.05, 0.01, 2e-6, 500.0, 1e-7)
LARGE = DecodeCurve(0.012, 1e-4, 2e-8, 20_000.0, 1e-9)


class Engine:
    """An engine that takes exactly what its curve says, times `noise()`. Slots are always full: a
    sequence that ends is followed by the next, whose context grows by what it made and an answer.
    """

    def __init__(
        self,
        curve: DecodeCurve,
        work: EngineWork,
        seed: int,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.curve, self._work, self._noise = curve, work, noise
        self._rng = random.Random(seed)
        self._now = 0.0
        self._begun = 0

    def run(self, slots: int, steps: int, mean_tokens: float = 60.0) -> None:
        """From idle to idle."""
        left: dict[str, int] = {}
        contexts: dict[str, int] = {}
        for _ in range(steps):
            fresh: dict[str, tuple[int, int]] = {}
            while len(left) < slots:
                name, self._begun = f"r{self._begun}", self._begun + 1
                cached = self._rng.choice((0, 64, 400))
                fresh[name] = (self._rng.randrange(10, 300), cached)
                contexts[name] = sum(fresh[name])
                left[name] = 2 + int(self._rng.expovariate(1.0 / mean_tokens))
                self._work.begin(name, contexts[name], self._now)
            if fresh:
                self._prefill(fresh)
                contexts = {name: tokens + (name in fresh) for name, tokens in contexts.items()}
            decode_s = self.curve.base_s + self.curve.per_sequence_s * len(left)
            self._now += self._noise() * (
                decode_s + self.curve.per_kv_token_s * sum(contexts.values())
            )
            for name in list(left):
                self._work.add(name, 1, 0, self._now)
                contexts[name] += 1
                left[name] -= 1
                if not left[name]:
                    self._work.end(name)
                    del left[name], contexts[name]
        for name in left:
            self._work.end(name)

    def _prefill(self, fresh: dict[str, tuple[int, int]]) -> None:
        new = sum(tokens for tokens, _ in fresh.values())
        pairs = sum(tokens * (cached + tokens / 2) for tokens, cached in fresh.values())
        took_s = (
            self.curve.base_s
            + new / self.curve.prefill_tokens_per_s
            + self.curve.prefill_pair_s * pairs
        )
        self._now += self._noise() * took_s
        for name, (_, cached) in fresh.items():
            self._work.add(name, 1, cached, self._now)


def learn(
    engine: DecodeCurve, seed: int, noise: Callable[[], float] = lambda: 1.0
) -> tuple[MeasuredCurve, Engine]:
    """Batches of 1, 3 and 12 at the engine."""
    measured = MeasuredCurve()
    played = Engine(engine, EngineWork(measured.take), seed, noise)
    for slots in (1, 3, 12):
        played.run(slots, 300)
    assert measured.update()
    return measured, played


def step_s(curve: DecodeCurve | None, batch: int, context: int) -> float:
    """A decode step, and the prefill of 10 tokens."""
    assert curve is not None
    return float(
        predict_s(curve, [Window(1.0, batch, batch * context, 10.0, 10.0 * context, 1.0)])[0]
    )


SHAPES = ((1, 100), (4, 500), (12, 500), (12, 1_000))


@pytest.mark.parametrize("truth", [SMALL, LARGE])
def test_an_engine_without_noise_is_learned(truth: DecodeCurve) -> None:
    measured, _ = learn(truth, seed=1)
    for shape in SHAPES:
        assert step_s(measured.declared, *shape) == pytest.approx(step_s(truth, *shape), rel=0.02)


def windows_of(rng: np.random.Generator, truth: DecodeCurve, count: int) -> Iterator[Window]:
    """Half of them with prefill."""
    for _ in range(count):
        batch, context = int(rng.integers(1, 65)), float(rng.integers(50, 4_000))
        new = float(rng.integers(10, 2_000)) * (rng.random() < 0.5)
        shape = Window(4.0, 4.0 * batch, 4.0 * batch * context, new, new * (context + new / 2), 1.0)
        yield shape._replace(seconds=float(predict_s(truth, [shape])[0]))


@given(
    base_s=st.floats(1e-3, 0.1),
    sequence_share=st.floats(0.0, 0.2),
    kv_share=st.floats(0.0, 1e-4),
    token_share=st.floats(1e-3, 0.1),
    pair_share=st.floats(0.0, 1e-4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_a_known_curve_is_recovered_from_noisy_windows_of_which_some_are_far_off(
    base_s: float,
    sequence_share: float,
    kv_share: float,
    token_share: float,
    pair_share: float,
    seed: int,
) -> None:
    """A twentieth more or less, and one window in ten takes two to five times as long as the
    engine's work."""
    truth = DecodeCurve(
        base_s,
        base_s * sequence_share,
        base_s * kv_share / 10,
        1 / (base_s * token_share),
        base_s * pair_share / 100,
    )
    rng = np.random.default_rng(seed)
    seen = [
        each._replace(
            seconds=each.seconds
            * rng.lognormal(0.0, 0.05)
            * (rng.uniform(2, 5) if rng.random() < 0.1 else 1)
        )
        for each in windows_of(rng, truth, 250)
    ]
    found, _ = fit_windows(seen)
    assert min(astuple(found)) >= 0.0
    fresh = list(windows_of(rng, truth, 100))
    errors = predict_s(found, fresh) / predict_s(truth, fresh) - 1.0
    assert np.median(np.abs(errors)) < 0.05
    assert np.abs(errors).max() < 0.3


@pytest.mark.parametrize("truth", [SMALL, LARGE])
def test_stalls_and_jitter_of_the_host_leave_a_useful_curve(truth: DecodeCurve) -> None:
    rng = random.Random(5)
    measured, _ = learn(
        truth, 2, lambda: rng.lognormvariate(0.0, 0.08) * (4.0 if rng.random() < 0.02 else 1.0)
    )
    for shape in SHAPES:
        assert step_s(measured.declared, *shape) == pytest.approx(step_s(truth, *shape), rel=0.15)


def test_nothing_is_declared_before_there_is_evidence_and_a_batch_of_one_tells_its_own_steps() -> (
    None
):
    measured = MeasuredCurve()
    engine = Engine(SMALL, EngineWork(measured.take), 3)
    engine.run(1, 10)
    assert not measured.update()
    assert measured.declared is None
    engine.run(1, 200)
    assert measured.update()
    assert step_s(measured.declared, 1, 300) == pytest.approx(step_s(SMALL, 1, 300), rel=0.02)


@given(
    factor=st.floats(1.4, 10.0),
    up=st.booleans(),
    spread=st.floats(0.0, 0.15),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30, deadline=None)
def test_a_drift_is_declared_once_and_not_at_each_look(
    factor: float, up: bool, spread: float, seed: int
) -> None:
    """Result: as long as the engine is the same, nothing; then one new curve, or a second one that
    is nearer, and also for batches that have not run since. The time of a step varies by 15% at
    most: with 20%, and an engine that becomes 1.4 times as fast, 3 engines in 100 declare three to
    six curves."""
    factor = factor if up else 1.0 / factor
    rng = random.Random(seed)
    measured, engine = learn(SMALL, 4, lambda: rng.lognormvariate(0.0, spread))
    before = measured.declared
    engine.run(12, 100)
    assert not measured.update(), "the same engine"
    assert measured.declared is before
    engine.curve = DecodeCurve(
        0.05 * factor, 0.01 * factor, 2e-6 * factor, 500.0 / factor, 1e-7 * factor
    )
    changes = 0
    for _ in range(60):
        engine.run(6, 20)
        changes += measured.update()
    assert changes == 1 or (changes == 2 and spread > 0.05)
    for shape in SHAPES:
        assert step_s(measured.declared, *shape) == pytest.approx(
            step_s(engine.curve, *shape), rel=0.3
        )


def test_the_first_larger_batches_teach_what_a_batch_of_one_did_not() -> None:
    """Result: the steps of one sequence stay, and what more sequences take is learned, not taken
    for a slower engine."""
    measured = MeasuredCurve()
    for batch in (1, 12):
        for context in range(100, 1_000, 20):
            steps = Window(4.0, 4.0 * batch, 4.0 * batch * context, 0.0, 0.0, 1.0)
            measured.take(steps._replace(seconds=float(predict_s(SMALL, [steps])[0])))
        assert measured.update()
    assert measured.declared is not None
    learned, true = astuple(measured.declared), astuple(SMALL)
    assert learned[:3] == pytest.approx(true[:3], rel=0.05)


def test_a_change_of_a_tenth_is_not_worth_a_new_plan() -> None:
    measured, engine = learn(LARGE, seed=6)
    engine.curve = DecodeCurve(0.0132, 1.1e-4, 2.2e-8, 18_000.0, 1.1e-9)
    for _ in range(30):
        engine.run(8, 40)
        assert not measured.update()


def test_aborted_requests_and_lost_leads_leave_no_wrong_window() -> None:
    """Result: what a window holds is known, or it is dropped."""
    taken: list[Window] = []
    work = EngineWork(taken.append)
    work.begin("a", 100, 0.0)
    work.end("a")  # before its first token
    work.begin("b", 100, 50.0)
    work.begin("c", 10, 50.0)
    work.add("b", 1, 40, 51.0)
    work.add("c", 1, 0, 51.0)
    work.add("b", 1, 40, 51.5)
    assert taken.pop() == Window(2, 2, 112, 70, 60 * 70 + 50, 1.5)
    work.add("b", 2, 40, 52.5)
    work.end("b")  # the lead, with an open window
    work.add("c", 1, 0, 99.0)
    for at_s in (100.0, 101.0, 102.0):
        work.add("c", 1, 0, at_s)
    assert not taken
    work.add("c", 1, 0, 103.0)
    assert taken == [Window(4, 4, 12 + 13 + 14 + 15, 0, 0, 4.0)]
    work.end("c")
    work.end("c")


def test_long_prompts_tell_the_speed_of_prefill_where_short_ones_take_as_long_as_it_takes_to_begin() -> (
    None
):
    """A GPU that takes 50 ms to begin a request and computes 27,000 tokens a second, and the
    prompts of a probe."""

    def fit(*rounds: tuple[int, ...]) -> float:
        windows = [
            Window(4, 4 * batch, 4 * batch * 256, 0, 0, 4 * (0.0065 + 2e-5 * batch))
            for batch in (1, 16, 32)
        ]
        for contexts in rounds:
            for before, context in itertools.pairwise((0, *contexts)):
                new = context - before
                windows.append(
                    Window(5, 4, 4 * context, new, new * (context - new / 2), 0.0825 + new / 27_000)
                )
        return fit_windows(windows)[0].prefill_tokens_per_s

    short = (64, 256, 512)
    assert fit(short, short, short) < 27_000 / 5
    assert fit(short, (426, 1_706, 3_412), (1_024, 4_096, 8_192)) > 27_000 / 2


def test_prompts_that_look_as_if_only_their_pairs_of_tokens_took_time_still_cost_by_the_token() -> (
    None
):
    """A probe of an engine on a busy core: its short prompts met free moments, its long one did
    not. Result: a token of a prompt takes about what it took on average."""
    decoding = [Window(4, 4 * n, 4 * n * 256, 0, 0, 4 * (0.07 + 0.03 * n)) for n in (1, 2)]
    reading = [
        Window(5, 4, 4 * new, new, new * new / 2, 5 * 0.07 + 4 * 0.03 + 4e-6 * new * new)
        for new in (64, 256, 512)
    ]
    curve, _ = fit_windows([*decoding, *reading])
    assert 300 < curve.prefill_tokens_per_s < 5_000
