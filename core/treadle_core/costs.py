"""What it costs an engine to run a group of trajectories: the cost models that placement minimises.

Purpose: describe engines and trajectories as arrays, sorted and summed once, so that the cost of any contiguous
group of the sorted order is O(1) (`group_cost`).
Invariant, on which the exactness of the solver rests: for one engine the cost of the group [first, end) of the
descending order never falls when `end` grows and never grows when `first` grows, in floating point too (prefix sums
of what is not negative). Owner: `Costs` is built by `tabulate` and read by the solver, the bound and the oracle;
nobody changes it.

Cost models, in seconds; an engine decodes a step of a batch in a + b * batch + k * KV tokens (`model.DecodeCurve`):
- GROUP_SIZE, Heddle eq. 2: F(size) * L_max * T. F * T is the step time at `size` sequences of the workload's mean
  context; beyond the slot limit the group queues, and F grows in proportion to size / slots.
- LINEAR_INTEGRAL, DARTS eq. 4 with a linear engine:
  a * max(L_max, sum L / slots, sum Q / kv_capacity) + b * sum L + k * sum Q + sum P / prefill_rate.
  Q = L * (context + L / 2): KV tokens read over the life of a trajectory, whose context grows by one a step.
  sum Q / kv_capacity is the bound that KV sets: capacity over the token-weighted mean context sequences run at once
  (weighted so, because with a mean over trajectories a short one would make its group cheaper). P: context that must be
  prefilled, 0 where the trajectory has an engine (a move there brings its KV along while a tool runs).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle_core.actions import PlanEngine
from treadle_core.compiled import compiled
from treadle_core.errors import CoreError

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]

# Beyond these a figure is a mistake, and sums and products could leave the floats.
MOST_SECONDS = 1e12
LEAST_SECONDS = 1e-18  # or 0
MOST_TOKENS = 1e15
LEAST_PREFILL_TOKENS_PER_S = 1e-6


class InvalidEngineError(CoreError):
    """An engine that cannot be planned for: slot_limit < 1, a negative or undefined figure, or an id twice."""


class NoEnginesError(CoreError):
    """There is nothing to place on."""


class InvalidTrajectoryError(CoreError):
    """A trajectory with a length or context that is not a finite number >= 0, or an id twice."""


class CostModel(enum.IntEnum):
    GROUP_SIZE = 1
    LINEAR_INTEGRAL = 2


class Table(NamedTuple):
    """What the kernels read: a workload, longest first, and the engines in the order in which they take it.

    `engines` has one row an engine: base_s, per_sequence_s, per_kv_token_s, slots, KV tokens (inf where unknown),
    seconds a prefilled token. `lengths` has n entries; the sums have n + 1, the first of them 0.
    """

    model: int
    engines: Floats
    lengths: Floats
    sum_lengths: Floats
    sum_kv: Floats
    sum_prefill: Floats


@dataclass(frozen=True)
class Costs:
    """A table and the way back: `order[r]` and `engine_order[e]` are the caller's indexes of rank r and engine e."""

    table: Table
    order: Indexes
    engine_order: Indexes


@compiled
def group_cost(table: Table, engine: int, first: int, end: int) -> float:
    """Seconds for `engine` to finish ranks [first, end); 0 for an empty group."""
    if end <= first:
        return 0.0
    row = table.engines[engine]
    slots = row[3]
    longest = table.lengths[first]
    if table.model == 1:  # CostModel.GROUP_SIZE; kernels read plain numbers
        size = float(end - first)
        if size <= slots:
            return float((row[0] + row[1] * size) * longest)
        return float((row[0] + row[1] * slots) * (size / slots) * longest)
    work = table.sum_lengths[end] - table.sum_lengths[first]
    kv_work = table.sum_kv[end] - table.sum_kv[first]
    prefill = table.sum_prefill[end] - table.sum_prefill[first]
    steps = max(longest, work / slots, kv_work / row[4])
    return float(row[0] * steps + row[1] * work + row[2] * kv_work + row[5] * prefill)


