"""Try several placements, and choose the best by the mean makespan over samples (`paths`).

Tried are, in this order, each against the best before it:
- the present one, where trajectories that are nowhere yet go to the engine that then ends first,
  longest first;
- those that have not started dealt again so, prompt by prompt, which prefills each prompt once, and
  one by one: what a sticky, least loaded rule would do, with predicted work for load;
- the partition of all trajectories, longest path first, into one contiguous group for each engine,
  fastest engine first (Heddle §5.2 with tools in it), for several shares of the longest path that
  each group may hide; whole, for its first engines alone, which get their few long trajectories
  while the rest is dealt over the others, and for those that have not started;
- the best of these, improved step by step (`refining`).
What is dealt moves no KV. A partition does, so it is taken only where it is MARGIN better. Prompts
count in the makespan and besides, as the mean over engines of the seconds that they are prefilled
for, times `prompt_weight`: to prefill a prompt on one more engine is sure to take its time, where
the gain is a guess. Groups of a partition are exchanged between engines with equal figures so that
most context stays where it is (`relabel`).
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled, inlined
from treadle_core.placing.dealing import deal
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
    finish,
    is_better,
    path_s,
    prompt_weight,
    reading_order,
    work_s,
    worked_s,
)
from treadle_core.placing.refining import refine

MARGIN = (
    0.02  # of the mean makespan; both are judged by the same samples, so most of the errors cancel
)
SHARES = (0.0, 0.25, 0.5, 1.0)  # of the longest path that a group of a partition may hide
FIRST_ENGINES = (1, 4, 8, 12, 3, 6, 16, 2)  # of a partition, that alone are taken from it
# A partition's makespan is searched to this part of it; predictions are far less exact. The first
# step of a search is larger.
EXACT = 1.0 / 1024.0
FIRST_STEP = 1.0 / 128.0
# Amounts after which a search without a deadline ends: 5 to 10 ms. Few trajectories are tried all
# ways in that time.
MOST_AMOUNTS = 700_000
# Engines for which the rest is solved again; the short trajectories behind them fill the others
# evenly.
MOST_SOLVED = 16


class GoesOn(Protocol):
    """Whether a search tries one more placement, once it has read so many amounts (trajectories
    times samples). Where it answers no, the best so far is the result."""

    def __call__(self, amounts: int, /) -> bool: ...


def reads_little(amounts: int) -> bool:
    """Go on until MOST_AMOUNTS are read, which is the same on every machine and at any load."""
    return amounts < MOST_AMOUNTS


def best_placement(
    engines: Floats,
    kinds: Indexes,
    work: Work,
    medians: Work,
    current: Indexes,
    goes_on: GoesOn = reads_little,
) -> Indexes:
    """Return engine_of[n], the index of each trajectory's engine in the best placement.

    engines: `paths.engine_rows`; kinds: a number that engines with equal figures share; work:
    samples, medians: the same at its medians; current: each trajectory's engine now, -1 for
    none. goes_on: asked before each placement behind the first few. These are always tried, and
    the best is always improved, which together takes about a third of what all takes.
    """
    if not len(current):
        return current.copy()
    search = _Search(engines, kinds, work, medians, current)
    if len(engines) > 1:
        search.begin()
        for candidate in search.more():
            if not goes_on(search.amounts):
                break
            search.consider(candidate, MARGIN)
        search.improve()
    return search.best


class _Search:
    """A search for the best placement: the best so far, and what its candidates are made of.

    amounts: those read so far."""

    def __init__(
        self, engines: Floats, kinds: Indexes, work: Work, medians: Work, current: Indexes
    ) -> None:
        self._engines, self._kinds, self._work, self._medians = engines, kinds, work, medians
        self._order = np.argsort(-_alone_s(engines, medians.amounts[0]), kind="stable")
        # Whoever judges the result reads in this order, which for samples is not that of medians.
        self._reading = reading_order(engines, work)
        self._free = ~medians.started | (current < 0)
        self._each = np.arange(len(current))
        self._fastest_first = np.lexsort((np.arange(len(engines)), engines[:, BASE_S]))
        self._own = medians.amounts[0][self._order]
        self._sums = np.zeros((len(current) + 1, self._own.shape[1]))
        np.cumsum(self._own, axis=0, out=self._sums[1:])
        every, new = np.ones(len(engines), np.bool_), current < 0
        self._all_new = bool(new.all())
        self._staying = self._deal(current, self._order[new[self._order]], every)
        self.amounts = 0
        self.best = self._near = self._staying
        self._best_s = self._judge(self._staying)

    def consider(self, candidate: Indexes, margin: float) -> None:
        """Take a placement that is better than the best so far by `margin`."""
        candidate_s = self._judge(candidate)
        if is_better(candidate_s, self._best_s, margin):
            self.best, self._best_s = candidate, candidate_s

    def begin(self) -> None:
        """Try what moves no KV, then the first partition."""
        every = np.ones(len(self._engines), np.bool_)
        dealt = self._order[self._free[self._order]]
        units = [self._medians.prompts]
        if not self._all_new:  # else one by one is how they were dealt at first
            units.append(self._each)
        for unit_of in units:
            self.consider(self._deal(self._staying, dealt, every, unit_of), 0.0)
        self._near = self.best
        self._partitions = [self._partition(SHARES[0])]
        self.consider(self._partitions[0][0], MARGIN)

    def more(self) -> Iterator[Indexes]:
        """Yield the other placements that are tried."""
        for share in SHARES[1:]:
            self._partitions.append(self._partition(share))
            yield self._partitions[-1][0]
        for planned, bounds in self._partitions:
            yield from self._first_engines(planned, bounds)
        free = ~self._medians.started
        if not free.all():
            for planned, _ in self._partitions:
                yield np.where(free, planned, self._staying)

    def improve(self) -> None:
        """Improve the best so far step by step."""
        if self._free.any():
            of = (self._engines, self._work, self.best, self._free, self._reading)
            self.consider(refine(*of), 0.0)

    def _judge(self, placement: Indexes) -> Floats:
        self.amounts += self._work.amounts.shape[0] * len(placement)
        return judge(self._engines, self._work, placement, self._reading)

    def _deal(
        self, placement: Indexes, dealt: Indexes, allowed: Flags, unit_of: Indexes | None = None
    ) -> Indexes:
        unit_of = self._each if unit_of is None else unit_of
        of = (self._engines, self._kinds, self._medians, placement, dealt, unit_of, allowed)
        return deal(*of)

    def _partition(self, share: float) -> tuple[Indexes, Indexes]:
        """Return the partition of all for one share, renamed so that most context stays where it
        is, and the bounds of its groups."""
        m, order = len(self._engines), self._order
        fastest_first = self._fastest_first
        rows = np.ascontiguousarray(self._engines[fastest_first])
        bounds = partition(rows, self._sums, self._own, share)
        planned = np.empty_like(self._staying)
        planned[order] = fastest_first[np.repeat(np.arange(m), np.diff(bounds))]
        everything = np.ones(len(order), np.bool_)
        contexts = self._medians.contexts
        return relabel(planned, self._near, contexts, everything, self._kinds), bounds

    def _first_engines(self, planned: Indexes, bounds: Indexes) -> Iterator[Indexes]:
        """Yield placements with only the first engines of a partition, over whose others the rest
        is dealt."""
        m, free = len(self._engines), ~self._medians.started
        for count in FIRST_ENGINES:
            end = bounds[min(count, m)]
            taken, rest = self._order[:end], self._order[end:]
            apart = np.zeros(m, np.bool_)
            apart[planned[taken]] = True
            if count >= m or apart.all() or not len(taken):
                continue
            candidate = self._staying.copy()
            candidate[taken] = planned[taken]
            again = rest[free[rest] | apart[self._staying[rest]]]
            yield self._deal(candidate, again, ~apart)


def judge(
    engines: Floats, work: Work, placement: Indexes, reading: Indexes | None = None
) -> Floats:
    """Return the seconds of a placement by each sample: less is better. reading:
    `paths.reading_order`, where the caller knows it."""
    reading = reading_order(engines, work) if reading is None else reading
    times, prompts_s = finish(engines, work, placement, reading)
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
    bounds, filled = np.zeros(m + 1, np.int64), np.zeros(m + 1, np.int64)
    first, limit_s = 0, np.inf
    for head in range(min(m - 1, MOST_SOLVED)):
        limit_s = least_limit_s(engines, sums, own, share, head, first, limit_s, filled)
        first = reach(engines[head], sums, own, share, first, limit_s, filled[head + 1])
        bounds[head + 1] = first
    for engine in range(min(m - 1, MOST_SOLVED), m - 1):
        first = reach(engines[engine], sums, own, share, first, limit_s, filled[engine + 1])
        bounds[engine + 1] = first
    bounds[m] = n
    return bounds


@compiled
def least_limit_s(
    engines: Floats,
    sums: Floats,
    own: Floats,
    share: float,
    head: int,
    first: int,
    known_s: float,
    filled: Indexes,
) -> float:
    """Return about the least makespan in which the engines from `head` on do all ranks from
    `first`.

    known_s: one that is enough, infinite for none. filled: of the last fill; the next one begins
    its search there.
    """
    n = len(own)
    low_s, high_s = 0.0, known_s
    if high_s == np.inf:
        speed = 0.0
        for engine in range(head, len(engines)):
            whole_s = group_s(engines[engine], sums, own, share, first, n)
            high_s = min(high_s, whole_s)
            speed += 1.0 / max(whole_s, 1e-12)
        if high_s == np.inf:  # no engine's figures can do it
            return high_s
        limit_s, step = 1.0 / speed, FIRST_STEP  # what they could do if work were a fluid
        while limit_s < high_s:
            if fill(engines, sums, own, share, head, first, limit_s, filled):
                high_s = limit_s
                break
            low_s = limit_s
            limit_s *= 1.0 + step
            step *= 2.0
    step = FIRST_STEP
    while high_s - low_s > EXACT * high_s:
        middle_s = 0.5 * (low_s + high_s)
        if low_s == 0.0:  # nothing is known to be too little: step down, in growing steps
            middle_s = high_s * max(1.0 - step, 0.5)
            step *= 2.0
        if fill(engines, sums, own, share, head, first, middle_s, filled):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


@compiled
def fill(
    engines: Floats,
    sums: Floats,
    own: Floats,
    share: float,
    head: int,
    first: int,
    limit_s: float,
    filled: Indexes,
) -> bool:
    """Give each engine from `head` on all that it ends within the limit, from rank `first` on;
    write the ends of the groups to `filled`, and return whether all is given."""
    n = len(own)
    at, before = first, filled[head]
    filled[head] = first
    for engine in range(head, len(engines)):
        size = max(filled[engine + 1] - before, 0)
        before = filled[engine + 1]
        if at < n:
            at = reach(engines[engine], sums, own, share, at, limit_s, at + size)
        filled[engine + 1] = at
    return at >= n


@inlined
def reach(
    engine: Floats, sums: Floats, own: Floats, share: float, first: int, limit_s: float, near: int
) -> int:
    """Return the last end of a group from `first` that the engine finishes within the limit. The
    search begins at `near`."""
    low, high, step = first, len(own) + 1, 1
    probe = min(max(near, first + 1), len(own))
    while high - low > 1:
        if group_s(engine, sums, own, share, first, probe) <= limit_s:
            low = probe
            probe = min(low + step, len(own)) if high > len(own) else (low + high) // 2
        else:
            high = probe
            probe = max(high - step, first + 1) if low == first else (low + high) // 2
        step *= 2
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
