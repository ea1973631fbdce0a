"""How long one decision of the elastic scheduler takes, in real milliseconds.

1,536 waiting actions and 1,280 cores, as one pool and as ten nodes of 128, with none, half and 90%
of the cores in use, half of these by elastic actions. Quantiles are over random queues; the first
decision, which compiles, is not counted, and the garbage collector is off.
"""

import gc
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from treadle_core.tools.action import Action, Amdahl, Demand, Elasticity, Fixed, Measured, Range
from treadle_core.tools.action import UnitSet as Units
from treadle_core.tools.decision import ActionQueue, Executing, decide
from treadle_core.tools.pools import CpuNodes, FlatPool, Pool, capacities

from treadle_bench.tools.setting import Plan

CORES = 1_280
DECISIONS_OF_A_DRAW = 40  # enough that the 99th percentile of a state is not its slowest decision
GIB = 1 << 30
SHAPES = ("range", "wide range", "set", "wide set", "linear", "rough", "mixed")


Took = tuple[float, float]  # milliseconds of one decision: wall time and processor time


def measure(plan: Plan) -> dict[str, Any]:
    setting = plan.setting
    rows: list[dict[str, Any]] = []
    everything: list[Took] = []
    plan.report("decisions")
    for shape, nodes, busy in itertools.product(SHAPES, (1, 10), (0.0, 0.5, 0.9)):
        states = [draw_state(shape, nodes, busy, setting.waiting, seed) for seed in plan.seeds]
        started = float(np.mean([len(decide(*state, typical_s=5.0)) for state in states]))
        took = [each for state in states for each in _time_decisions(state)]
        rows.append(
            {"shape": shape, "nodes": nodes, "busy": busy, **quantiles(took), "started": started}
        )
        everything += took
    worst = {
        f"worst_row_{key}": max(row[key] for row in rows) for key in ("p99_ms", "processor_p99_ms")
    }
    return {
        "waiting": setting.waiting,
        "cores": CORES,
        "count": len(everything),
        "load_1m": round(os.getloadavg()[0], 1),
        **quantiles(everything),
        **worst,
        "rows": rows,
    }


def quantiles(took: Sequence[Took]) -> dict[str, float]:
    """Quantiles of wall time, and of processor time, which other programs on the machine lengthen
    less."""
    wall, processor = np.array(took).T
    found = {
        f"{name}p{share}_ms": round(float(np.percentile(times, share)), 3)
        for name, times in (("", wall), ("processor_", processor))
        for share in (50, 99)
    }
    return {**found, "max_ms": round(float(wall.max()), 3)}


def _time_decisions(state: tuple[ActionQueue, list[Pool], list[Executing]]) -> list[Took]:
    found = []
    gc.disable()
    try:
        for _ in range(DECISIONS_OF_A_DRAW):
            began, worked = time.perf_counter(), time.thread_time()
            decide(*state, typical_s=5.0)
            found.append((1e3 * (time.perf_counter() - began), 1e3 * (time.thread_time() - worked)))
    finally:
        gc.enable()
    return found


def demand(shape: str, rng: np.random.Generator) -> tuple[Demand, Elasticity]:
    """The resources that an action of this shape may have, and how it scales with them."""
    amdahl = Amdahl(float(rng.uniform(0.0, 0.3)))
    if shape == "mixed":
        return demand(str(rng.choice(["range", "wide range", "set", "rough"])), rng)
    if shape == "rough":  # measured, not convex
        levels = np.sort(rng.uniform(0.3, 1.0, 16))[::-1].tolist()
        return Range(1, 16), Measured(tuple(enumerate(levels, 1)))
    shapes: Mapping[str, tuple[Demand, Elasticity]] = {
        "range": (Range(1, 32), amdahl),
        "wide range": (Range(4, 32), amdahl),
        "set": (Units((1, 2, 4, 8)), amdahl),
        "wide set": (Units((4, 8, 16, 32)), amdahl),
        "linear": (Range(4, 32), Amdahl(0.0)),
    }
    return shapes[shape]


def draw_state(
    shape: str, nodes: int, busy: float, waiting_count: int, seed: int
) -> tuple[ActionQueue, list[Pool], list[Executing]]:
    """A random state. One action in ten has no known duration, and seven in ten must run on their
    trajectory's node."""
    rng = np.random.default_rng(seed)
    size = CORES // nodes
    held = int(size * busy)
    names = [f"n{node}" if nodes > 1 else None for node in range(nodes)]
    executing = [
        Executing("cpu_cores", 2, float(rng.exponential(20.0)), name, at % 2 == 0)
        for name in names
        for at in range(held // 2)
    ]
    free = size - held // 2 * 2
    pools: list[Pool] = [FlatPool("cpu_cores", size, free)]
    if nodes > 1:
        pools = [
            CpuNodes(
                [f"n{at}" for at in range(nodes)],
                [(size, 1024 * GIB)] * nodes,
                [(free, 1024 * GIB)] * nodes,
            )
        ]
    waiting = ActionQueue(capacities(pools))
    for index in range(waiting_count):
        units, elasticity = demand(shape, rng)
        known = rng.random() < 0.9
        took_s = float(rng.lognormal(2.0, 1.2))
        single_unit_s = took_s if known else None
        home = names[int(rng.integers(nodes))] if rng.random() < 0.7 else None
        cost: dict[str, Demand] = {"cpu_cores": units}
        if nodes > 1 and home is None:
            cost["memory_bytes"] = Fixed(GIB // 4)
        waiting.add(
            Action(
                f"a{index}", f"t{index}", index, cost, single_unit_s, "cpu_cores", elasticity, home
            )
        )
    return waiting, pools, executing
