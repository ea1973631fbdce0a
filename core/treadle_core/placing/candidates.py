"""Try several placements, and choose the best by the mean makespan over samples (`paths`).

Tried are, in this order, each against the best before it:
- the present one, where trajectories that are nowhere yet go to the engine that then ends first,
  longest first;
- those that have not started dealt again so, prompt by prompt, which prefills each prompt once, and
  one by one: what a sticky, least loaded rule would do, with predicted work for load;
- the partition of all trajectories, longest path first, into one contiguous group for each engine,
  fastest engine first (Heddle §5.2 with tools in it), for several shares of the longest path that
  each group may hide; whole, for those that have not started, and for its first engines alone:
  these get their few long trajectories, and the rest is dealt over the others;
- the best of these, improved step by step (`refining`).
What is dealt moves no KV. A partition does, so it is taken only where it is MARGIN better. Prompts
count in the makespan and besides, as the mean over engines of the seconds that they are prefilled
for, times `prompt_weight`: to prefill a prompt on one more engine is sure to take its time, where
the gain is a guess. Groups of a partition are exchanged between engines with equal figures so that
most context stays where it is (`relabel`).
"""

from collections.abc import Iterator

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled, inlined
from treadle_core.placing.paths import (
    BASE_S,
    KV,
    OBSERVED,
    PAIRS,
    PER_KV_TOKEN_S,
    PER_SEQUENCE_S,
    PREFILL_PAIR_S,
    PREFILL_S,
    TOKENS,
    TOOL_S,
    Work,
    deal,
    finish,
    is_better,
    path_s,
    prompt_weight,
    work_s,
    worked_s,
)
from treadle_core.placing.refining import refine

MARGIN = (
    0.02  # of the mean makespan; both are judged by the same samples, so most of the errors cancel
)
SHARES = (0.0, 0.25, 0.5, 1.0)  # of the longest path that a group of a partition may hide
FIRST_ENGINES = (1, 2, 3, 4, 6, 8, 12, 16)  # of a partition, that alone are taken from it
BISECTIONS = (
    14  # a makespan to a thousandth of where the search begins; predictions are far less exact
)
# Engines for which the rest is solved again; the short trajectories behind them fill the others
# evenly.
MOST_SOLVED = 16


def best_placement(
    engines: Floats, kinds: Indexes, work: Work, medians: Work, current: Indexes
) -> Indexes:
    """Return engine_of[n], the index of each trajectory's engine in the best placement.

    engines: `paths.engine_rows`; kinds: a number that engines with equal figures share; work:
    samples, medians: the same at its medians; current: each trajectory's engine now, -1 for
    none.
    """
    if not len(current):
        return current.copy()
    amounts = medians.amounts[0]
    order = np.argsort(-_alone_s(engines, amounts), kind="stable")
    free = ~medians.started | (current < 0)
    every, alone = np.ones(len(engines), np.bool_), np.arange(len(current))

    best = deal(engines, medians, current, order[current[order] < 0], alone, every)
    best_s = judge(engines, work, best)
    if len(engines) == 1:
        return best
    staying = best
    for unit_of in (medians.prompts, alone):
        dealt = deal(engines, medians, staying, order[free[order]], unit_of, every)
        dealt_s = judge(engines, work, dealt)
        if is_better(dealt_s, best_s, 0.0):
            best, best_s = dealt, dealt_s
    near = best
    for share in SHARES:
        for candidate in _partitions(engines, kinds, medians, near, staying, order, share):
            candidate_s = judge(engines, work, candidate)
            if is_better(candidate_s, best_s, MARGIN):
                best, best_s = candidate, candidate_s
    if free.any():
        refined = refine(engines, work, best, free)
        if is_better(judge(engines, work, refined), best_s, 0.0):
            return refined
    return best


