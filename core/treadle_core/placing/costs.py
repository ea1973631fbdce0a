"""What it costs an engine to run a group of trajectories: the cost models that placement minimises.

Engines and trajectories become arrays, sorted and summed once (`tabulate`), so that the cost of any contiguous group of
the sorted order is O(1) (`group_cost`). The solver is exact because, for one engine, the cost of the group [first, end)
of the descending order never falls when `end` grows and never grows when `first` grows. That holds in floating point
for GROUP_SIZE and LINEAR_INTEGRAL (prefix sums of what is not negative), and to rounding for PIECEWISE_INTEGRAL.

Cost models, in seconds; an engine decodes a step of a batch in a + b * batch + k * KV tokens (`model.DecodeCurve`):
- GROUP_SIZE, Heddle eq. 2: F(size) * L_max * T. F * T is the step time at `size` sequences of the workload's mean
  context; beyond the slot limit the group queues, and F grows in proportion to size / slots.
- LINEAR_INTEGRAL, DARTS eq. 4 with a linear engine:
  a * max(L_max, sum L / slots, sum Q / kv_capacity) + b * sum L + k * sum Q + sum P / prefill_rate.
  Q = L * (context + L / 2): KV tokens read over the life of a trajectory, whose context grows by one a step.
  sum Q / kv_capacity is the bound that KV sets: capacity over the token-weighted mean context sequences run at once
  (weighted so, because with a mean over trajectories a short one would make its group cheaper). P: context that must be
  prefilled, 0 where the trajectory has an engine (a move there brings its KV along while a tool runs).
- PIECEWISE_INTEGRAL, DARTS eq. 4 with a decode curve that bends: PTL(b), the seconds of a step at b sequences, is
  linear between the knots that a profile measured. Eq. 4 sums PTL(sequences left) * (L_i - L_(i-1)) over the lengths
  in rising order; by parts that is the sum over sequences j = 0, 1, ... of l_j * (PTL(j + 1) - PTL(j)), l_j the j-th
  longest and PTL(0) is 0. On one linear piece the difference is the same for all sequences, so a piece costs one
  difference of running sums: O(knots + log slots). Of more than c trajectories only c run: the longest keep a slot
  each, and the rest share the other slots evenly, a sequence of `level` tokens in each, as longest-remaining-first with
  preemption does. Waits that a KV capacity forces cost the curve's step at no sequence (its first piece carried on to
  0, at least 0). With one linear piece it equals LINEAR_INTEGRAL. A curve that falls somewhere is refused, as costs
  could then fall when a group grows.
An engine whose KV holds less than the context of one of a group cannot run the group: its cost is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, inlined, lean
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.question import MOST_SECONDS, PlanEngine, check_engines, check_fit, check_workload
from treadle_core.placing.workload import LENGTH, SUM_KV, SUM_LENGTHS, SUM_PREFILL, Workspace, rank
from treadle_core.refusals import CoreError

# Columns of a piece: its first sequence, and the seconds that a token of each of its sequences adds to a step.
FROM_SEQUENCE, SEQUENCE_S = range(2)
MOST_SEQUENCES = 1_000_000_000  # at once on one engine


class InvalidCurveError(CoreError):
    """A decode curve with no knots, knots out of order, or seconds that are not finite, are negative, or fall."""


@dataclass(frozen=True, slots=True)
class BatchCurve:
    """knots: (sequences, seconds a step), sequences rising from at least 1, seconds never falling.

    Fewer sequences than the first knot's take as long as it; beyond the last the last piece goes on. KV tokens and
    prefill are the engine's DecodeCurve's.
    """

    knots: tuple[tuple[int, float], ...]


def pieces_of(curve: BatchCurve | DecodeCurve, field: str, most_s: float) -> list[tuple[float, float]]:
    """(first sequence, seconds a token of a sequence) of each piece; raises InvalidCurveError for `field`."""
    if isinstance(curve, DecodeCurve):
        return [(0.0, curve.base_s + curve.per_sequence_s), (1.0, curve.per_sequence_s)]
    if not curve.knots:
        raise InvalidCurveError(f"{field}.knots", "at least one knot is needed")
    pieces = [(0.0, curve.knots[0][1])]
    before, before_s = 1, curve.knots[0][1]
    for index, (sequences, seconds) in enumerate(curve.knots):
        at = f"{field}.knots[{index}]"
        if not 1 <= sequences <= MOST_SEQUENCES or sequences % 1 or (index > 0 and sequences <= before):
            raise InvalidCurveError(at, f"sequences must be whole, >= 1 and rising, is {sequences}")
        if not (0.0 < seconds <= most_s and seconds >= before_s):
            raise InvalidCurveError(at, f"seconds must be > 0, at most {most_s:g} and never fall, is {seconds}")
        if sequences > before:
            pieces.append((float(before), (seconds - before_s) / (sequences - before)))
        before, before_s = sequences, seconds
    return pieces


def piece_table(
    engines: Sequence[PlanEngine], curves: Sequence[BatchCurve | None] | None, most_s: float
) -> tuple[Floats, Floats]:
    """pieces[m, P, 2], padded with pieces that no sequence reaches, and base_s[m], the step at no sequence.

    None is an engine's own linear curve. Raises InvalidCurveError naming the engine or the knot.
    """
    if curves is None:
        curves = [None] * len(engines)
    if len(curves) != len(engines):
        raise InvalidCurveError("curves", f"{len(curves)} curves for {len(engines)} engines")
    each = [
        pieces_of(curve or engine.decode_curve, f"curves[{index}]", most_s)
        for index, (engine, curve) in enumerate(zip(engines, curves, strict=True))
    ]
    table = np.full((len(each), max(map(len, each)), 2), np.inf)
    table[:, :, SEQUENCE_S] = 0.0
    for index, pieces in enumerate(each):
        table[index, : len(pieces)] = pieces
    slopes = table[:, 1, SEQUENCE_S] if table.shape[1] > 1 else np.zeros(len(each))
    return table, np.maximum(table[:, 0, SEQUENCE_S] - slopes, 0.0)


@lean
def sequences_s(ranks: Floats, pieces: Floats, engine: int, slots: int, first: int, end: int) -> tuple[float, float]:
    """Seconds of eq. 4 for ranks [first, end), and the tokens of the longest sequence."""
    sequences = min(end - first, slots)
    own = sequences  # of one trajectory each
    level = 0.0
    if end - first > slots:
        low = 0
        high = slots - 1
        while low < high:  # the first trajectory that is no longer than its share of what is left
            middle = (low + high) // 2
            left = ranks[end, SUM_LENGTHS] - ranks[first + middle, SUM_LENGTHS]
            if ranks[first + middle, LENGTH] * (slots - middle) <= left:
                high = middle
            else:
                low = middle + 1
        own = low
        level = (ranks[end, SUM_LENGTHS] - ranks[first + own, SUM_LENGTHS]) / (slots - own)
    longest = ranks[first, LENGTH] if own > 0 else level
    seconds = longest * pieces[engine, 0, SEQUENCE_S]
    count = pieces.shape[1]
    for piece in range(1, count):
        begin = pieces[engine, piece, FROM_SEQUENCE]
        if begin >= sequences:
            break
        stop = sequences
        if piece + 1 < count and pieces[engine, piece + 1, FROM_SEQUENCE] < sequences:
            stop = int(pieces[engine, piece + 1, FROM_SEQUENCE])
        start = int(begin)
        tokens = 0.0
        if start < own:
            tokens = ranks[first + min(stop, own), SUM_LENGTHS] - ranks[first + start, SUM_LENGTHS]
        tokens += max(stop - max(start, own), 0) * level
        seconds += tokens * pieces[engine, piece, SEQUENCE_S]
    return seconds, longest


class Table(NamedTuple):
    """What the kernels read: a workload, longest first, and the engines in the order in which they take it.

    `engines` has a row for each engine: base_s, per_sequence_s, per_kv_token_s, slots, KV tokens (inf where unknown),
    seconds a prefilled token. `lengths` has n entries; the sums have n + 1, the first of them 0; all four are views of
    `ranks` (`workload`), which has them side by side. `pieces` are the engines' decode curves under PIECEWISE_INTEGRAL,
    otherwise empty. reach[reach_of[e], r] is the first rank from r on whose context engine e cannot
    hold, n + 1 where there is none; `reach` has no rows where everything fits everywhere. Under LINEAR_INTEGRAL no
    group counts as having a longest trajectory below `least_longest` tokens (`rank_scenarios`); 0 but there.
    """

    model: int
    engines: Floats
    lengths: Floats
    sum_lengths: Floats
    sum_kv: Floats
    sum_prefill: Floats
    ranks: Floats
    pieces: Floats
    reach: Indexes
    reach_of: Indexes
    least_longest: float


@dataclass(frozen=True)
class Costs:
    """A table and the way back: `order[r]` and `engine_order[e]` are the caller's indexes of rank r and engine e."""

    table: Table
    order: Indexes
    engine_order: Indexes


