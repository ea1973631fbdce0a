"""Engines that verify drafts: against a reference that goes decode step by decode step, and when
they do not draft.

`by_steps` is written from docs/simulator.md: it adds each sequence's accepted length in each decode
step.
"""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import SLOW, LoneEngine, engine, engine_step, play, trajectory
from treadle_sim.batch import EngineStep
from treadle_sim.cluster import Cluster, Failure
from treadle_sim.engine_model import Speculation
from treadle_sim.systems import SYSTEMS

DRAFTS = Speculation((3, 7), ((1.5, 2.0, 2.25), (1.6, 2.4, 3.1)))
# a verification costs what a step costs
FLAT = replace(SLOW, batch_sizes=(1.0, 64.0), step_s=(0.010, 0.010))

arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 400), st.integers(1, 300), st.floats(0.0, 2.0)),
    min_size=1,
    max_size=8,
)


@dataclass
class Going:
    """A sequence that decodes, with its tokens so far."""

    step: EngineStep
    tokens: float = 1.0


def choose(decoding: list[Going], ended: Counter[str]) -> tuple[int, list[float]]:
    """The draft that gives most tokens a second, and what each sequence samples."""
    read_s = SLOW.per_kv_token_s * sum(one.step.context_tokens + one.tokens for one in decoding)
    best, best_rate = (
        (0, [1.0] * len(decoding)),
        len(decoding) / (SLOW.decode_s(len(decoding)) + read_s),
    )
    for drafts in DRAFTS.draft_tokens:
        each = [DRAFTS.accepted(drafts, ended[one.step.prompt_id]) for one in decoding]
        rate = sum(each) / (SLOW.decode_s(len(decoding) * (drafts + 1)) + read_s)
        if rate > best_rate:
            best, best_rate = (drafts, each), rate
    return best


def by_steps(steps: list[tuple[float, EngineStep]], ended: Counter[str]) -> dict[str, float]:
    """When each step ends that arrives at its time. Drafts change only when sequences come or
    go."""
    coming, waiting = sorted(steps, key=lambda pair: pair[0]), list[EngineStep]()
    decoding, finished, now = list[Going](), dict[str, float](), 0.0
    drafts, paces, changed = 0, list[float](), True
    while coming or waiting or decoding:
        while coming and coming[0][0] <= now:
            waiting.append(coming.pop(0)[1])
        if waiting:
            computed_s = sum(SLOW.prefill_computed_s(step.context_tokens, 0) for step in waiting)
            kv_tokens = sum(step.context_tokens for step in waiting)
            now += SLOW.prefill_batch_s(computed_s, len(waiting), kv_tokens)
            decoding += [Going(step) for step in waiting]
            waiting, changed = [], True
        elif decoding:
            if changed:
                drafts, paces = choose(decoding, ended)
            kv = sum(one.step.context_tokens + one.tokens for one in decoding)
            now += SLOW.decode_s(len(decoding) * (drafts + 1)) + SLOW.per_kv_token_s * kv
            for one, pace in zip(decoding, paces, strict=True):
                one.tokens += pace
            changed = False
        else:
            now = coming[0][0]
            waiting.append(coming.pop(0)[1])  # of several that come at once the first begins alone
            continue
        for one in [one for one in decoding if one.tokens >= one.step.gen_tokens - 1e-6]:
            finished[one.step.step_id] = now
            decoding.remove(one)
            changed = True
    return finished


@settings(max_examples=120)
@given(arrivals, st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_a_speculating_engine_ends_its_steps_when_they_do_step_by_step(
    rows: list[tuple[int, int, int, float]], siblings: list[int]
) -> None:
    ended = Counter({f"p{prompt}": count for prompt, count in enumerate(siblings)})
    steps = []
    for number, (prompt, context, gen, at_s) in enumerate(rows):
        step = engine_step(f"s{number}", context, gen, index=number)
        steps.append((at_s + 1e-4 * number, replace(step, prompt_id=f"p{prompt}", prompt_tokens=0)))
    lone = LoneEngine(speculation=DRAFTS, finished=ended)

    lone.run(*((at_s, step, 0.0) for at_s, step in steps))

    exact = by_steps(steps, ended)
    assert lone.finished == {name: pytest.approx(at_s, rel=1e-6) for name, at_s in exact.items()}


def test_a_sample_that_ends_elsewhere_lengthens_drafts_from_the_next_decode_step_on() -> None:
    ended: Counter[str] = Counter()
    lone = LoneEngine(speculation=Speculation((3,), ((1.0, 4.0),)), finished=ended, curve=FLAT)

    def end_sample() -> None:
        ended["p0"] += 1
        lone.engine.note_finished("p0")

    lone.timeline.at(1.0, end_sample)
    lone.run((0.0, engine_step("s", 10, 401), 0.0))

    plain = LoneEngine(curve=FLAT)
    plain.run((0.0, engine_step("s", 10, 401), 0.0))
    assert lone.finished["s"] == pytest.approx(1.0 + (plain.finished["s"] - 1.0) / 4.0, abs=0.02)


def test_an_engine_drafts_only_where_that_gives_more_tokens_a_second() -> None:
    useless = Speculation((3,), ((1.01,),))
    many = [(0.0, engine_step(f"s{number}", 50, 100, index=number), 0.0) for number in range(40)]
    for speculation in (useless, None):
        lone = LoneEngine(speculation=speculation)
        lone.run(*((at_s, replace(step), priority) for at_s, step, priority in many))
        ends = lone.finished
        if speculation is useless:
            drafted = ends
    assert drafted == {name: pytest.approx(at_s, rel=1e-9) for name, at_s in ends.items()}


def test_more_finished_siblings_than_were_measured_count_as_many_as_were() -> None:
    assert DRAFTS.accepted(7, 2) == DRAFTS.accepted(7, 15) == 3.1
    assert DRAFTS.accepted(0, 15) == 1.0


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.tuples(st.integers(1, 1_500), st.just(40), st.just(0.5)), min_size=1),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(sorted(SYSTEMS)),
    st.floats(0.0, 10.0),
)
def test_a_speculating_rollout_samples_every_token_though_an_engine_is_lost(
    rows: list[tuple[int, list[tuple[int, int, float]]]], system: str, fails_s: float
) -> None:
    works = [trajectory(prompt, steps[:4]) for prompt, steps in rows]
    model = replace(engine(slots=2), speculation=DRAFTS)
    cluster = Cluster((model, model), failures=(Failure(0, fails_s, fails_s + 5.0),))

    outcome = play(works, cluster, system).outcome

    assert [times.gen_tokens for times in outcome.times] == [work.gen_tokens for work in works]


def test_a_speculating_rollout_is_sooner_over_and_later_samples_gain_more() -> None:
    works = [trajectory(0, [(200, 10, 0.1)]), trajectory(0, [(900, 10, 0.1)])]
    plain, drafting = (
        play(works, Cluster((replace(engine(), speculation=each),))).outcome.times
        for each in (None, DRAFTS)
    )
    gain = [one.finished_s / other.finished_s for one, other in zip(plain, drafting, strict=True)]
    assert 1.0 < gain[0] < gain[1]
