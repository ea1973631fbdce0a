"""A placement question and its answer: engines, the cost that is minimised, and the trajectories, one by one or as
columns without an object for each.

Invariants: all columns of one value are of one length; nobody writes to them. Two values are equal where their columns
are.
"""

import enum
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treadle_core.model import DecodeCurve
from treadle_core.worksheet import Floats, Indexes, Names


class CostModel(enum.IntEnum):
    """What a group of trajectories costs an engine; see `costs`."""

    GROUP_SIZE = 1
    LINEAR_INTEGRAL = 2
    PIECEWISE_INTEGRAL = 3


@dataclass(frozen=True, slots=True)
class PlanTrajectory:
    """A trajectory as the placement sees it. log_sigma: standard deviation of ln(remaining_tokens), 0 for certain;
    room_tokens: what its cap leaves."""

    trajectory_id: str
    remaining_tokens: float
    context_tokens: int
    current_engine_id: str
    log_sigma: float = 0.0
    room_tokens: float = math.inf


@dataclass(frozen=True, slots=True)
class PlanEngine:
    """An engine as the placement sees it."""

    engine_id: str
    slot_limit: int
    kv_tokens_capacity: int
    tensor_parallel: int
    decode_curve: DecodeCurve


@dataclass(frozen=True, eq=False)
class PlanWork:
    """Column i speaks of one trajectory: its row among the names, tokens left to sample, tokens of context now, index
    (in the question) of the engine that holds the context, -1 where none does, standard deviation of
    ln(remaining_tokens), tokens that the cap leaves (inf without one)."""

    names: Names
    rows: Indexes
    remaining_tokens: Floats
    context_tokens: Floats
    current: Indexes
    log_sigma: Floats
    room_tokens: Floats

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def trajectory_ids(self) -> tuple[str, ...]:
        """The ids, made when they are asked for: who answers by `EngineOf` needs none."""
        return tuple(self.names[self.rows].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanWork) and (
            self.trajectory_ids == other.trajectory_ids
            and np.array_equal(self.remaining_tokens, other.remaining_tokens)
            and np.array_equal(self.context_tokens, other.context_tokens)
            and np.array_equal(self.current, other.current)
            and np.array_equal(self.log_sigma, other.log_sigma)
            and np.array_equal(self.room_tokens, other.room_tokens)
        )

    def __hash__(self) -> int:
        return hash((self.remaining_tokens.tobytes(), self.current.tobytes()))


@dataclass(frozen=True, eq=False)
class EngineOf:
    """For each trajectory of a question, in its order, the index of its engine there."""

    indexes: Indexes

    def __len__(self) -> int:
        return len(self.indexes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineOf) and np.array_equal(self.indexes, other.indexes)

    def __hash__(self) -> int:
        return hash(self.indexes.tobytes())
