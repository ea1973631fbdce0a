"""Whole rollouts: nothing is lost or counted twice, every second is accounted for, and none beats
the lower bound.

`by_tokens` is a second simulator, written from docs/simulator.md, that goes token by token: it and
the fluid one agree. It knows trajectories that are pinned to engines in turn, FCFS queues, slots,
prefill before decode, cached contexts and tools; no KV limit, no plans.
"""

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import FAST, SLOW, Rollout, decode_s, engine, play, trajectory
from treadle_core.actions import IssueTicket
from treadle_core.events import StepFinished, StepRequested, TrajectoryClosed
from treadle_core.model import Outcome as Ending
from treadle_core.tuning import Tuning
from treadle_sim.cluster import Cluster, Failure, Latencies, WeightUpdate
from treadle_sim.driver import Driver
from treadle_sim.engine import MOST_PREFILL_TOKENS
from treadle_sim.lower_bound import alone_s, longest_alone_s, lower_bound_s, work_s
from treadle_sim.predictors import make_predictor
from treadle_sim.systems import SYSTEMS
from treadle_sim.workloads.workload import TrajectoryWork, Workload

# A token of slack a step: fluids and whole tokens part by less.
NEAR_S = 1e-6
RPC_S = Latencies().rpc_s
SLOTS = 3
PAGE_TOKENS = 16

Works = list[TrajectoryWork]

steps = st.lists(
    st.tuples(st.integers(1, 2_500), st.integers(0, 400), st.floats(0.0, 3.0)),
    min_size=1,
    max_size=4,
)
works = st.lists(st.tuples(st.integers(0, 3), steps), min_size=1, max_size=10).map(
    lambda rows: [
        trajectory(prompt, each, prompt_tokens=100 + 50 * prompt) for prompt, each in rows
    ]
)
# Slots and KV are scarce in some: the longest trajectory grows to 11,850 tokens.
clusters = st.lists(
    st.tuples(
        st.sampled_from([1, 2]),
        st.sampled_from([1, 2, 64]),
        st.sampled_from([12_000, 40_000, 1_000_000]),
    ),
    min_size=1,
    max_size=3,
).map(lambda rows: Cluster(tuple(engine(*row) for row in rows)))
systems = st.sampled_from(sorted(SYSTEMS))


@settings(max_examples=60)
@given(works, clusters, systems)
def test_every_trajectory_ends_with_all_its_tokens_every_second_is_accounted_for_and_the_bound_holds(
    batch: Works, cluster: Cluster, system: str
) -> None:
    rollout = play(batch, cluster, system, record=True)

    check_counts(batch, system, rollout)
    check_times(batch, rollout)
    check_spans(rollout)
    bound_s = lower_bound_s(
        Workload("test", tuple(batch)), tuple(set(cluster.engines)), cluster.gpus
    )
    assert rollout.outcome.makespan_s >= bound_s * (1.0 - 1e-9)


@settings(max_examples=15)
@given(works, clusters, systems)
def test_the_same_rollout_comes_out_the_same(batch: Works, cluster: Cluster, system: str) -> None:
    first, second = (play(batch, cluster, system, record=True, seed=3) for _ in range(2))

    assert first.outcome == second.outcome
    assert repr(first.heard) == repr(second.heard)  # a plan is an array


@settings(max_examples=30)
@given(works, systems, st.floats(0.0, 20.0), st.floats(0.1, 40.0), st.floats(0.0, 20.0))
def test_an_engine_that_dies_and_weights_that_change_lose_no_token_and_no_trajectory(
    batch: Works, system: str, dies_s: float, away_s: float, updated_s: float
) -> None:
    cluster = Cluster(
        (engine(slots=2), engine(slots=2), engine(2, slots=2)),
        failures=(Failure(0, dies_s, dies_s + away_s),),
        weight_updates=(WeightUpdate(updated_s, 1.0),),
    )

    rollout = play(batch, cluster, system)

    check_counts(batch, system, rollout)
    for times in rollout.outcome.times:
        assert (
            times.queue_s + times.prefill_s + times.decode_s + times.tool_s
            <= times.finished_s + NEAR_S
        )


