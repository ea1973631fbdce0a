"""Heddle's Tables 1 and 2: seconds of tools, and what prediction, migration, placement and resource
plans add.

`rows`, one for each workload and model: `tool_s`: a mean call. `predict_s`: an answer of the
estimator without a model, measured (the simulator takes `assumed_predict_s` instead). `move_s`:
from the request for a move to the switch of the owner, median over the `moves` that a simulated
rollout made of `moves_asked`. `masked`: the fraction of moves that ended before their tool call.
`median_context_move_s`: the transfer alone, of a median context. `placement_ms`, `resources_ms`:
measured on the same trajectories. Tools and moves are simulated, milliseconds are measured.
"""

import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np
from rich.progress import track
from treadle_core.actions import Action, StartMigration
from treadle_core.events import Event, MoveEnded, ToolFinished
from treadle_core.placing.placement import plan as plan_placement
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.workload import Workspace
from treadle_sim.allocation.plan import allocate
from treadle_sim.cluster import Cluster, Latencies
from treadle_sim.driver import Driver
from treadle_sim.predictors import Noisy, Siblings
from treadle_sim.systems import TREADLE, Setting, choose_cluster, engine_kinds, known_lengths

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.rollouts import ACCELERATOR, SMALL_SCALE, batch_for, setting_of, workloads
from treadle_bench.summary import milliseconds, rounded

MODELS = ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
ANSWERS = 400  # of the estimator, that are timed
PLANS = 5  # timed in each repeat
DIGITS = 5
# Heddle's Tables 1 and 2, seconds: tool, prediction, migration, placement, resource manager.
PAPER = {
    ("coding", "Qwen3-8B"): (0.46, 0.103, 0.26, 0.036, 5.69),
    ("search", "Qwen3-8B"): (1.42, 0.15, 0.12, 0.037, 5.27),
    ("math", "Qwen3-8B"): (0.051, 0.26, 0.24, 0.036, 5.06),
    ("coding", "Qwen3-14B"): (0.41, 0.099, 0.27, 0.038, 5.05),
    ("search", "Qwen3-14B"): (1.41, 0.15, 0.15, 0.037, 4.99),
    ("math", "Qwen3-14B"): (0.046, 0.27, 0.25, 0.036, 4.97),
    ("coding", "Qwen3-32B"): (0.45, 0.104, 0.35, 0.037, 5.06),
    ("search", "Qwen3-32B"): (1.43, 0.16, 0.27, 0.038, 5.01),
    ("math", "Qwen3-32B"): (0.054, 0.28, 0.33, 0.036, 4.98),
}


class MoveLog:
    """Records the moves of a rollout. seconds: of each move that was made; early: how many of them
    ended before their tool call; asked: how many were started."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.early = 0
        self.asked = 0
        self._asked_s: dict[str, float] = {}
        self._tool_over: set[str] = set()

    def __call__(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        """Record one event and the controller's actions."""
        if isinstance(event, MoveEnded) and event.trajectory_id in self._asked_s:
            asked_s = self._asked_s.pop(event.trajectory_id)
            if event.moved:
                self.seconds.append(now - asked_s)
                self.early += event.trajectory_id not in self._tool_over
        elif isinstance(event, ToolFinished):
            self._tool_over.add(event.trajectory_id)
        for action in actions:
            if isinstance(action, StartMigration):
                self.asked += 1
                self._asked_s[action.trajectory_id] = now
                self._tool_over.discard(action.trajectory_id)


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError, OSError."""
    scale = options.scale or SMALL_SCALE
    cells = [(name, llm) for llm in MODELS for name in workloads(options)]
    bar = track(cells, "heddle-tables", console=options.progress, transient=True)
    rows = [_row(name, llm, scale, options) for name, llm in bar]
    return {
        "accelerator": ACCELERATOR,
        "gpus": batch_for(*cells[0], scale, options.seed, options).gpus,
        "assumed_predict_s": Latencies().predict_s,
        "scale": scale,
        "seeds": [options.seed],
        "repeats": options.repeats,
        "rows": rows,
    }


def _row(name: str, llm: str, scale: float, options: BenchOptions) -> dict[str, Any]:
    full = setting_of(batch_for(name, llm, 1.0, options.seed, options))
    small = setting_of(batch_for(name, llm, scale, options.seed, options))
    calls = [step.tool_s for work in full.workload.trajectories for step in work.steps]
    moves = MoveLog()
    cluster = Cluster(choose_cluster(TREADLE, small).engines, small.link, small.latencies)
    predictor = Noisy(small.workload, small.seed)
    Driver(small.workload, cluster, TREADLE.policy, TREADLE.tuning, predictor, log=moves).run()
    resources_ms, placement_ms = _plan_ms(full, options.repeats)
    link, kv_bytes = small.link, small.models[0].kv_bytes_per_token
    contexts = [work.prompt_tokens + work.gen_tokens for work in full.workload.trajectories]
    row: dict[str, Any] = {
        "workload": name,
        "model": llm,
        "trajectories": len(full.workload.trajectories),
        "tool_s": mean(calls),
        "predict_s": _predict_s(full),
        "moves": len(moves.seconds),
        "moves_asked": moves.asked,
        "move_s": median(moves.seconds) if moves.seconds else None,
        "masked": moves.early / len(moves.seconds) if moves.seconds else None,
        "median_context_move_s": link.fixed_s + median(contexts) * kv_bytes / link.bytes_per_s,
        "placement_ms": placement_ms,
        "resources_ms": resources_ms,
    }
    return rounded(row, DIGITS)


def _predict_s(setting: Setting) -> float:
    """Seconds of one answer of the estimator that knows an earlier epoch of the same prompts."""
    siblings = Siblings(setting.workload, setting.earlier)
    asked = min(ANSWERS, len(setting.workload.trajectories))
    began = time.perf_counter()
    for index in range(asked):
        siblings.predict(index, 0, 0)
    return (time.perf_counter() - began) / asked


def _plan_ms(setting: Setting, repeats: int) -> tuple[float, float]:
    """Milliseconds of the resource plan, and of the placement of all trajectories on its
    engines."""
    lengths, contexts = known_lengths(setting, "noisy")
    kinds = engine_kinds(setting.models)
    plan = allocate(lengths, contexts, setting.gpus, kinds)
    engines = [
        PlanEngine(
            f"e{index}", kind.slot_limit, kind.kv_tokens_capacity or 0, kind.gpus, kind.decode_curve
        )
        for index, planned in enumerate(plan.engines)
        for kind in kinds
        if kind.gpus == planned.gpus
    ]
    nowhere, workspace = np.full(len(lengths), -1), Workspace()
    resources = milliseconds(
        lambda: allocate(lengths, contexts, setting.gpus, kinds), repeats, PLANS
    )
    placement = milliseconds(
        lambda: plan_placement(lengths, contexts, nowhere, engines, workspace=workspace),
        repeats,
        PLANS,
    )
    return median(resources), median(placement)


BENCH = Bench(
    "heddle-tables",
    "Heddle's Tables 1 and 2: what prediction, moves, placement and resource plans add. Takes "
    "about 2 minutes.",
    measure,
    page=lambda found: {"paper": PAPER},
)
