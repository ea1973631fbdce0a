"""A second simulator, written from docs/simulator.md, that goes token by token: it and the fluid one agree.

It knows trajectories that are pinned to engines in turn, FCFS queues, slots, prefill before decode, cached contexts and
tools; no KV limit, no plans.
"""

import heapq
from dataclasses import dataclass, replace

import numpy as np
import pytest
from support.simulated import SLOW, engine, play, trajectory
from treadle_sim.cluster import Cluster, Latencies
from treadle_sim.engine import MOST_PREFILL_TOKENS
from treadle_sim.workloads.workload import TrajectoryWork

RPC_S = Latencies().rpc_s
SLOTS = 3
PAGE_TOKENS = 16


@dataclass
class Going:
    """A trajectory: its next step, the context before it, how much of that is cached, tokens of the step sampled."""

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
            now, first = heapq.heappop(arrivals)  # of those that come at once the first begins alone
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
    """Moves as many as there are slots from the line into the batch; the seconds of their prefill, which is one."""
    seconds, tokens, kv, count = SLOW.prefill_fixed_s, 0, 0, 0
    while waiting and count < slots and tokens < MOST_PREFILL_TOKENS:
        one = going[waiting[0]]
        new = max(1, one.context - one.cached)
        seconds += SLOW.prefill_token_s * new + SLOW.prefill_pair_s * new * (one.cached + new / 2)
        tokens, kv, count = tokens + new, kv + one.context, count + 1
        running.append(waiting.pop(0))
    return max(seconds, SLOW.decode_s(count) + SLOW.per_kv_token_s * kv)


@pytest.mark.parametrize("seed", range(6))
def test_pinned_trajectories_on_engines_with_few_slots_end_when_they_do_token_by_token(seed: int) -> None:
    rng = np.random.default_rng(seed)
    works = [
        trajectory(
            index,
            [
                (int(rng.integers(1, 900)), int(rng.integers(0, 600)), float(rng.uniform(0.0, 4.0)))
                for _ in range(int(rng.integers(1, 5)))
            ],
            prompt_tokens=int(rng.integers(50, 6_000)),
        )
        for index in range(14)
    ]

    one = replace(engine(slots=SLOTS), page_tokens=PAGE_TOKENS)

    outcome = play(works, Cluster((one, one)), "verl").outcome

    exact = np.zeros(len(works))
    for first in (0, 1):  # verl deals trajectories out in turn
        exact[first::2] = by_tokens(works[first::2], SLOTS)
    fluid = np.array([times.finished_s for times in outcome.times])
    assert fluid == pytest.approx(exact, rel=1e-9)
