"""The step queue: who runs, who waits, who gives way."""

import math
from collections.abc import Mapping
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.engine_queue.preemptive_queue import (
    LONG_PREFILL_STEPS,
    MOST_HELD_S,
    Admit,
    Evict,
    Prefill,
    QueueFull,
    QueuePolicy,
    StepQueue,
)


def queue(slots: int = 1, capacity: int = 100, **options: object) -> StepQueue:
    policy = QueuePolicy(slots=slots, capacity=capacity, **{"min_run_tokens": 4, **options})  # type: ignore[arg-type]
    return StepQueue(policy)


def running(*steps: str, **options: object) -> StepQueue:
    """A queue in which steps of priority 1, 2, ... run and may be evicted."""
    q = queue(**options)  # type: ignore[arg-type]
    for number, step in enumerate(steps):
        q.add(step, 1.0 + number)
    q.decide()
    for step in steps:
        q.report_progress(step, 4)
    return q


def test_the_highest_priority_is_admitted_first_and_ties_go_by_arrival() -> None:
    q = queue(slots=2)
    for step, priority in (("a", 1.0), ("b", 2.0), ("c", 2.0), ("d", 3.0)):
        q.add(step, priority)

    assert q.decide() == [Admit("d"), Admit("b")]
    q.remove("d")
    assert q.decide() == [Admit("c")]
    assert (q.running, q.waiting) == (2, 1)


def test_a_waiting_step_that_outranks_the_lowest_running_one_evicts_it() -> None:
    q = running("low", "mid", slots=2)
    q.add("high", 9.0)

    assert q.decide() == [Evict("low", "high")]
    assert q.decide() == [], "an eviction is decided once"
    q.confirm_eviction("low")
    assert q.decide() == [Admit("high")]


def test_a_step_is_not_evicted_before_it_has_made_its_tokens_since_its_admission() -> None:
    """Two steps whose priorities leapfrog would else trade one slot without getting on. Result:
    each turn makes tokens."""
    q = queue()
    q.add("low", 1.0)
    q.decide()
    q.add("high", 9.0)
    assert not q.report_progress("low", 3)
    assert q.decide() == []
    assert q.report_progress("low", 4), "now it is worth asking again"
    assert not q.report_progress("low", 5)
    assert q.decide() == [Evict("low", "high")]
    q.confirm_eviction("low")
    assert q.decide() == [Admit("high")]
    q.reprioritize("low", 99.0)
    assert q.decide() == [], "the new one has made none yet"


def test_the_hysteresis_keeps_a_small_lead_from_evicting_and_without_preemption_no_lead_does() -> (
    None
):
    for preempt in (True, False):
        q = running("low", hysteresis=2.0, preempt=preempt)
        q.add("near", 3.0)
        assert q.decide() == []
        q.reprioritize("near", 3.1)
        assert q.decide() == ([Evict("low", "near")] if preempt else [])


def test_an_evicted_step_waits_with_its_original_arrival() -> None:
    q = running("early")
    q.add("late", 1.0)
    q.add("high", 2.0)
    q.decide()
    q.confirm_eviction("early")
    q.decide()
    q.remove("high")
    assert q.decide() == [Admit("early")]


def test_a_step_that_is_not_preemptible_is_never_evicted_and_one_that_ranks_above_it_is() -> None:
    q = queue(slots=2)
    q.add("not preemptible", 0.0, preemptible=False)
    q.add("preemptible", 1.0)
    q.decide()
    q.add("high", 5.0)
    q.add("higher", 9.0)
    assert q.decide() == [], "neither has made its tokens yet"
    for step in ("not preemptible", "preemptible"):
        q.report_progress(step, 100)
    assert q.decide() == [Evict("preemptible", "higher")]
    q.confirm_eviction("preemptible")
    assert q.decide() == [Admit("higher")]
    q.reprioritize("not preemptible", -9.0)
    assert q.decide() == []


def test_a_pause_evicts_all_and_admits_nobody_until_it_ends() -> None:
    q = queue(slots=2)
    for step in ("a", "b", "c"):
        q.add(step, 1.0, preemptible=step != "a")
    q.decide()
    q.paused = True
    assert q.decide() == [Evict("a", ""), Evict("b", "")]
    q.confirm_eviction("a")
    q.confirm_eviction("b")
    assert q.decide() == []
    q.paused = False
    assert q.decide() == [Admit("a"), Admit("b")]


