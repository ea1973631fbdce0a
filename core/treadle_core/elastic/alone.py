"""The decision for one action that nobody waits before, and that has no choice: what `decide` gives, in a tenth of the
time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle_core.elastic.action import Action
from treadle_core.elastic.chunks import Chunk
from treadle_core.elastic.decision import Start
from treadle_core.elastic.pools import Pool


def start_alone(action: Action, pools: Sequence[Pool]) -> Start | None:
    """Where it starts with its least; None: it has to wait. The action has been checked (`action_input`)."""
    node_id: str | None = None
    chunk: Chunk | None = None
    cost = action.cost
    for pool in pools:
        needs = [cost[dimension].least if dimension in cost else 0 for dimension in pool.dimensions]
        if not any(needs):
            continue
        nodes = pool.nodes
        home = -1 if nodes == (None,) or action.node_id is None else nodes.index(action.node_id)
        seat = int(pool.seat(np.array([needs]), np.array([home]))[0])
        if seat < 0:
            return None
        if nodes != (None,):
            node_id = nodes[seat]
        for found in pool.chunks(np.array([needs[0]])):
            chunk = found
    return Start(action, cost[action.key or next(iter(cost))].least, node_id, chunk)
