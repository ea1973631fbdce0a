"""The lower bound: what it is made of, and that it is met where nothing disturbs."""

import pytest
from support.simulated import FAST, SLOW, engine, play, trajectory
from treadle_sim.cluster import Cluster, Latencies
from treadle_sim.rollout import alone_s, longest_alone_s, lower_bound_s, work_s
from treadle_sim.workloads.workload import Workload


def test_one_trajectory_alone_takes_the_bound_and_the_latency_of_its_tickets() -> None:
    work = trajectory(0, [(500, 300, 1.5), (200, 100, 0.25), (900, 50, 2.0)])
    cluster = Cluster((engine(),))

    rollout = play([work], cluster)

    bound_s = lower_bound_s(Workload("test", (work,)), cluster.engines, 1)
    rpc_s = Latencies().rpc_s
    assert bound_s == pytest.approx(alone_s(work, engine()))
    assert rollout.outcome.makespan_s == pytest.approx(bound_s + rpc_s + len(work.steps) * rpc_s, rel=1e-9)


def test_alone_a_trajectory_prefills_each_token_once_and_reads_its_growing_context() -> None:
    work = trajectory(0, [(10, 30, 1.0), (20, 99, 2.0)], prompt_tokens=100)

    by_hand = SLOW.prefill_s(100, 0) + sum(SLOW.decode_s(1) + SLOW.per_kv_token_s * (100 + i) for i in range(1, 10))
    by_hand += 1.0 + SLOW.prefill_s(31, 109)
    by_hand += sum(SLOW.decode_s(1) + SLOW.per_kv_token_s * (140 + i) for i in range(1, 20)) + 2.0

    assert alone_s(work, engine()) == pytest.approx(by_hand)


def test_the_longest_counts_on_the_engine_that_is_fastest_for_it() -> None:
    short, long = trajectory(0, [(10, 0, 0.0)]), trajectory(1, [(900, 0, 0.0)])
    workload = Workload("test", (short, long))

    assert longest_alone_s(workload, [engine(1), engine(2)]) == alone_s(long, engine(2))
    assert lower_bound_s(workload, (engine(1), engine(2)), 1) == alone_s(long, engine(1)), "one GPU cannot run it"


def test_much_work_counts_at_the_cheapest_degree_and_batch_and_a_shared_prompt_once() -> None:
    works = tuple(trajectory(index // 4, [(100, 40, 0.0), (50, 99, 0.0)], prompt_tokens=1_000) for index in range(8))

    bound_s = work_s(Workload("test", works), [engine(1), engine(2)], 2)

    decode = min(min(gpus * curve.decode_s(n) / n for n in range(1, 65)) for gpus, curve in ((1, SLOW), (2, FAST)))
    read = min(SLOW.per_kv_token_s, 2 * FAST.per_kv_token_s)
    prefill = min(SLOW.prefill_token_s, 2 * FAST.prefill_token_s)
    kv = 8 * (99 * 1_050 + 49 * 1_165)
    assert bound_s == pytest.approx((8 * 148 * decode + kv * read + (2 * 1_000 + 8 * 40) * prefill) / 2)


def test_an_engine_whose_weights_do_not_fit_sets_no_bound() -> None:
    work = Workload("test", (trajectory(0, [(100, 0, 0.0)]),))

    assert lower_bound_s(work, (engine(1), engine(2, kv_tokens=0)), 2) == lower_bound_s(work, (engine(1),), 2)