def test_a_full_line_refuses_and_takes_again_once_there_is_room() -> None:
    q = queue(capacity=1)
    assert not q.reprioritize("nobody", 1.0)
    q.remove("nobody")
    q.add("runs", 1.0)
    q.decide()
    q.add("waits", 1.0)
    with pytest.raises(QueueFull):
        q.add("refused", 9.0)
    assert "refused" not in q
    q.remove("runs")
    q.decide()
    q.add("taken", 1.0)
    with pytest.raises(ValueError, match="already"):
        q.add("taken", 1.0)


Event = tuple[str, int, float]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "progress", "finish", "reprioritize", "acknowledge"]),
        st.integers(0, 9),
        st.floats(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(st.integers(1, 3), st.floats(0, 1), EVENTS)
def test_the_invariants_hold_after_any_reports(
    slots: int, hysteresis: float, events: list[Event]
) -> None:
    """Against a second account kept here: slots are never exceeded, and every eviction is one that
    the rules allow."""
    q = queue(slots=slots, hysteresis=hysteresis)
    priorities: dict[str, float] = {}
    preemptible: dict[str, bool] = {}
    holding: dict[str, int] = {}  # tokens since admission
    evicting: set[str] = set()
    for kind, number, value in events:
        step = f"s{number}"
        if kind == "add" and step not in priorities:
            priorities[step], preemptible[step] = value, value < 4.0
            q.add(step, value, preemptible=preemptible[step])
        elif kind == "progress" and step in holding:
            holding[step] += 3
            q.report_progress(step, holding[step])
        elif kind == "finish" and step in priorities:
            q.remove(step)
            del priorities[step]
            holding.pop(step, None)
            evicting.discard(step)
        elif kind == "reprioritize" and step in priorities:
            q.reprioritize(step, value)
            priorities[step] = value
        elif kind == "acknowledge" and step in evicting:
            q.confirm_eviction(step)
            evicting.discard(step)
            del holding[step]
        for action in q.decide():
            if isinstance(action, Admit):
                assert action.step_id not in holding
                holding[action.step_id] = 0
            else:
                assert len(holding) == slots, "a free slot is used first"
                victim, by = action.step_id, action.by
                assert by not in holding
                assert priorities[by] > priorities[victim] + hysteresis
                assert holding[victim] >= 4
                assert preemptible[victim]
                others = [
                    other for other in holding if other not in evicting and preemptible[other]
                ]
                assert all(priorities[victim] <= priorities[other] for other in others)
                evicting.add(victim)
        assert len(holding) <= slots
        waiting = set(priorities) - set(holding)
        assert not waiting or len(holding) == slots, "no slot is idle while somebody waits"
        assert (q.running, q.waiting) == (len(holding), len(waiting))


LONG, SHORT = LONG_PREFILL_STEPS, LONG_PREFILL_STEPS - 1.0


def reading_queue(
    prefill_steps: dict[str, float],
    slots: int = 4,
    shared: Mapping[str, str] = MappingProxyType({}),
    returning: str = "",
    **steps: float,
) -> StepQueue:
    """A queue that takes prefills of these lengths, with steps of these priorities; shared: the
    prompt of some."""
    policy = QueuePolicy(slots=slots, capacity=100, min_run_tokens=4, gather=1.0)
    q = StepQueue(
        policy,
        lambda step: Prefill(prefill_steps.get(step, 0.0), shared.get(step), step == returning),
    )
    for step, priority in steps.items():
        q.add(step, priority)
    return q


def test_one_long_prompt_is_read_at_a_time_and_short_ones_and_later_turns_pass_it() -> None:
    prefills = {"a": LONG, "b": LONG, "c": SHORT, "later": LONG}
    q = reading_queue(prefills, returning="later", a=3.0, b=2.0, c=1.0, later=0.0)
    assert q.decide(0.0) == [Admit("a"), Admit("c"), Admit("later")]
    assert q.decide(1.0) == []
    assert not q.finish_prefill("c", 1.0), "a short one is not what the others wait for"
    assert not q.finish_prefill("later", 1.0), "nor is a later turn"
    q.remove("later")
    assert q.finish_prefill("a", 2.0)
    q.reprioritize("a", 0.0)
    q.reprioritize("c", 0.0)
    assert q.decide(2.0) == [Admit("b")], "nothing that decodes ranks higher"


def test_after_a_long_prefill_higher_steps_decode_for_as_long_before_the_next() -> None:
    q = reading_queue({"a": LONG, "b": LONG}, a=2.0, b=1.0)
    assert q.decide(10.0) == [Admit("a")]
    assert q.finish_prefill("a", 13.0)
    assert q.decide(13.0) == q.decide(15.9) == []
    assert q.wake_s == 16.0
    q.add("urgent", 9.0)
    assert q.decide(15.9) == [Admit("urgent")], "what is read already does not rest"
    assert q.decide(16.0) == [Admit("b")]


def test_a_long_prefill_does_not_rest_where_nothing_decodes() -> None:
    q = reading_queue({"a": LONG, "b": LONG}, a=2.0, b=1.0)
    q.decide(0.0)
    q.finish_prefill("a", 5.0)
    q.remove("a")
    assert q.decide(5.0) == [Admit("b")]


@pytest.mark.parametrize("end", ["remove", "evict"])
def test_a_long_prefill_that_is_stopped_lets_the_next_one_run(end: str) -> None:
    q = reading_queue({"a": LONG, "b": LONG}, a=2.0, b=1.0)
    q.decide(0.0)
    if end == "remove":
        q.remove("a")
    else:
        q.paused = True
        assert q.decide(1.0) == [Evict("a", "")]
        q.confirm_eviction("a")
        q.remove("a")
        q.paused = False
    assert q.decide(1.0) == [Admit("b")]


def test_a_step_that_waits_for_a_prefill_evicts_nobody() -> None:
    q = reading_queue({"a": LONG, "b": LONG}, slots=2, a=5.0, low=1.0)
    assert q.decide(0.0) == [Admit("a"), Admit("low")]
    q.report_progress("low", 4)
    q.add("b", 9.0)
    assert q.decide(1.0) == []
    q.finish_prefill("a", 2.0)
    assert q.decide(2.0) == [Evict("low", "b")], "it ranks above what decodes"


def test_steps_that_are_not_preemptible_are_not_paced() -> None:
    """A framework's own policy: an engine takes its steps as they come."""
    q = reading_queue({"a": LONG, "b": LONG})
    for step in ("a", "b"):
        q.add(step, 1.0, preemptible=False)
    assert q.decide(0.0) == [Admit("a"), Admit("b")]


def test_the_first_sample_reads_the_prompt_and_the_others_wait_until_it_is_read() -> None:
    shared = {"a1": "prompt a", "a2": "prompt a", "a3": "prompt a", "b1": "prompt b"}
    q = reading_queue({}, shared=shared, a1=4.0, a2=3.0, a3=2.0, b1=1.0)
    assert q.decide() == [Admit("a1"), Admit("b1")]
    assert q.finish_prefill("b1", 1.0), "other samples of it may wait"
    assert q.decide(1.0) == []
    assert q.finish_prefill("a1", 2.0)
    del shared["a2"], shared["a3"]
    assert q.decide(2.0) == [Admit("a2"), Admit("a3")]
    assert not q.finish_prefill("a2", 3.0), "nobody can have waited for what only it read"


@pytest.mark.parametrize("end", ["remove", "evict"])
def test_where_the_sample_that_reads_is_stopped_the_next_one_reads(end: str) -> None:
    q = reading_queue({}, shared=dict.fromkeys("abc", "prompt"), a=3.0, b=2.0, c=1.0)
    assert q.decide() == [Admit("a")]
    if end == "remove":
        q.remove("a")
    else:
        q.paused = True
        q.decide()
        q.confirm_eviction("a")
        q.paused = False
        q.reprioritize("a", 0.0)
    assert q.decide() == [Admit("b")]


def test_a_sample_that_waits_for_its_prompt_evicts_nobody() -> None:
    q = reading_queue({}, slots=2, shared={"a": "prompt", "b": "prompt"}, a=9.0, low=1.0)
    assert q.decide() == [Admit("a"), Admit("low")]
    q.report_progress("low", 4)
    q.add("b", 9.0)
    assert q.decide() == []
    q.finish_prefill("a", 1.0)
    assert q.decide(1.0) == [Evict("low", "b")]


def test_samples_that_are_not_preemptible_read_their_prompt_together() -> None:
    q = reading_queue({}, shared={"a": "prompt", "b": "prompt"})
    for step in ("a", "b"):
        q.add(step, 1.0, preemptible=False)
    assert q.decide() == [Admit("a"), Admit("b")]


def gathering_queue(*running: str, slots: int = 4, pass_s: float = 0.5) -> StepQueue:
    """A queue whose running steps were read in one pass of so many seconds, which ended at
    `pass_s`."""
    q = reading_queue({}, slots=slots)
    for step in running:
        q.add(step, 1.0)
    assert q.decide(0.0) == [Admit(step) for step in running]
    for step in running:
        q.finish_prefill(step, pass_s)
    return q


def test_a_step_beside_running_ones_waits_until_its_slot_has_lost_what_a_pass_takes_from_them() -> (
    None
):
    q = gathering_queue("a", "b", "c", slots=5, pass_s=0.25)
    q.add("d", 9.0)
    assert q.decide(1.0) == []
    assert q.wake_s == 1.75, "three steps lose 0.25 s each"
    q.add("e", 1.0)
    assert q.decide(1.25) == []
    assert q.wake_s == 1.5, "two free slots lose twice as much"
    assert q.decide(1.5) == [Admit("d"), Admit("e")]
    assert q.wake_s == math.inf


def test_nobody_waits_for_others_where_nothing_runs_or_no_slot_is_free() -> None:
    q = gathering_queue("a", slots=1)
    q.add("b", 1.0)
    assert q.decide(1.0) == []
    assert q.wake_s == math.inf
    q.remove("a")
    assert q.decide(9.0) == [Admit("b")]


def test_a_step_is_held_for_others_for_a_second_at_most() -> None:
    """A first pass that took a minute, since the engine had no room or was cold, holds nobody for
    long."""
    q = gathering_queue("a", "b", pass_s=60.0)
    q.add("c", 1.0)
    assert q.decide(100.0) == []
    assert q.wake_s == 100.0 + MOST_HELD_S
    assert q.decide(100.0 + MOST_HELD_S) == [Admit("c")]


def test_a_step_is_held_as_long_whoever_was_held_before_it_and_left() -> None:
    q = gathering_queue("a", "b", pass_s=60.0)
    q.add("leaves", 1.0)
    assert q.decide(100.0) == []
    q.remove("leaves")
    assert q.decide(100.0) == []
    q.add("c", 1.0)
    assert q.decide(105.0) == []
    assert q.wake_s == 105.0 + MOST_HELD_S


def test_a_pass_that_was_slow_is_forgotten_with_the_next_that_is_not() -> None:
    q = gathering_queue("a", "b", pass_s=60.0)
    q.add("c", 1.0)
    q.decide(100.0)
    q.decide(101.0)
    q.finish_prefill("c", 101.25)
    q.add("d", 1.0)
    q.decide(110.0)
    assert q.wake_s == pytest.approx(110.0 + 3 * 0.25)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.floats(-5, 5), st.booleans(), st.booleans(), st.sampled_from([None, 1, 2])),
        max_size=40,
    ),
    st.randoms(),
)
def test_every_step_is_admitted_in_the_end_whatever_is_long_or_shared(
    steps: list[tuple[float, bool, bool, int | None]], random: Random
) -> None:
    prefills = [Prefill(LONG if is_long else 0.0, first) for _, is_long, _, first in steps]
    q = StepQueue(QueuePolicy(slots=3, capacity=100), lambda step: prefills[int(step)])
    for number, (priority, _, preemptible, _) in enumerate(steps):
        q.add(str(number), priority, preemptible=preemptible)
    running: list[str] = []
    now, ended = 0.0, 0
    while ended < len(steps):
        actions = q.decide(now)
        running += [action.step_id for action in actions if isinstance(action, Admit)]
        assert len(running) <= 3
        if not running:
            assert now < q.wake_s < math.inf, "else nothing would ever wake it"
            now = q.wake_s
            continue
        now += random.uniform(0.1, 2.0)
        step = running.pop(random.randrange(len(running)))
        q.finish_prefill(step, now)
        q.remove(step)
        ended += 1


