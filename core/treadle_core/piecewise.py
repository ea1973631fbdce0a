"""Decode curves with bends: DARTS eq. 4 for a group of any size, from running sums, in O(knots + log slots).

Purpose: the cost model PIECEWISE_INTEGRAL. PTL(b) is the seconds of a decode step at b sequences, linear between the
knots that a profile measured. Eq. 4 sums PTL(sequences left) * (L_i - L_(i-1)) over the lengths in rising order; by
parts that is sum over lanes j = 0, 1, ... of l_j * (PTL(j + 1) - PTL(j)), where l_j is the j-th longest and PTL(0) is
0. On one linear piece the difference is the same for all lanes, so a piece costs one difference of running sums.

Slots. Of more than c trajectories only c run. They are levelled: the longest keep a lane each, and the rest share the
other lanes evenly, a lane of `level` tokens each, as longest-remaining-first scheduling with preemption would have it.
With one linear piece that is a * max(L_max, sum L / c) + b * sum L: the cost LINEAR_INTEGRAL. The waits that a KV
capacity forces cost the curve's step at no sequence at all (its first piece carried on to 0, at least 0), as they do
there.

Invariant: costs never fall as a group grows at its end and never grow as it loses its head, to rounding. For l_j,
sorted, is the larger of L_j and the level, both of which only rise when a trajectory is added or grows; and the
differences of a curve that never falls are >= 0. So a curve that falls somewhere is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle_core.compiled import lean
from treadle_core.errors import CoreError
from treadle_core.model import DecodeCurve
from treadle_core.plan_work import PlanEngine
from treadle_core.ranking import LENGTH, SUM_LENGTHS, Floats

# Columns of a piece: the first lane it holds for, and the seconds a token that each of its lanes adds to a step.
FROM_LANE, LANE_S = range(2)
MOST_SEQUENCES = 1_000_000_000  # at once on one engine; more is a mistake


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
    """(first lane, seconds a token a lane) of each piece; raises InvalidCurveError for `field`."""
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
    """pieces[m, P, 2], padded with pieces that no lane reaches, and base_s[m], the step at no sequence.

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
    table[:, :, LANE_S] = 0.0
    for index, pieces in enumerate(each):
        table[index, : len(pieces)] = pieces
    slopes = table[:, 1, LANE_S] if table.shape[1] > 1 else np.zeros(len(each))
    return table, np.maximum(table[:, 0, LANE_S] - slopes, 0.0)


@lean
def lanes_s(ranks: Floats, pieces: Floats, engine: int, slots: int, first: int, end: int) -> tuple[float, float]:
    """Seconds of eq. 4 for ranks [first, end), and the tokens of the longest lane."""
    lanes = min(end - first, slots)
    own = lanes  # lanes with one trajectory
    level = 0.0
    if end - first > slots:
        low = 0
        high = slots - 1
        while low < high:  # the first lane whose trajectory is no longer than its share of what is left
            middle = (low + high) // 2
            left = ranks[end, SUM_LENGTHS] - ranks[first + middle, SUM_LENGTHS]
            if ranks[first + middle, LENGTH] * (slots - middle) <= left:
                high = middle
            else:
                low = middle + 1
        own = low
        level = (ranks[end, SUM_LENGTHS] - ranks[first + own, SUM_LENGTHS]) / (slots - own)
    longest = ranks[first, LENGTH] if own > 0 else level
    seconds = longest * pieces[engine, 0, LANE_S]
    count = pieces.shape[1]
    for piece in range(1, count):
        begin = pieces[engine, piece, FROM_LANE]
        if begin >= lanes:
            break
        stop = lanes
        if piece + 1 < count and pieces[engine, piece + 1, FROM_LANE] < lanes:
            stop = int(pieces[engine, piece + 1, FROM_LANE])
        start = int(begin)
        tokens = 0.0
        if start < own:
            tokens = ranks[first + min(stop, own), SUM_LENGTHS] - ranks[first + start, SUM_LENGTHS]
        tokens += max(stop - max(start, own), 0) * level
        seconds += tokens * pieces[engine, piece, LANE_S]
    return seconds, longest
