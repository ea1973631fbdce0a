"""Question to the placement, and the checks of every figure that placement reads.

Trajectories come as columns, which are all of one length and never written. A NaN, a negative
figure or an engine that can hold nothing is refused here, so that no kernel meets it; an error's
`field` is the path of the input in a request of the placement service. Whole arrays are checked at
once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, Names
from treadle_core.model import DecodeCurve
from treadle_core.refusals import CoreError


@dataclass(frozen=True, slots=True)
class PlanEngine:
    """An engine as the placement reads it."""

    engine_id: str
    slot_limit: int
    kv_tokens_capacity: int
    tensor_parallel: int
    decode_curve: DecodeCurve


def slowest_curve(curves: Sequence[DecodeCurve]) -> DecodeCurve:
    """Return the worst of each figure, which stands in for the curve of an engine beside these:
    never better than a measured one."""
    # 0: unknown
    rates = [curve.prefill_tokens_per_s for curve in curves if curve.prefill_tokens_per_s]
    return DecodeCurve(
        max(curve.base_s for curve in curves),
        max(curve.per_sequence_s for curve in curves),
        max(curve.per_kv_token_s for curve in curves),
        min(rates, default=0.0),
        max(curve.prefill_pair_s for curve in curves),
    )


@dataclass(frozen=True, eq=False)
class PlanWork:
    """Work of a plan; entry i of each column is about one trajectory: its row among the names,
    tokens left to sample, tokens of context now, index (in the question) of its engine, -1 for
    none, standard deviation of ln(remaining_tokens), tokens that the cap leaves (inf without one),
    tokens of tools' answers left, seconds of tools left, whether it runs on its engine, whether
    that has read its context, and a number that samples of one prompt share."""

    names: Names
    rows: Indexes
    remaining_tokens: Floats
    context_tokens: Floats
    current: Indexes
    log_sigma: Floats
    room_tokens: Floats
    observed_tokens: Floats
    tool_s: Floats
    started: Flags
    read: Flags
    prompts: Indexes

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def trajectory_ids(self) -> tuple[str, ...]:
        """Return the ids; they are made on demand, as few callers need them."""
        return tuple(self.names[self.rows].tolist())

    def __eq__(self, other: object) -> bool:
        columns = [field.name for field in fields(self) if field.name not in ("names", "rows")]
        return (
            isinstance(other, PlanWork)
            and self.trajectory_ids == other.trajectory_ids
            and all(
                np.array_equal(getattr(self, column), getattr(other, column)) for column in columns
            )
        )


# Figures beyond these are mistakes, and sums and products could leave the range of floats.
MOST_SECONDS = 1e12
LEAST_SECONDS = 1e-18  # or 0
MOST_TOKENS = 1e15
MOST_LOG_SIGMA = 10.0  # a factor of 20,000 either way
LEAST_PREFILL_TOKENS_PER_S = 1e-6


class InvalidEngineError(CoreError):
    """An engine that cannot be planned for: slot_limit < 1, a negative or undefined figure, or an
    id twice."""


class NoEnginesError(CoreError):
    """There is no engine to place on."""


class InvalidTrajectoryError(CoreError):
    """A trajectory with a length or context that is not a finite number >= 0, or an id twice."""


class NothingFitsError(InvalidTrajectoryError):
    """A trajectory whose context alone is more than any engine's KV holds."""


def check_workload(lengths: Floats, contexts: Floats) -> None:
    """Raise InvalidTrajectoryError that names the first bad figure."""
    check_column("remaining_tokens", lengths, len(lengths))
    check_column("context_tokens", contexts, len(lengths))


def check_column(
    name: str, values: Floats | Indexes, count: int, least: float = 0.0, most: float = MOST_TOKENS
) -> None:
    """Raise InvalidTrajectoryError for another number of figures than `count`, or one that is out
    of range."""
    if values.shape != (count,):
        raise InvalidTrajectoryError(
            "trajectories", f"there are {count}, but {name} is {values.shape}"
        )
    if count == 0 or (values.min() >= least and values.max() <= most):  # NaN fails both
        return
    index = int(np.argmax(~((values >= least) & (values <= most))))
    raise InvalidTrajectoryError(
        f"trajectories[{index}].{name}",
        f"must be a number from {least:g} to {most:g}, is {float(values[index])}",
    )


def check_fit(contexts: Floats, capacities: Floats) -> None:
    """Raise NothingFitsError for a context that no engine's KV holds; capacities in tokens, inf
    where unknown."""
    most = float(capacities.max())
    if len(contexts) and contexts.max() > most:
        index = int(np.argmax(contexts > most))
        raise NothingFitsError(
            f"trajectories[{index}].context_tokens",
            f"{float(contexts[index]):g} tokens fit on no engine: the largest holds {most:g}",
        )


# Figures of an engine, in the columns of `check_engines`: path, least, most, and whether it may be
# 0 besides.
FIGURES = (
    ("decode_curve.base_s", LEAST_SECONDS, MOST_SECONDS, True),
    ("decode_curve.per_sequence_s", LEAST_SECONDS, MOST_SECONDS, True),
    ("decode_curve.per_kv_token_s", LEAST_SECONDS, MOST_SECONDS, True),
    ("slot_limit", 1, math.inf, False),
    ("kv_tokens_capacity", 0, math.inf, False),
    ("decode_curve.prefill_tokens_per_s", LEAST_PREFILL_TOKENS_PER_S, MOST_TOKENS, True),
    ("tensor_parallel", 1, math.inf, False),
    ("decode_curve.prefill_pair_s", LEAST_SECONDS, MOST_SECONDS, True),
)
PATHS, LEAST, MOST, OR_ZERO = zip(*FIGURES, strict=True)
READ_FIGURES = attrgetter(*PATHS)


def check_engines(engines: Sequence[PlanEngine]) -> Floats:
    """Check the engines and return rows[m, 8]: base_s, per_sequence_s, per_kv_token_s, slots, KV
    tokens (inf where unknown), seconds a prefilled token (0 where unknown), tensor_parallel,
    prefill_pair_s.

    Raises NoEnginesError or InvalidEngineError naming the first bad figure.
    """
    if not engines:
        raise NoEnginesError("engines", "at least one engine is needed")
    rows = np.array([READ_FIGURES(engine) for engine in engines], np.float64)
    good = ((rows >= LEAST) & (rows <= MOST)) | ((rows == 0.0) & OR_ZERO)
    if not good.all():
        index, column = (int(at[0]) for at in np.nonzero(~good))
        limits = (
            f"at least {LEAST[column]}"
            if MOST[column] == math.inf
            else f"{LEAST[column]:g} to {MOST[column]:g}"
        )
        raise InvalidEngineError(
            f"engines[{index}].{PATHS[column]}",
            f"must be {'0 or ' if OR_ZERO[column] else ''}{limits}, is {rows[index, column]:g}",
        )
    if (rows[:, 0] + rows[:, 1] <= 0.0).any():
        index = int(np.argmin(rows[:, 0] + rows[:, 1]))
        raise InvalidEngineError(
            f"engines[{index}].decode_curve",
            "base_s + per_sequence_s must be > 0: a step takes time",
        )
    capacity, rate = rows[:, 4], rows[:, 5]
    capacity[capacity == 0.0] = np.inf
    np.divide(1.0, rate, out=rate, where=rate > 0.0)
    return rows
