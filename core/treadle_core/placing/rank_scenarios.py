"""Plan for uncertain lengths: of several exact plans, the one with the least mean makespan over samples.

Samples of the sorted workload are as in `scenarios`, with the same draws, but for contiguous groups alone: sums are
kept for blocks of ranks, so that a group's time takes its blocks and its two ends instead of all its trajectories. Tool
time is in the lengths already, as tokens, and prefill in the table's sums.

The plans differ in `least_longest` of the cost table, the share of the longest trajectory that every group is taken to
contain. At 0 it is Heddle's plan, which takes each median for certain and gives a group of short trajectories all the
work that its longest one leaves time for. At 1 every group may turn out to have the longest of all, so only work is
balanced, as without any prediction. Between them trajectories that are surely long get engines to themselves and the
others are balanced. Each plan is the exact optimum of its own cost and takes no second sort. (Not in the papers.)
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle_core.compiled import Floats, Indexes, compiled, inlined, lean
from treadle_core.placing.balance import finish_s
from treadle_core.placing.costs import Costs
from treadle_core.placing.scenarios import ROUNDING, draw_one, draws, least_alone_s, sample_count
from treadle_core.placing.solver import partition
from treadle_core.placing.workload import LENGTH, SUM_PREFILL, Workspace

BLOCK = 8  # ranks


class RankSamples(NamedTuple):
    """lengths[r, s]: tokens of rank r in sample s. contexts: tokens in KV now, by rank. Of the ranks before block b
    tokens[b, s] and KV tokens read kv[b, s]; longest[b, s]: of block b alone."""

    lengths: Floats
    contexts: Floats
    tokens: Floats
    kv: Floats
    longest: Floats


def draw_rank_samples(
    costs: Costs, contexts: Floats, log_sigma: Floats, room_tokens: Floats, workspace: Workspace | None = None
) -> RankSamples:
    """Samples of the workload of a table, in memory of `workspace`. By the caller's order: contexts; log_sigma, the
    standard deviation of ln(length); room_tokens, what each cap leaves."""
    n = len(costs.order)
    count = sample_count(max(n, 1))
    blocks = n // BLOCK + 1
    memory = (workspace or Workspace()).floats(n * (count + 1) + 3 * blocks * count, "samples")
    lengths, contexts_of_ranks, sums = np.split(memory, [n * count, n * (count + 1)])
    samples = RankSamples(lengths.reshape(n, count), contexts_of_ranks, *sums.reshape(3, blocks, count))
    draw(costs.order, costs.table.ranks, contexts, log_sigma, room_tokens, *draws(), samples)
    sum_up(samples)
    return samples


def judge_partition(costs: Costs, samples: RankSamples, bounds: Indexes) -> tuple[float, bool]:
    """Mean makespan over the samples where engine e of the table runs ranks [bounds[e], bounds[e + 1]), and whether no
    placement ends earlier in any of them (`scenarios.Fate.least`)."""
    engines = costs.table.engines
    times_s, last = makespans(engines, costs.table.ranks, bounds, samples)
    least = bool((bounds[last + 1] - bounds[last] == 1).all())
    if least:
        sample, rank = np.arange(len(times_s)), bounds[last]
        ranks = costs.table.ranks
        prefill = ranks[rank + 1, SUM_PREFILL] - ranks[rank, SUM_PREFILL]
        alone_s = least_alone_s(engines, samples.lengths[rank, sample], samples.contexts[rank], 0.0 * prefill, prefill)
        least = bool((alone_s >= times_s * (1.0 - ROUNDING)).all())
    return float(times_s.mean()), least


@compiled
def draw(
    order: Indexes,
    ranks: Floats,
    contexts: Floats,
    log_sigma: Floats,
    room_tokens: Floats,
    strata: npt.NDArray[np.uint8],
    factors: Floats,
    samples: RankSamples,
) -> None:
    """Write the samples. A trajectory's index in the caller's order is its row of the draws."""
    for rank in range(len(order)):
        index = order[rank]
        samples.contexts[rank] = contexts[index]
        row = strata[index % len(strata)]
        draw_one(samples.lengths[rank], ranks[rank, LENGTH], log_sigma[index], room_tokens[index], row, factors)


@lean
def sum_up(samples: RankSamples) -> None:
    """Write the sums of whole blocks; the loops keep samples side by side and a block's sums in registers."""
    lengths, contexts, tokens, kv, longest = samples
    tokens[0] = 0.0
    kv[0] = 0.0
    for block in range(len(lengths) // BLOCK):
        first = block * BLOCK
        for sample in range(lengths.shape[1]):
            block_tokens = block_kv = block_longest = 0.0
            for rank in range(first, first + BLOCK):
                length = lengths[rank, sample]
                block_tokens += length
                block_kv += length * (contexts[rank] + 0.5 * length)
                block_longest = max(block_longest, length)
            tokens[block + 1, sample] = tokens[block, sample] + block_tokens
            kv[block + 1, sample] = kv[block, sample] + block_kv
            longest[block, sample] = block_longest


@inlined
def add(tokens: Floats, kv: Floats, longest: Floats, lengths: Floats, context: float) -> None:
    """Add a trajectory to a group. A loop for each sum, as in `scenarios.add`."""
    for sample in range(len(lengths)):
        longest[sample] = max(longest[sample], lengths[sample])
    for sample in range(len(lengths)):
        tokens[sample] += lengths[sample]
    for sample in range(len(lengths)):
        kv[sample] += lengths[sample] * (context + 0.5 * lengths[sample])


@compiled
def makespans(engines: Floats, ranks: Floats, bounds: Indexes, samples: RankSamples) -> tuple[Floats, Indexes]:
    """Seconds until the last engine finishes by the linear-integral cost, and which one that is, in each sample."""
    lengths, contexts, block_tokens, block_kv, block_longest = samples
    count = lengths.shape[1]
    times, last = np.zeros(count), np.zeros(count, np.int64)
    tokens, kv, longest = np.empty(count), np.empty(count), np.empty(count)
    for at in range(len(engines)):
        first, end = bounds[at], bounds[at + 1]
        if first >= end:
            continue
        first_block, end_block = (first + BLOCK - 1) // BLOCK, end // BLOCK
        head_end, tail = first_block * BLOCK, end_block * BLOCK
        if head_end >= tail:  # no whole block
            first_block, head_end, tail = end_block, end, end
        for sample in range(count):
            tokens[sample] = block_tokens[end_block, sample] - block_tokens[first_block, sample]
            kv[sample] = block_kv[end_block, sample] - block_kv[first_block, sample]
            longest[sample] = 0.0
        for block in range(first_block, end_block):
            for sample in range(count):
                longest[sample] = max(longest[sample], block_longest[block, sample])
        for rank in range(first, head_end):
            add(tokens, kv, longest, lengths[rank], contexts[rank])
        for rank in range(tail, end):
            add(tokens, kv, longest, lengths[rank], contexts[rank])
        prefill_s = engines[at, 5] * (ranks[end, SUM_PREFILL] - ranks[first, SUM_PREFILL])
        for sample in range(count):
            done_s = finish_s(engines[at], longest[sample], 0.0, tokens[sample], kv[sample]) + prefill_s
            if done_s > times[sample]:
                times[sample] = done_s
                last[sample] = at
    return times, last


# Shares of the longest trajectory that every group is taken to contain.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def hedge(costs: Costs, share: float) -> Costs:
    """The same workload and engines, with every group taken to contain `share` of the longest trajectory."""
    table = costs.table
    longest = float(table.lengths[0]) if len(table.lengths) else 0.0
    return replace(costs, table=table._replace(least_longest=share * longest))


def best_partition(costs: Costs, samples: RankSamples) -> tuple[Indexes, float]:
    """Bounds of the groups of the best plan, and its mean makespan over the samples.

    Tries every other share, then those beside the best; of equal plans the smaller share wins. Where the plan of the
    medians cannot be beaten in any sample, it is taken at once.
    """
    found: dict[int, tuple[float, Indexes]] = {}

    def try_share(at: int) -> bool:
        bounds, _ = partition(hedge(costs, SHARES[at]))
        mean_s, least = judge_partition(costs, samples, bounds)
        found[at] = (mean_s, bounds)
        return least

    if not try_share(0):
        for at in range(2, len(SHARES), 2):
            try_share(at)
        best = min(found, key=lambda at: (found[at][0], at))
        for at in {max(best - 1, 0), min(best + 1, len(SHARES) - 1)} - set(found):
            try_share(at)
    best = min(found, key=lambda at: (found[at][0], at))
    return found[best][1], found[best][0]
