"""What runs: units that come back, and when. Seconds from now, as numbers; nothing here has a clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from treadle_core.elastic.curves import Floats, Indexes
from treadle_core.errors import CoreError


class InvalidExecutingError(CoreError):
    """An executing action with an end that is no number, units below 0, or on a node or dimension that is not there."""


class Executing(NamedTuple):
    """Units of a dimension that come back in `ends_in_s` seconds, below 0 where the action is overdue.

    node_id: of a dimension that is managed by node. An action that holds several dimensions is several of these.
    scalable: it could have had more or fewer of them, so those that come while it runs are likely to be its like.
    """

    dimension: str
    units: int
    ends_in_s: float
    node_id: str | None = None
    scalable: bool = False


Lane = tuple[str, str | None]  # dimension, node


def by_lane(executing: Sequence[Executing], lanes: Sequence[Lane]) -> Mapping[Lane, tuple[Floats, Indexes, int]]:
    """ends_s and units of what runs on each lane, and how many of it are scalable. An overdue action is expected to end
    now."""
    found: dict[Lane, tuple[list[float], list[int], list[bool]]] = {lane: ([], [], []) for lane in lanes}
    for index, (dimension, units, ends_in_s, node_id, scalable) in enumerate(executing):
        lane = found.get((dimension, node_id))
        if lane is None:
            raise InvalidExecutingError(
                f"executing[{index}].dimension", f"no pool has {dimension!r} on node {node_id!r}"
            )
        if not math.isfinite(ends_in_s):
            raise InvalidExecutingError(f"executing[{index}].ends_in_s", f"must be a number, is {ends_in_s}")
        if not units >= 0:
            raise InvalidExecutingError(f"executing[{index}].units", f"must be at least 0, are {units}")
        lane[0].append(max(ends_in_s, 0.0))
        lane[1].append(units)
        lane[2].append(scalable)
    return {
        lane: (np.array(ends), np.array(units, np.int64), sum(alike)) for lane, (ends, units, alike) in found.items()
    }