@inlined
def group_cost(table: Table, engine: int, first: int, end: int) -> float:
    """Seconds for `engine` to finish ranks [first, end); 0 for an empty group."""
    if end <= first:
        return 0.0
    if table.reach.shape[0] > 0 and end > table.reach[table.reach_of[engine], first]:
        return np.inf
    slots = table.engines[engine, 3]
    longest = table.ranks[first, LENGTH]
    if table.model == 1:  # CostModel.GROUP_SIZE; kernels read plain numbers
        size = float(end - first)
        if size <= slots:
            return float((table.engines[engine, 0] + table.engines[engine, 1] * size) * longest)
        return float((table.engines[engine, 0] + table.engines[engine, 1] * slots) * (size / slots) * longest)
    kv_work = table.ranks[end, SUM_KV] - table.ranks[first, SUM_KV]
    prefill = table.ranks[end, SUM_PREFILL] - table.ranks[first, SUM_PREFILL]
    if table.model == 2:  # CostModel.LINEAR_INTEGRAL
        work = table.ranks[end, SUM_LENGTHS] - table.ranks[first, SUM_LENGTHS]
        steps = max(longest, table.least_longest, work / slots, kv_work / table.engines[engine, 4])
        decode_s = table.engines[engine, 0] * steps + table.engines[engine, 1] * work
    else:
        decode_s, longest = sequences_s(table.ranks, table.pieces, engine, int(slots), first, end)
        decode_s += table.engines[engine, 0] * max(0.0, kv_work / table.engines[engine, 4] - longest)
    return float(decode_s + table.engines[engine, 2] * kv_work + table.engines[engine, 5] * prefill)