def two_jobs(slots: int, weight: float = 3.0, steps: int = 20) -> StepQueue:
    """Jobs a (of this weight) and b (of 1), each with so many steps that wait; those of a rank
    higher."""
    q = queue(slots=slots)
    for number in range(steps):
        q.add(f"a{number}", 100.0 + number, job="a", weight=weight)
        q.add(f"b{number}", float(number), job="b")
    return q


def jobs_of(actions: list[Admit | Evict]) -> list[str]:
    return [action.step_id[0] for action in actions]


def test_free_slots_go_to_jobs_by_weight_and_within_a_job_by_priority() -> None:
    admitted = two_jobs(slots=8).decide()
    assert sorted(jobs_of(admitted)) == ["a"] * 6 + ["b"] * 2
    assert [action.step_id for action in admitted if action.step_id[0] == "b"] == ["b19", "b18"]


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("seconds", [0.3, 7.0], ids=["short steps", "long steps"])
def test_two_loaded_jobs_get_slots_in_the_proportion_of_their_weights_over_time(
    slots: int, seconds: float
) -> None:
    """Each admitted step runs for its time, or until it is evicted; others take its place."""
    rng, q = Random(1), two_jobs(slots)
    ends: dict[str, float] = {}
    began: dict[str, float] = {}
    got, now, count = {"a": 0.0, "b": 0.0}, 0.0, 100
    while now < 400.0:
        for action in q.decide(now):
            step = action.step_id
            if isinstance(action, Admit):
                began[step], ends[step] = now, now + seconds * rng.uniform(0.5, 1.5)
                q.report_progress(step, 4)
            else:
                got[step[0]] += now - began.pop(step)
                del ends[step]
                q.confirm_eviction(step)
        over = min(ends, key=ends.__getitem__, default="")
        if q.running < slots:
            continue
        if q.wake_s < ends[over]:
            now = q.wake_s
            continue
        now = ends.pop(over)
        got[over[0]] += now - began.pop(over)
        q.remove(over)
        count += 1
        q.add(
            f"{over[0]}{count}",
            rng.gauss(0.0, 50.0),
            job=over[0],
            weight=3.0 if over[0] == "a" else 1.0,
        )
    assert got["a"] / got["b"] == pytest.approx(3.0, rel=0.1)