def judge(engines: Floats, work: Work, placement: Indexes) -> Floats:
    """Return the seconds of a placement by each sample: less is better."""
    times, prompts_s = finish(engines, work, placement)
    judged_s: Floats = times.max(axis=0) + prompt_weight(engines, len(placement)) * prompts_s.mean()
    return judged_s


def _alone_s(engines: Floats, amounts: Floats) -> Floats:
    """Return the seconds that each trajectory takes alone on an engine of mean figures."""
    mean = engines.mean(axis=0)
    decode_s = (mean[BASE_S] + mean[PER_SEQUENCE_S]) * amounts[:, TOKENS] + mean[
        PER_KV_TOKEN_S
    ] * amounts[:, KV]
    prefill_s = mean[PREFILL_S] * amounts[:, OBSERVED] + mean[PREFILL_PAIR_S] * amounts[:, PAIRS]
    alone_s: Floats = decode_s + prefill_s + amounts[:, TOOL_S]
    return alone_s


def _partitions(
    engines: Floats,
    kinds: Indexes,
    medians: Work,
    near: Indexes,
    staying: Indexes,
    order: Indexes,
    share: float,
) -> Iterator[Indexes]:
    """Yield the partition of `order` for one share, renamed so that most context stays as in
    `near`, and its variants."""
    m = len(engines)
    own = medians.amounts[0][order]
    sums = np.zeros((len(own) + 1, own.shape[1]))
    np.cumsum(own, axis=0, out=sums[1:])
    fastest_first = np.lexsort((np.arange(m), engines[:, BASE_S]))
    bounds = partition(np.ascontiguousarray(engines[fastest_first]), sums, own, share)
    planned = np.empty_like(staying)
    planned[order] = fastest_first[np.repeat(np.arange(m), np.diff(bounds))]
    planned = relabel(planned, near, medians.contexts, np.ones(len(order), np.bool_), kinds)
    yield planned
    free = ~medians.started
    yield np.where(free, planned, staying)
    for count in FIRST_ENGINES:
        taken, rest = order[: bounds[min(count, m)]], order[bounds[min(count, m)] :]
        apart = np.zeros(m, np.bool_)
        apart[planned[taken]] = True
        if count >= m or apart.all():
            break
        if not len(taken):
            continue
        candidate = staying.copy()
        candidate[taken] = planned[taken]
        again = rest[free[rest] | apart[staying[rest]]]
        yield deal(engines, medians, candidate, again, np.arange(len(order)), ~apart)


@inlined
def group_s(engine: Floats, sums: Floats, own: Floats, share: float, first: int, end: int) -> float:
    """Return when an engine ends ranks [first, end): by their work, the path of the first of them,
    and the path of one with `share` of the longest of all. own[n, 5]: amounts by rank; sums[n + 1,
    5]: their sums before each rank."""
    if end <= first:
        return 0.0
    group_work_s = work_s(engine, sums[end]) - work_s(engine, sums[first])
    tokens, kv_tokens = sums[end, TOKENS] - sums[first, TOKENS], sums[end, KV] - sums[first, KV]
    own_s = work_s(engine, own[first])
    alone_s = engine[BASE_S] * own[first, TOKENS] + own_s
    ends_s = max(
        worked_s(engine, tokens, kv_tokens, group_work_s),
        path_s(alone_s, own[first, TOOL_S], max(group_work_s - own_s, 0.0)),
    )
    if share > 0.0:
        own_s = share * work_s(engine, own[0])
        alone_s = share * engine[BASE_S] * own[0, TOKENS] + own_s
        ends_s = max(
            ends_s, path_s(alone_s, share * own[0, TOOL_S], max(group_work_s - own_s, 0.0))
        )
    return ends_s