def calls(work: TrajectoryWork, call_tokens: int) -> int:
    """Generations of a trajectory: one a turn, or a chunk of a long one."""
    return sum(-(-step.gen_tokens // call_tokens) if call_tokens else 1 for step in work.steps)


def check_counts(batch: Works, system: str, rollout: Rollout) -> None:
    """Once each: trajectories, calls, tokens."""
    assert [times.gen_tokens for times in rollout.outcome.times] == [
        work.gen_tokens for work in batch
    ]
    closed = [event.trajectory_id for _, event in rollout.events(TrajectoryClosed)]
    assert sorted(closed) == sorted(f"t{index}" for index in range(len(batch)))
    finished = [(event.trajectory_id, event.turn) for _, event in rollout.events(StepFinished)]
    call_tokens = SYSTEMS[system].call_tokens
    assert sorted(finished) == sorted(
        (f"t{index}", call)
        for index, work in enumerate(batch)
        for call in range(calls(work, call_tokens))
    )
    told = [0] * len(batch)
    for _, event in rollout.events(StepFinished):
        told[int(event.trajectory_id[1:])] += event.output_tokens
    assert told == [work.gen_tokens for work in batch]


def check_times(batch: Works, rollout: Rollout) -> None:
    """From the start to its end a trajectory waits for its first request, for tickets, at engines,
    or for tools."""
    waited = [0.0] * len(batch)
    for now_s, event in rollout.events(StepRequested):
        waited[int(event.trajectory_id[1:])] += now_s if event.turn == 0 else 0.0
    for _, action in rollout.actions(IssueTicket):
        waited[int(action.ticket.trajectory_id[1:])] += RPC_S
    for _, finished in rollout.events(StepFinished):
        waited[int(finished.trajectory_id[1:])] += (
            RPC_S  # before the next chunk of a turn; not after its last
        )
    for work, times, waited_s in zip(batch, rollout.outcome.times, waited, strict=True):
        parts = times.queue_s, times.prefill_s, times.decode_s, times.tool_s, times.move_s
        assert min(parts) >= 0.0
        assert sum(parts) + waited_s - len(work.steps) * RPC_S == pytest.approx(
            times.finished_s, abs=NEAR_S
        )


def check_spans(rollout: Rollout) -> None:
    """What is drawn is what is booked; an engine does one thing at a time."""
    outcome = rollout.outcome
    for times in outcome.times:
        booked = {
            "queue": times.queue_s,
            "prefill": times.prefill_s,
            "decode": times.decode_s,
            "tool": times.tool_s,
        }
        booked["move"] = times.move_s
        for what, seconds in booked.items():
            drawn = sum(span.end_s - span.start_s for span in times.spans if span.what == what)
            assert drawn == pytest.approx(seconds, abs=NEAR_S), what
        spans = sorted(times.spans, key=lambda span: (span.start_s, span.end_s))
        assert all(one.end_s <= two.start_s + NEAR_S for one, two in pairwise(spans))
    for busy_s, drawn_spans in zip(outcome.engine_busy_s, outcome.engine_spans, strict=True):
        assert sum(end_s - start_s for start_s, end_s, _ in drawn_spans) == pytest.approx(
            busy_s, abs=NEAR_S
        )
        assert all(one[1] <= two[0] + NEAR_S for one, two in pairwise(sorted(drawn_spans)))
        assert busy_s <= outcome.makespan_s + NEAR_S


def test_a_group_ends_with_the_first_samples_that_it_keeps_and_the_needed_ones_go_first() -> None:
    """Two slots. Each of four prompts has a sample of 2,000 tokens and two of 100, of which two are
    kept, and the controller is told all lengths.

    Result: all long ones are ended. Longest first would run them first, and does where it does not
    know what groups need.
    """
    works = tuple(
        replace(trajectory(prompt, [(tokens, 10, 0.0)]), sample=sample)
        for prompt in range(4)
        for sample, tokens in enumerate((2_000, 100, 100))
    )
    makespans_s = []
    for tuning in (Tuning(), Tuning(surplus_doublings=0.0, surplus_step_doublings=0.0)):
        batch = Workload("test", works, group_keep=2)
        policy, told = SYSTEMS["treadle"].policy, make_predictor("oracle", batch, 0)
        driver = Driver(batch, Cluster((engine(slots=2),)), policy, tuning, told)
        makespans_s.append(driver.run().makespan_s)
        ended = [driver.controller.trajectory(f"t{number}") for number in range(len(works))]
        assert sum(record.outcome is Ending.FINISHED for record in ended) == 8
    assert makespans_s[0] < 0.5 * makespans_s[1]


def test_one_trajectory_alone_takes_the_bound_and_the_latency_of_its_tickets() -> None:
    work = trajectory(0, [(500, 300, 1.5), (200, 100, 0.25), (900, 50, 2.0)])
    cluster = Cluster((engine(),))

    rollout = play([work], cluster)

    bound_s = lower_bound_s(Workload("test", (work,)), cluster.engines, 1)
    assert bound_s == pytest.approx(alone_s(work, engine()))
    assert rollout.outcome.makespan_s == pytest.approx(
        bound_s + RPC_S + len(work.steps) * RPC_S, rel=1e-9
    )


def test_alone_a_trajectory_prefills_each_token_once_and_reads_its_growing_context() -> None:
    work = trajectory(0, [(10, 30, 1.0), (20, 99, 2.0)], prompt_tokens=100)

    by_hand = (
        SLOW.prefill_s(100, 0)
        + decode_s(100, 10)
        + 1.0
        + SLOW.prefill_s(31, 109)
        + decode_s(140, 20)
        + 2.0
    )
    assert alone_s(work, engine()) == pytest.approx(by_hand)


def test_the_longest_counts_on_the_engine_that_is_fastest_for_it() -> None:
    short, long = trajectory(0, [(10, 0, 0.0)]), trajectory(1, [(900, 0, 0.0)])
    workload = Workload("test", (short, long))

    assert longest_alone_s(workload, [engine(1), engine(2)]) == alone_s(long, engine(2))
    assert lower_bound_s(workload, (engine(1), engine(2)), 1) == alone_s(long, engine(1)), (
        "one GPU cannot run it"
    )
    weights_do_not_fit = engine(2, kv_tokens=0)
    assert lower_bound_s(workload, (engine(1), weights_do_not_fit), 2) == lower_bound_s(
        workload, (engine(1),), 2
    )


def test_much_work_counts_at_the_cheapest_degree_and_batch_and_a_shared_prompt_once() -> None:
    works = tuple(
        trajectory(index // 4, [(100, 40, 0.0), (50, 99, 0.0)], prompt_tokens=1_000)
        for index in range(8)
    )

    bound_s = work_s(Workload("test", works), [engine(1), engine(2)], 2)

    decode = min(
        min(gpus * curve.decode_s(n) / n for n in range(1, 65))
        for gpus, curve in ((1, SLOW), (2, FAST))
    )
    read = min(SLOW.per_kv_token_s, 2 * FAST.per_kv_token_s)
    prefill = min(SLOW.prefill_token_s, 2 * FAST.prefill_token_s)
    pair = min(SLOW.prefill_pair_s, 2 * FAST.prefill_pair_s)
    kv = 8 * (99 * 1_050 + 49 * 1_165)
    pairs = 2 * 0.5 * 1_000**2 + 8 * 40 * (1_100 + 0.5 * 40)
    new = (2 * 1_000 + 8 * 40) * prefill + pairs * pair
    assert bound_s == pytest.approx((8 * 148 * decode + kv * read + new) / 2)


def test_what_has_to_end_soon_cannot_decode_in_full_batches() -> None:
    """Seventeen trajectories of 4,000 tokens on an engine of 64 slots: 42 s for one alone, 62 s for
    the work of all in full batches. They decode at once, in batches of 17, and no schedule ends
    them much sooner."""
    works = tuple(trajectory(index, [(4_000, 0, 0.0)]) for index in range(17))
    workload = Workload("test", works)

    bound_s = lower_bound_s(workload, [engine()], 1)
    ended_s = play(list(works), Cluster((engine(),))).outcome.makespan_s

    assert bound_s > 1.3 * max(
        longest_alone_s(workload, [engine()]), work_s(workload, [engine()], 1)
    )
    assert 0.9 * ended_s < bound_s <= ended_s


def test_samples_share_their_prompts_kv_also_in_the_bound() -> None:
    """Sixteen samples of a prompt of 40,000 tokens run together where KV has room for 60,000."""
    works = [trajectory(0, [(1_000, 0, 0.0)], prompt_tokens=40_000) for _ in range(16)]
    small = engine(kv_tokens=60_000)

    ended_s = play(works, Cluster((small,))).outcome.makespan_s

    assert lower_bound_s(Workload("test", tuple(works)), [small], 1) <= ended_s


def test_where_kv_limits_the_batch_the_bound_is_that_much_higher() -> None:
    """Contexts of 10,000 tokens after a tool: one engine holds four of them, the other all."""
    works = tuple(trajectory(index, [(1, 10_000, 0.0), (1_000, 0, 0.0)]) for index in range(16))
    workload = Workload("test", works)

    small_s, large_s = (
        lower_bound_s(workload, [engine(kv_tokens=kv)], 1) for kv in (44_000, 1_000_000)
    )

    reads_s = 16 * 999 * SLOW.per_kv_token_s * 10_700
    assert small_s - reads_s > 2.0 * (large_s - reads_s)


@dataclass
class Going:
    """A trajectory: its next step, the context before it, how much of that is cached, tokens of the
    step sampled."""

    work: TrajectoryWork
    turn: int = 0
    context: int = 0
    cached: int = 0
    done: int = 0


def by_tokens(works: list[TrajectoryWork], slots: int) -> list[float]:
    """When each of one engine's trajectories ends."""
    going = [Going(work, context=work.prompt_tokens) for work in works]
    arrivals = [(2 * RPC_S, index) for index in range(len(works))]
    waiting: list[int] = []
    running: list[int] = []
    ended = [0.0] * len(works)
    now = 0.0
    while arrivals or waiting or running:
        while arrivals and arrivals[0][0] < now:
            waiting.append(heapq.heappop(arrivals)[1])
        if waiting and len(running) < slots:
            sampling: list[int] = []
            now += prefill_s(going, waiting, sampling, slots - len(running))
            running += sampling
        elif running:
            kv = sum(going[index].context + going[index].done for index in running)
            now += SLOW.decode_s(len(running)) + SLOW.per_kv_token_s * kv
            sampling = list(running)
        else:
            # of those that come at once the first begins alone
            now, first = heapq.heappop(arrivals)
            waiting.append(first)
            continue
        for index in sampling:
            one = going[index]
            one.done += 1
            step = one.work.steps[one.turn]
            if one.done == step.gen_tokens:
                running.remove(index)
                total = one.context + step.gen_tokens
                one.cached = (total - 1) // PAGE_TOKENS * PAGE_TOKENS
                one.context, one.done, one.turn = total + step.obs_tokens, 0, one.turn + 1
                if one.turn == len(one.work.steps):
                    ended[index] = now + step.tool_s
                else:
                    heapq.heappush(arrivals, (now + step.tool_s + RPC_S, index))
    return ended


def prefill_s(going: list[Going], waiting: list[int], running: list[int], slots: int) -> float:
    """Moves as many as there are slots from the line into the batch; the seconds of their prefill,
    which is one."""
    seconds, tokens, kv, count = SLOW.prefill_fixed_s, 0, 0, 0
    while waiting and count < slots and tokens < MOST_PREFILL_TOKENS:
        one = going[waiting[0]]
        new = max(1, one.context - one.cached)
        seconds += SLOW.prefill_token_s * new + SLOW.prefill_pair_s * new * (one.cached + new / 2)
        tokens, kv, count = tokens + new, kv + one.context, count + 1
        running.append(waiting.pop(0))
    return max(seconds, SLOW.decode_s(count) + SLOW.per_kv_token_s * kv)


@pytest.mark.parametrize("seed", range(6))
def test_pinned_trajectories_on_engines_with_few_slots_end_when_they_do_token_by_token(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    works = []
    for index in range(14):
        gen_tokens, obs_tokens = rng.integers(1, 900, 4).tolist(), rng.integers(0, 600, 4).tolist()
        each = list(zip(gen_tokens, obs_tokens, rng.uniform(0.0, 4.0, 4).tolist(), strict=True))
        works.append(
            trajectory(
                index, each[: rng.integers(1, 5)], prompt_tokens=int(rng.integers(50, 6_000))
            )
        )
    one = replace(engine(slots=SLOTS), page_tokens=PAGE_TOKENS)

    outcome = play(works, Cluster((one, one)), "verl").outcome

    exact = np.zeros(len(works))
    for first in (0, 1):  # verl deals trajectories out in turn
        exact[first::2] = by_tokens(works[first::2], SLOTS)
    fluid = np.array([times.finished_s for times in outcome.times])
    assert fluid == pytest.approx(exact, rel=1e-9)
