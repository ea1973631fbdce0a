"""Heddle's Tables 1 and 2: what tools take, and what prediction, migration, placement and resource plans add.

`rows`, a cell of workload and model each: `tool_s` a mean call; `predict_s` of the product's own estimator (which
answers from other samples; a learned one is not there yet, `assumed_predict_s` is what the simulator takes instead);
`move_s` from asking for a move to the switch, over all moves of a simulated rollout, and `moves` of them with
`move_bytes`, mean KV; `masked` the part that was over before its tool call; `placement_ms` and `resources_ms` measured
on the same trajectories. Tools, moves and bytes are simulated, milliseconds are measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

import numpy as np
from rich.progress import Progress
from treadle_core.actions import Action, StartMigration
from treadle_core.events import Event, MoveEnded, ToolFinished
from treadle_core.placing.placement import Workspace, plan_arrays
from treadle_core.placing.question import PlanEngine
from treadle_sim.allocation.plan import EngineKind, allocate
from treadle_sim.cluster import Cluster, Latencies
from treadle_sim.driver import Driver
from treadle_sim.predictors import Noisy, Siblings
from treadle_sim.rollout import Setting, choose_cluster, known_lengths
from treadle_sim.systems import TREADLE

from treadle_bench.options import BenchOptions
from treadle_bench.page import MACHINE, command, paragraph, point, table
from treadle_bench.rollouts import ACCELERATOR, SMALL_SCALE, batch_for, setting, workloads

NAME = "heddle-tables"
MODELS = ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
ASKED = 400  # answers of the estimator that are timed
PLANS = 5  # a repeat is a median of so many
MS = 1e3
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
    """Times of a rollout's moves. seconds: of each that was made; early: of those, how many before the tool was over;
    asked: all that were started."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.early = 0
        self.asked = 0
        self._asked_s: dict[str, float] = {}
        self._tool_over: set[str] = set()

    def __call__(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        """Hears of one event and what the controller did."""
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


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises TraceFileError, OSError."""
    scale = options.scale or SMALL_SCALE
    cells = [(name, llm) for llm in MODELS for name in workloads(options)]
    with Progress(console=options.progress, transient=True) as progress:
        task = progress.add_task(NAME, total=len(cells))
        rows = []
        for name, llm in cells:
            rows.append(_row(name, llm, scale, options))
            progress.advance(task)
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
    full = setting(batch_for(name, llm, 1.0, options.seed, options))
    small = setting(batch_for(name, llm, scale, options.seed, options))
    calls = [step.tool_s for work in full.workload.trajectories for step in work.steps]
    moves = MoveLog()
    cluster = Cluster(choose_cluster(TREADLE, small).engines, small.link, small.latencies)
    predictor = Noisy(small.workload, small.seed)
    Driver(small.workload, cluster, TREADLE.policy, TREADLE.tuning, predictor, log=moves).run()
    resources_ms, placement_ms = _plans(full, options.repeats)
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
    return {key: round(value, DIGITS) if isinstance(value, float) else value for key, value in row.items()}


def _predict_s(here: Setting) -> float:
    """Seconds an answer of the product's estimator, which has heard of one earlier epoch."""
    siblings = Siblings(here.workload, here.earlier)
    asked = min(ASKED, len(here.workload.trajectories))
    began = time.perf_counter()
    for index in range(asked):
        siblings.predict(index, 0, 0)
    return (time.perf_counter() - began) / asked


def _plans(here: Setting, repeats: int) -> tuple[float, float]:
    """Milliseconds of the resource plan, and of the placement of all trajectories on its engines."""
    lengths, contexts = known_lengths(here, "noisy")
    kinds = [EngineKind(each.gpus, each.slots, each.kv_tokens, each.curve.linear(each.slots)) for each in here.models]
    plan = allocate(lengths, contexts, here.gpus, kinds)
    engines = [
        PlanEngine(f"e{index}", kind.slot_limit, kind.kv_tokens_capacity or 0, kind.gpus, kind.decode_curve)
        for index, planned in enumerate(plan.engines)
        for kind in kinds
        if kind.gpus == planned.gpus
    ]
    nowhere = np.full(len(lengths), -1)
    workspace = Workspace()

    def place() -> None:
        plan_arrays(lengths, contexts, nowhere, engines, workspace=workspace)

    return (
        _milliseconds(lambda: allocate(lengths, contexts, here.gpus, kinds), repeats),
        _milliseconds(place, repeats),
    )


def _milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(PLANS):
            work()
        times.append((time.perf_counter() - began) / PLANS)
    return MS * median(times)


def page(found: Mapping[str, Any]) -> Iterator[str]:
    yield "# heddle-tables: what prediction, moves and plans add"
    yield ""
    yield from paragraph(
        f"`{command(NAME, found)}`, on {MACHINE}, but for milliseconds, which are measured. Heddle's Tables 1 and 2,",
        f"the paper's figures in brackets. Moves are those of a simulated rollout on {found['gpus']}",
        f"{found['accelerator']} GPUs, plans are of the whole batch on 64.",
    )
    rows = []
    for row in found["rows"]:
        paper = PAPER.get((row["workload"], row["model"]), ("",) * 5)
        shown = [row["workload"], row["model"], f"{row['tool_s']:.3f} ({paper[0]})"]
        shown.append(f"{MS * row['predict_s']:.2f} ms ({paper[1]} s)")
        move = "no moves" if row["move_s"] is None else f"{row['move_s']:.3f} s, {row['masked']:.0%} masked"
        shown.append(f"{move} ({paper[2]} s)")
        shown.append(f"{row['moves']:,} of {row['moves_asked']:,}")
        shown.append(f"{row['placement_ms']:.2f} ms ({paper[3]} s)")
        shown.append(f"{row['resources_ms']:.1f} ms ({paper[4]} s)")
        rows.append(shown)
    heads = ["", "model", "tool call, s", "prediction", "move, asked to switched", "moves made", "placement"]
    yield from table([*heads, "resource plan"], rows)
    yield ""
    yield from point(
        "**Prediction is not like for like.** Ours is the estimator that reads lengths of other samples; the paper's",
        "is a 0.6B model that reads what was written. A learned one is not there yet; every simulated rollout pays",
        f"{found['assumed_predict_s']} s an answer, as if it were, and is told by `noisy` (`workloads.md`).",
    )
    yield from point(
        "A move is the KV's bytes over 25 GB/s and 50 ms, one transfer an engine at a time, with the waiting for its",
        "turn; simulated. Masked: over before the tool call was. Math has calls of 0.05 s, which mask nothing: a move",
        "that is not done by then is given up, or waited for if it is worth that.",
    )
    yield from point(
        "Placement and resource plan are measured here; the paper's 36 ms and 5 s are of a dynamic program and an",
        "annealing.",
    )
