"""`bench controller`: events a second of one controller, on the events of a rollout of 6,400
trajectories.

The events are recorded first, from a model that answers the controller (load.py). Then a new
controller gets them one after the other, without the model, and this is timed. The same events must
give the same number of actions.
"""

import gc
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from treadle_core import planning
from treadle_core.controller import Controller
from treadle_core.events import Event
from treadle_core.model import TREADLE_POLICY, PlacementRule, Policy
from treadle_core.planning import Planner
from treadle_core.tuning import Tuning
from treadle_sim.systems import RankScaling

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.controller.load import World

TRAJECTORIES = 6_400
ENGINES = 64
MICROSECONDS = 1e6

Events = Sequence[tuple[Event, float]]  # with their times

POLICIES = {
    "treadle": TREADLE_POLICY,
    "heddle_as_printed": Policy(reserve=False),
    "cache_aware": Policy(placement=PlacementRule.CACHE_AWARE, migrate=False, reserve=False),
    "least_load": Policy(placement=PlacementRule.LEAST_LOAD, migrate=False, reserve=False),
}
PLANNERS: dict[str, type[Planner]] = {"heddle_as_printed": RankScaling}  # of the others: Treadle's


async def measure(options: BenchOptions) -> dict[str, Any]:
    """events_per_s: the median over repeats under Treadle's policy; the rest by policy and by kind
    of event."""
    planning.warm_up()
    World(200, 4, options.seed, TREADLE_POLICY, Tuning()).run()
    rows: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        options.progress.print(f"{name}: recording {TRAJECTORIES} trajectories")
        planner = PLANNERS.get(name, Planner)
        world = World(TRAJECTORIES, ENGINES, options.seed, policy, Tuning(), planner=planner)
        world.run()
        rows[name] = _measure_policy(world.events, policy, planner, options)
    treadle = rows["treadle"]
    return {
        "events_per_s": treadle["events_per_s"],
        "trajectories": TRAJECTORIES,
        "engines": ENGINES,
        "seed": options.seed,
        "repeats": options.repeats,
        "policies": rows,
    }


def _measure_policy(
    events: Events, policy: Policy, planner: type[Planner], options: BenchOptions
) -> dict[str, Any]:
    gc.collect()
    # the recorded events belong to the bench; garbage of the controller is collected as usual
    gc.freeze()
    try:
        runs, actions = zip(
            *(_replay(events, policy, planner) for _ in range(options.repeats)), strict=True
        )
        if len(set(actions)) != 1:
            raise RuntimeError(f"the same events gave {sorted(set(actions))} actions")
        by_kind = _by_kind(events, policy, planner)
    finally:
        gc.unfreeze()
    rates = [len(events) / seconds for seconds in runs]
    options.progress.print(f"  {statistics.median(rates):,.0f} events a second")
    return {
        "events_per_s": round(statistics.median(rates)),
        "least_events_per_s": round(min(rates)),
        "most_events_per_s": round(max(rates)),
        "events": len(events),
        "actions": actions[0],
        "mix": dict(Counter(type(event).__name__ for event, _ in events).most_common()),
        "us_by_kind": by_kind,
    }


def _replay(events: Events, policy: Policy, planner: type[Planner]) -> tuple[float, int]:
    """Seconds, and the number of actions."""
    controller = Controller(policy, Tuning(), planner=planner)
    actions = 0
    started = time.perf_counter()
    for event, now in events:
        actions += len(controller.on_event(event, now))
    return time.perf_counter() - started, actions


def _by_kind(events: Events, policy: Policy, planner: type[Planner]) -> dict[str, float]:
    """Mean microseconds of an event of each kind, including two clock reads."""
    controller = Controller(policy, Tuning(), planner=planner)
    seconds: dict[str, list[float]] = defaultdict(list)
    for event, now in events:
        started = time.perf_counter()
        controller.on_event(event, now)
        took_s = time.perf_counter() - started
        seconds[type(event).__name__].append(took_s)
    by_sum = sorted(seconds, key=lambda kind: -sum(seconds[kind]))
    return {kind: round(MICROSECONDS * statistics.fmean(seconds[kind]), 1) for kind in by_sum}


BENCH = Bench(
    "controller",
    "Events a second of the scheduler's controller, on the events of 6,400 trajectories on 64 "
    "engines. Takes about 4 minutes.",
    measure,
    decides=("core/treadle_core",),
)
