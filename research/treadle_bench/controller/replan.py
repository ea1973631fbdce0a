"""`bench replan`: milliseconds that the controller's process spends on one plan for all live
trajectories.

Measured during a rollout (load.py): the event at which the controller asks for a plan, the solver,
and the event of the plan's arrival (the controller judges it and starts the moves). Where the
placement service solves, that part is spent there, and the time of the gRPC call is added.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from treadle_core import planning
from treadle_core.actions import Action, AskPlan
from treadle_core.events import Event, PlanArrived
from treadle_core.model import TREADLE_POLICY, Policy
from treadle_core.tuning import Tuning
from treadle_sim.systems import Ranks

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.controller.load import DOUBT, World
from treadle_bench.summary import median_of

# (live trajectories, engines); the first size gives the figures at the top level.
SIZES = ((6_400, 64), (1_600, 16), (100, 4), (25_600, 256))
# more trajectories are opened: plans are measured while these close, so that at least the size is
# live
SPARE = 0.06
# Treadle, and a re-plan that trusts its lengths and reserves no KV, which shows what hedging and
# reserving cost.
VARIANTS = {"treadle": (TREADLE_POLICY, DOUBT), "trusting": (Policy(reserve=False), 1.0)}
# A plan at every event that allows one, so that there are many to measure; each plan is the same as
# otherwise.
TUNING = Tuning(plan_interval_s=0.0)
RANK_UPDATES = 20_000
MS = 1e3
PARTS = ("ms", "ask_ms", "solve_ms", "follow_ms")  # of a plan's time: all of it, and its parts


@dataclass
class Timed:
    """Milliseconds of one plan. trajectories: the number that it plans."""

    trajectories: int
    ask_ms: float
    solve_ms: float = 0.0
    follow_ms: float = 0.0

    @property
    def ms(self) -> float:
        """All of it."""
        return self.ask_ms + self.solve_ms + self.follow_ms


class TimedWorld(World):
    """Times each plan, those of the opening burst too."""

    def __init__(
        self, trajectories: int, engines: int, seed: int, policy: Policy, doubt: float
    ) -> None:
        self.plans: dict[int, Timed] = {}
        super().__init__(trajectories, engines, seed, policy, TUNING, doubt)

    def handle(self, event: Event) -> Sequence[Action]:
        """Also record the time where a plan was requested or arrived."""
        started = time.perf_counter()
        actions = super().handle(event)
        took_ms = MS * (time.perf_counter() - started)
        if isinstance(event, PlanArrived):
            self.plans[event.plan_id].follow_ms = took_ms
        elif actions and isinstance(ask := actions[-1], AskPlan):
            self.plans[ask.plan_id] = Timed(len(ask.work), took_ms)
        return actions

    def solve(self, ask: AskPlan) -> PlanArrived:
        """Also record the time. A request at the arrival of another plan is part of that arrival's
        time."""
        self.plans.setdefault(ask.plan_id, Timed(len(ask.work), 0.0))
        started = time.perf_counter()
        event = super().solve(ask)
        self.plans[ask.plan_id].solve_ms = MS * (time.perf_counter() - started)
        return event


async def measure(options: BenchOptions) -> dict[str, Any]:
    """trajectories, ms: the median plan for 6,400 live trajectories on 64 engines; its parts; the
    same of a re-solve that trusts its lengths; other sizes."""
    planning.warm_up()
    World(200, 4, options.seed, TREADLE_POLICY, Tuning()).run()
    rows = [
        _measure_size(live, engines, name, options) for live, engines in SIZES for name in VARIANTS
    ]
    return {
        "trajectories": rows[0]["trajectories"],
        "ms": rows[0]["ms"],
        "engines": rows[0]["engines"],
        "rank_us": round(_rank_us(SIZES[0][0], options), 2),
        "seed": options.seed,
        "repeats": options.repeats,
        "sizes": rows,
    }


def _measure_size(live: int, engines: int, name: str, options: BenchOptions) -> dict[str, Any]:
    plans: list[Timed] = []
    for repeat in range(options.repeats):
        world = TimedWorld(
            live + int(SPARE * live) + 1, engines, options.seed + repeat, *VARIANTS[name]
        )
        world.run(lambda world: world.open < live)
        plans += [
            plan for plan in world.plans.values() if plan.follow_ms and plan.trajectories >= live
        ]
    row = {
        "variant": name,
        "trajectories": min(plan.trajectories for plan in plans),
        "engines": engines,
        "plans": len(plans),
        **{key: median_of((getattr(plan, key) for plan in plans), 3) for key in PARTS},
        "p90_ms": round(float(np.percentile([plan.ms for plan in plans], 90)), 3),
        "most_ms": round(max(plan.ms for plan in plans), 3),
    }
    options.progress.print(f"{name}, {live} trajectories on {engines} engines: {row['ms']} ms")
    return row


def _rank_us(live: int, options: BenchOptions) -> float:
    """Microseconds to set a new length and get its rank, among `live` trajectories."""
    rng = np.random.default_rng(options.seed)
    ranks, names = Ranks(), [f"t{number}" for number in range(live)]
    for name, length in zip(names, rng.lognormal(8.0, 1.0, live).tolist(), strict=True):
        ranks.put(name, length)
    numbers, lengths = rng.integers(0, live, RANK_UPDATES), rng.lognormal(8.0, 1.0, RANK_UPDATES)
    updates = [
        (names[number], length) for number, length in zip(numbers, lengths.tolist(), strict=True)
    ]
    took: list[float] = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        for name, length in updates:
            ranks.put(name, length)
            ranks.rank(name)
        took.append(time.perf_counter() - started)
    return 1e6 * statistics.median(took) / RANK_UPDATES


BENCH = Bench(
    "replan",
    "Milliseconds of one plan for 6,400 live trajectories: asking, solving, judging. Takes about "
    "a minute.",
    measure,
    decides=("core/treadle_core",),
)