def tabulate(
    model: CostModel,
    lengths: Floats,
    contexts: Floats,
    placed: npt.NDArray[np.bool_],
    engines: Sequence[PlanEngine],
) -> Costs:
    """Sorts and sums a workload: lengths and contexts in tokens, `placed` where some engine has a trajectory's KV.

    Trajectories of equal length keep the caller's order. Engines come fastest first (seconds a token alone), then by
    parallelism, then fewest slots: the head of the order are few and long. Raises InvalidTrajectoryError,
    InvalidEngineError, NoEnginesError.
    """
    check_workload(lengths, contexts)
    check_engines(engines)
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    kv_work = descending * (contexts[order] + 0.5 * descending)
    prefill = np.where(placed[order], 0.0, contexts[order])
    total = float(descending.sum())
    mean_context = float(kv_work.sum()) / total if total > 0.0 else 0.0
    table = np.array([engine_row(engine) for engine in engines])
    if model is CostModel.GROUP_SIZE:  # F sees the group's size alone: the mean context stands in for each one's
        table[:, 1] += table[:, 2] * mean_context
    alone_s = table[:, 0] + table[:, 1] + (table[:, 2] * mean_context if model is CostModel.LINEAR_INTEGRAL else 0.0)
    parallel = np.array([engine.tensor_parallel for engine in engines])
    engine_order = np.lexsort((table[:, 4], table[:, 3], -parallel, alone_s))
    rows = Table(
        model=int(model),
        engines=np.ascontiguousarray(table[engine_order]),
        lengths=descending,
        sum_lengths=prefix_sums(descending),
        sum_kv=prefix_sums(kv_work),
        sum_prefill=prefix_sums(prefill),
    )
    return Costs(rows, order, engine_order)


def engine_row(engine: PlanEngine) -> tuple[float, float, float, float, float, float]:
    curve = engine.decode_curve
    capacity = float(engine.kv_tokens_capacity) if engine.kv_tokens_capacity else np.inf
    prefill_s = 1.0 / curve.prefill_tokens_per_s if curve.prefill_tokens_per_s else 0.0
    return (curve.base_s, curve.per_sequence_s, curve.per_kv_token_s, float(engine.slot_limit), capacity, prefill_s)


def prefix_sums(values: Floats) -> Floats:
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums


def check_workload(lengths: Floats, contexts: Floats) -> None:
    """Raises InvalidTrajectoryError naming the first bad figure."""
    if len(contexts) != len(lengths):
        raise InvalidTrajectoryError("trajectories", f"{len(lengths)} lengths but {len(contexts)} contexts")
    for name, values in (("remaining_tokens", lengths), ("context_tokens", contexts)):
        bad = ~((values >= 0.0) & (values <= MOST_TOKENS))  # NaN fails both
        if bad.any():
            index = int(np.argmax(bad))
            raise InvalidTrajectoryError(
                f"trajectories[{index}].{name}",
                f"must be a number from 0 to {MOST_TOKENS:g}, is {float(values[index])}",
            )


def check_engines(engines: Sequence[PlanEngine]) -> None:
    """Raises NoEnginesError, or InvalidEngineError naming the first bad figure."""
    if not engines:
        raise NoEnginesError("engines", "at least one engine is needed")
    for index, engine in enumerate(engines):
        at = f"engines[{index}]"
        for name, value, least in (
            ("slot_limit", engine.slot_limit, 1),
            ("kv_tokens_capacity", engine.kv_tokens_capacity, 0),
            ("tensor_parallel", engine.tensor_parallel, 1),
        ):
            if value < least:
                raise InvalidEngineError(f"{at}.{name}", f"must be >= {least}, is {value}")
        curve = engine.decode_curve
        for name, seconds in (
            ("base_s", curve.base_s),
            ("per_sequence_s", curve.per_sequence_s),
            ("per_kv_token_s", curve.per_kv_token_s),
        ):
            if seconds != 0.0 and not LEAST_SECONDS <= seconds <= MOST_SECONDS:
                raise InvalidEngineError(
                    f"{at}.decode_curve.{name}",
                    f"must be 0 or a number from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, is {seconds}",
                )
        rate = curve.prefill_tokens_per_s
        if rate != 0.0 and not LEAST_PREFILL_TOKENS_PER_S <= rate <= MOST_TOKENS:
            raise InvalidEngineError(
                f"{at}.decode_curve.prefill_tokens_per_s",
                f"must be 0 or a number from {LEAST_PREFILL_TOKENS_PER_S:g} to {MOST_TOKENS:g}, is {rate}",
            )
        if curve.base_s + curve.per_sequence_s <= 0.0:
            raise InvalidEngineError(f"{at}.decode_curve", "base_s + per_sequence_s must be > 0: a step takes time")