def tabulate(
    model: CostModel,
    lengths: Floats,
    contexts: Floats,
    placed: Flags,
    engines: Sequence[PlanEngine],
    *,
    curves: Sequence[BatchCurve | None] | None = None,
    workspace: Workspace | None = None,
) -> Costs:
    """Sort and sum a workload: lengths and contexts in tokens, `placed` where some engine has a trajectory's KV.

    Trajectories of equal length keep the caller's order. Engines come fastest first (seconds a token alone), then by
    parallelism, then fewest slots: the head of the order are few and long. `curves`, one an engine, are read under
    PIECEWISE_INTEGRAL; None is the engine's own linear curve. What is given a `workspace` holds until its next use.
    Raises InvalidTrajectoryError, NothingFitsError, InvalidEngineError, InvalidCurveError, NoEnginesError.
    """
    lengths = np.ascontiguousarray(lengths, np.float64)
    contexts = np.ascontiguousarray(contexts, np.float64)
    check_workload(lengths, contexts)
    workspace = workspace or Workspace()
    rows = workspace.derive_once(engines, check_engines) if isinstance(engines, tuple) else check_engines(engines)
    check_fit(contexts, rows[:, 4])
    order, ranks = rank(lengths, contexts, placed, workspace)
    total = float(ranks[-1, SUM_LENGTHS])
    mean_context = float(ranks[-1, SUM_KV]) / total if total > 0.0 else 0.0
    pieces = np.zeros((0, 0, 2))
    alone_s = rows[:, 0] + rows[:, 1] + rows[:, 2] * mean_context
    if model is CostModel.GROUP_SIZE:  # F sees the group's size alone: the mean context stands in for each one's
        rows[:, 1] += rows[:, 2] * mean_context
    elif model is CostModel.PIECEWISE_INTEGRAL:
        pieces, rows[:, 0] = piece_table(engines, curves, MOST_SECONDS)
        alone_s = pieces[:, 0, 1] + rows[:, 2] * mean_context
    engine_order = np.lexsort((rows[:, 4], rows[:, 3], -rows[:, 6], alone_s))
    reach, reach_of = find_reach(contexts, order, rows[engine_order, 4])
    table = Table(
        model=int(model),
        engines=np.ascontiguousarray(rows[engine_order, :6]),
        lengths=ranks[:-1, LENGTH],
        sum_lengths=ranks[:, SUM_LENGTHS],
        sum_kv=ranks[:, SUM_KV],
        sum_prefill=ranks[:, SUM_PREFILL],
        ranks=ranks,
        pieces=np.ascontiguousarray(pieces[engine_order] if pieces.size else pieces),
        reach=reach,
        reach_of=reach_of,
        least_longest=0.0,
    )
    return Costs(table, order, engine_order)


def find_reach(contexts: Floats, order: Indexes, capacities: Floats) -> tuple[Indexes, Indexes]:
    """`Table.reach` and `reach_of` for engines with these KV capacities; no rows where all contexts fit all."""
    n = len(contexts)
    if n == 0 or contexts.max() <= capacities.min():
        return np.zeros((0, n + 1), np.int64), np.zeros(len(capacities), np.int64)
    kinds, reach_of = np.unique(capacities, return_inverse=True)
    reach = np.full((len(kinds), n + 1), n + 1, np.int64)
    for row, capacity in zip(reach, kinds, strict=True):
        unfit = np.flatnonzero(contexts[order] > capacity)
        row[unfit] = unfit
        row[:] = np.minimum.accumulate(row[::-1])[::-1]
    return reach, reach_of.astype(np.int64)