@compiled
def partition(engines: Floats, sums: Floats, own: Floats, share: float) -> Indexes:
    """Return bounds[m + 1]: engine e runs ranks [bounds[e], bounds[e + 1]) of trajectories that
    come longest first.

    The largest `group_s` is about the least, then that of the engines after the first, and so on:
    by bisecting on the makespan with a greedy fill, which would be exact if no group's cost fell as
    it loses its first rank.
    """
    n, m = len(own), len(engines)
    bounds = np.zeros(m + 1, np.int64)
    first = 0
    high = np.inf
    for head in range(m - 1):
        if head >= MOST_SOLVED:
            first = reach(engines[head], sums, own, share, first, high)
            bounds[head + 1] = first
            continue
        high = np.inf
        for engine in range(head, m):
            high = min(high, group_s(engines[engine], sums, own, share, first, n))
        low = high / (4.0 * m)
        for _ in range(BISECTIONS):
            middle = np.sqrt(low * high) if high > 2.0 * low else 0.5 * (low + high)
            at = first
            for engine in range(head, m):
                at = reach(engines[engine], sums, own, share, at, middle)
            if at >= n:
                high = middle
            else:
                low = middle
        first = reach(engines[head], sums, own, share, first, high)
        bounds[head + 1] = first
    bounds[m] = n
    return bounds


@inlined
def reach(
    engine: Floats, sums: Floats, own: Floats, share: float, first: int, limit_s: float
) -> int:
    """Return the last end of a group from `first` that the engine finishes within the limit."""
    low, high = first, len(own) + 1
    while high - low > 1:
        probe = (low + high) // 2
        if group_s(engine, sums, own, share, first, probe) <= limit_s:
            low = probe
        else:
            high = probe
    return low


@compiled
def keep_most(
    group_of: Indexes, present: Indexes, place: Indexes, context_tokens: Floats, kinds: Indexes
) -> Indexes:
    """Return the engine that takes each group, among engines of the group's kind, so that most
    context stays: greedy, most context first, at least half of the best possible. O(n + m^2) where
    few groups want the same engine.

    By trajectory: group_of and present, an engine or -1. place: what each value of `present` is
    among the m engines.
    """
    m = len(kinds)
    kept = np.zeros((m, m))
    for index in range(len(group_of)):
        if (
            group_of[index] >= 0 and present[index] >= 0
        ):  # one token more: a trajectory without context counts too
            kept[group_of[index], place[present[index]]] += context_tokens[index] + 1.0
    taken = np.zeros(m, np.bool_)
    wish = np.full(m, -1)  # the free engine that holds most of a group, and how much
    wish_kept = np.zeros(m)
    engine_of = np.full(m, -1, np.int64)
    for group in range(m):
        for engine in range(m):
            if kinds[engine] == kinds[group] and kept[group, engine] > wish_kept[group]:
                wish[group], wish_kept[group] = engine, kept[group, engine]
    while True:
        group = int(np.argmax(wish_kept))
        if wish_kept[group] <= 0.0:
            break
        engine = wish[group]
        wish_kept[group] = 0.0
        if not taken[engine]:
            engine_of[group] = engine
            taken[engine] = True
            continue
        for other in range(m):
            if (
                kinds[other] == kinds[group]
                and not taken[other]
                and kept[group, other] > wish_kept[group]
            ):
                wish[group], wish_kept[group] = other, kept[group, other]
    for group in range(
        m
    ):  # groups that no engine holds take the engines of their kind that are left
        if engine_of[group] < 0:
            for engine in range(m):
                if kinds[engine] == kinds[group] and not taken[engine]:
                    engine_of[group] = engine
                    taken[engine] = True
                    break
    return engine_of


def relabel(
    planned: Indexes, present: Indexes, context_tokens: Floats, movable: Flags, kinds: Indexes
) -> Indexes:
    """Return the same partition with groups exchanged between equal engines so that most context
    stays where it is."""
    groups = np.where(movable, planned, -1)
    engine_of = keep_most(groups, present, np.arange(len(kinds)), context_tokens, kinds)
    return np.where(groups >= 0, engine_of[groups], planned)