def test_a_job_alone_gets_all_slots_and_gives_back_what_another_one_is_due() -> None:
    """Result: first nothing happens, as two jobs must not change places all the time; then one slot
    after another."""
    q = queue(slots=4)
    for number in range(8):
        q.add(f"a{number}", 100.0, job="a", weight=3.0)
    assert jobs_of(q.decide(0.0)) == ["a"] * 4
    for number in range(4):
        q.report_progress(f"a{number}", 4)
    q.add("b0", 0.0, job="b")
    q.add("b1", 0.0, job="b")
    assert q.decide(3600.0) == []
    at_s = q.wake_s
    assert 3600.0 < at_s < 3603.0
    assert q.decide(at_s) == [Evict("a3", "b0")]
    q.confirm_eviction("a3")
    assert q.decide(at_s) == [Admit("b0")]
    assert q.decide(at_s + 100.0) == [], (
        "b has its slot of four, and what it missed before it came is not given to it"
    )


def test_priorities_are_not_compared_across_jobs() -> None:
    q = queue(slots=2)
    q.add("a0", 1.0, job="a")
    q.add("b0", 1.0, job="b")
    assert len(q.decide()) == 2
    for step in ("a0", "b0"):
        q.report_progress(step, 4)
    q.add("a1", 1000.0, job="a")
    assert q.decide() == [Evict("a0", "a1")]


def test_a_step_that_is_not_preemptible_keeps_its_slot_from_other_jobs() -> None:
    q = queue(slots=1)
    q.add("a0", 1.0, job="a", preemptible=False)
    q.decide(0.0)
    q.report_progress("a0", 100)
    q.add("b0", 1.0, job="b")
    assert q.decide(0.0) == q.decide(1000.0) == []
    q.remove("a0")
    assert q.decide(1000.0) == [Admit("b0")]


def test_a_job_of_one_step_at_a_time_pays_for_what_it_got_above_its_share() -> None:
    """Between two steps it is not here. Result: it runs a quarter of the time and not half of
    it."""
    q, got, now = queue(slots=1, preempt=False), {"a": 0, "b": 0}, 0.0
    for number in range(100):
        q.add(f"a{number}", 0.0, job="a", weight=3.0)
    q.add("b", 9.0, job="b")
    for _ in range(80):
        (admitted,) = q.decide(now)
        got[admitted.step_id[0]] += 1
        now += 1.0
        q.remove(admitted.step_id)
        if admitted.step_id == "b":
            q.add("b", 9.0, job="b")
    assert got["b"] == pytest.approx(20, abs=1)
