"""What a resource plan is asked of, checked: kinds of engine, the GPU budget, and the error that names a bad figure.

Invariant: an error's `field` is the path of the input as the caller of `allocation.allocate` wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_core.model import DecodeCurve
from treadle_core.placing.costs import CostModel, Floats
from treadle_core.placing.question import (
    InvalidEngineError,
    InvalidTrajectoryError,
    NoEnginesError,
    PlanEngine,
    engine_rows,
)
from treadle_core.refusals import CoreError

# More GPUs than this are a mistake; the search takes memory in proportion.
MOST_GPUS = 1_000_000
PLANNED_MODELS = (CostModel.GROUP_SIZE, CostModel.LINEAR_INTEGRAL)


class InvalidBudgetError(CoreError):
    """A number of GPUs that is no number of GPUs, or that no engines of the kinds that fit add up to."""


class NoKindFitsError(CoreError):
    """No kind of engine both fits the budget and holds its weights and the longest trajectory's KV."""


class InvalidModelError(CoreError):
    """A cost model that resource plans have no lower bound for; see PLANNED_MODELS."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine that could be started: the model on `gpus` GPUs, a degree that occurs once among the kinds.

    slot_limit: sequences that decode at once. kv_tokens_capacity: KV tokens that fit beside the weights; None: unknown,
    taken as enough; 0: not even the weights fit.
    """

    gpus: int
    slot_limit: int
    kv_tokens_capacity: int | None
    decode_curve: DecodeCurve


def dealable(degrees: Sequence[int], gpus: int) -> npt.NDArray[np.bool_]:
    """By number of GPUs, 0 to `gpus`: whether engines of these degrees add up to it."""
    reachable = np.zeros(gpus + 1, np.bool_)
    reachable[0] = True
    for degree in degrees:
        for start in range(min(degree, gpus + 1)):
            reachable[start::degree] = np.logical_or.accumulate(reachable[start::degree])
    return reachable


def holds(kind: EngineKind, kv_tokens: float) -> bool:
    """Whether the weights fit and, beside them, that much KV."""
    return kind.kv_tokens_capacity is None or 0 < kind.kv_tokens_capacity >= kv_tokens


def as_engine(kind: EngineKind) -> PlanEngine:
    """As the cost models read it, where a capacity of 0 means unknown."""
    return PlanEngine(
        f"x{kind.gpus}", kind.slot_limit, kind.kv_tokens_capacity or 0, max(kind.gpus, 1), kind.decode_curve
    )


def check_kinds(kinds: Sequence[EngineKind]) -> None:
    """Raises NoEnginesError, or InvalidEngineError naming the first bad figure."""
    if not kinds:
        raise NoEnginesError("kinds", "at least one kind of engine is needed")
    seen: set[int] = set()
    for index, kind in enumerate(kinds):
        if isinstance(kind.gpus, bool) or not isinstance(kind.gpus, int | np.integer) or kind.gpus < 1:
            raise InvalidEngineError(f"kinds[{index}].gpus", f"must be a whole number >= 1, is {kind.gpus!r}")
        if kind.gpus in seen:
            raise InvalidEngineError(f"kinds[{index}].gpus", f"{kind.gpus} comes twice")
        seen.add(kind.gpus)
        if kind.kv_tokens_capacity is not None and not kind.kv_tokens_capacity >= 0:  # NaN fails too
            raise InvalidEngineError(
                f"kinds[{index}].kv_tokens_capacity", f"must be >= 0 or unknown, is {kind.kv_tokens_capacity}"
            )
        if kind.kv_tokens_capacity == 0:  # never started: what else it says does not matter
            continue
        try:
            engine_rows([as_engine(kind)])
        except InvalidEngineError as error:
            raise InvalidEngineError(error.field.replace("engines[0]", f"kinds[{index}]"), error.description) from None


def tokens(name: str, values: npt.ArrayLike) -> Floats:
    """One number a trajectory. Raises InvalidTrajectoryError where it is not that."""
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise InvalidTrajectoryError(f"trajectories.{name}", "must be numbers, one a trajectory") from None
    if found.ndim != 1:
        raise InvalidTrajectoryError(f"trajectories.{name}", f"must be one number a trajectory, is {found.ndim}-d")
    return found
