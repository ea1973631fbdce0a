"""What a plan costs: the exact partition from unsorted lengths, and how it compares with Heddle's dynamic program.

Keys: `n`, `m`, `ms`, `dp_ms`, `max_rel_diff` and the parts `sort_ms`, `solve_ms` are those of the smallest size under
the default cost model. `ms` is the whole of `plan_arrays` for trajectories that have no engine yet: checks, sort and
running sums (`sort_ms`), partition with balance (`solve_ms`), and the engine of each. The memory is a workspace that
the caller keeps between plans; `fresh_ms` is without one. `replan_ms` is a plan for trajectories that all have an
engine, so that the groups are dealt to those that hold most of them. `max_rel_diff` is the largest relative difference
from the dynamic program over that size and `cases` random small ones, all cost models and unlike engines among them.
`rows` has every size and cost model; `bound_ratio` is the makespan over a time that no assignment whatever beats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress
from treadle_core.model import DecodeCurve
from treadle_core.placing.bound import aggregated, least_makespan
from treadle_core.placing.costs import BatchCurve, CostModel, Costs, tabulate
from treadle_core.placing.placement import Workspace, plan_arrays
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.solver import partition
from treadle_sim.workloads.workload import read_traces

from treadle_bench.options import BenchOptions
from treadle_bench.samples import Samples

Floats = npt.NDArray[np.float64]

SIZES = ((6_400, 16), (6_400, 64), (100_000, 128), (1_000_000, 1_024))
CASES = 300
# A mid-sized model on one accelerator, in seconds; only the order of magnitude matters here.
ENGINE = DecodeCurve(base_s=0.01, per_sequence_s=2e-4, per_kv_token_s=1e-8, prefill_tokens_per_s=2e4)
SLOTS = 100
KV_TOKENS = 400_000
BENDS = BatchCurve(((1, 0.0102), (16, 0.0115), (64, 0.02), (128, 0.035)))
# Predicted lengths: log-normal, most about 1,800 tokens, the longest cut at 40,000.
LOG_MEAN, LOG_SIGMA, MOST_TOKENS = 7.5, 1.1, 40_000.0
LEAST_CONTEXT, MOST_CONTEXT = 500.0, 4_000.0
# The paper aggregates short trajectories: here those of the lower nine tenths, 16 at a time.
SHORT_QUANTILE, BUNDLE = 0.9, 16
# A repeat is a median of so many plans.
PLANS = 5


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. With `traces` the lengths are drawn, with replacement, from the file's generated tokens and the
    contexts are its prompts. Raises TraceFileError, OSError."""
    works = read_traces(options.traces) if options.traces is not None else ()
    pool = np.array([(work.gen_tokens, work.prompt_tokens) for work in works], np.float64)
    sizes = [(n, m, model) for n, m in SIZES for model in CostModel]
    with Progress(console=options.progress, transient=True) as progress:
        task = progress.add_task("placement", total=len(sizes) + 2)
        rows = []
        for n, m, model in sizes:
            rows.append(_row(*_workload(n, options.seed, pool), m, model, options))
            progress.advance(task)
        first = next(row for row in rows if row["model"] == CostModel.LINEAR_INTEGRAL.name.lower())
        n, m = first["n"], first["m"]
        costs = _costs(*_workload(n, options.seed, pool), m, CostModel.LINEAR_INTEGRAL)
        program = _against_program(costs, options.repeats)
        progress.advance(task)
        difference = max(program.pop("rel_diff"), _largest_difference(options.seed))
        progress.advance(task)
    keys = ("n", "m", "ms", "sort_ms", "solve_ms")
    return {
        **{key: first[key] for key in keys},
        **program,
        "max_rel_diff": difference,
        "cases": CASES,
        "workload": str(options.traces) if options.traces is not None else "log-normal",
        "rows": rows,
    }


def _workload(n: int, seed: int, pool: Floats) -> tuple[Floats, Floats]:
    rng = np.random.default_rng([seed, n])
    if len(pool):
        drawn = pool[rng.integers(0, len(pool), n)]
        return np.ascontiguousarray(drawn[:, 0]), np.ascontiguousarray(drawn[:, 1])
    lengths = np.minimum(rng.lognormal(LOG_MEAN, LOG_SIGMA, n), MOST_TOKENS)
    return lengths, rng.uniform(LEAST_CONTEXT, MOST_CONTEXT, n)


def _engines(m: int) -> list[PlanEngine]:
    return [PlanEngine(f"engine-{index}", SLOTS, KV_TOKENS, 1, ENGINE) for index in range(m)]


def _costs(lengths: Floats, contexts: Floats, m: int, model: CostModel, workspace: Workspace | None = None) -> Costs:
    nowhere = np.zeros(len(lengths), np.bool_)
    return tabulate(model, lengths, contexts, nowhere, _engines(m), curves=[BENDS] * m, workspace=workspace)


def _row(lengths: Floats, contexts: Floats, m: int, model: CostModel, options: BenchOptions) -> dict[str, Any]:
    n = len(lengths)
    engines, curves = _engines(m), [BENDS] * m
    nowhere = np.full(n, -1)
    placed = np.random.default_rng([options.seed, n, m]).integers(0, m, n)
    workspace = Workspace()

    def plan(current: npt.NDArray[np.int64], memory: Workspace | None) -> None:
        plan_arrays(lengths, contexts, current, engines, model, curves=curves, workspace=memory)

    whole = _milliseconds(lambda: plan(nowhere, workspace), options.repeats)
    fresh = _milliseconds(lambda: plan(nowhere, None), options.repeats)
    again = _milliseconds(lambda: plan(placed, workspace), options.repeats)
    unplaced = nowhere >= 0
    sort = _milliseconds(
        lambda: tabulate(model, lengths, contexts, unplaced, engines, curves=curves, workspace=workspace),
        options.repeats,
    )
    costs = _costs(lengths, contexts, m, model, workspace)
    solve = _milliseconds(lambda: partition(costs), options.repeats)
    found = plan_arrays(lengths, contexts, nowhere, engines, model, curves=curves, bound=True)
    return {
        "n": n,
        "m": m,
        "model": model.name.lower(),
        "ms": whole.median,
        "ms_range": [min(whole), max(whole)],
        "sort_ms": sort.median,
        "solve_ms": solve.median,
        "fresh_ms": fresh.median,
        "replan_ms": again.median,
        "bound_ratio": found.makespan_s / found.lower_bound_s if found.lower_bound_s else 1.0,
    }


def _milliseconds(call: Callable[[], object], repeats: int) -> Samples:
    """One median a repeat; the first call of all is not counted."""
    call()
    return Samples(Samples(_once(call) for _ in range(PLANS)).median for _ in range(max(repeats, 1)))


def _once(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def _against_program(costs: Costs, repeats: int) -> dict[str, Any]:
    """The dynamic program on one workload, whole and with short trajectories in bundles."""
    cuts = aggregated(costs, float(np.quantile(costs.table.lengths, SHORT_QUANTILE)), BUNDLE)
    least_makespan(costs, cuts)  # compiled now
    repeats = max(min(repeats, 3), 1)  # seconds each
    exact_s, bundled_s = least_makespan(costs), least_makespan(costs, cuts)
    makespan_s = partition(costs)[1]
    return {
        "dp_ms": Samples(_once(lambda: least_makespan(costs)) for _ in range(repeats)).median,
        "dp_aggregated_ms": Samples(_once(lambda: least_makespan(costs, cuts)) for _ in range(repeats)).median,
        "dp_aggregated_loss": bundled_s / exact_s - 1.0,
        "rel_diff": abs(makespan_s - exact_s) / exact_s,
    }


def _largest_difference(seed: int) -> float:
    """From the dynamic program, over random workloads: sizes, tails, engines and cost models of every sort."""
    rng = np.random.default_rng([seed, CASES])
    largest = 0.0
    for case in range(CASES):
        n, m = int(rng.integers(1, 300)), int(rng.integers(1, 13))
        lengths = rng.lognormal(LOG_MEAN, rng.uniform(0.0, 2.0), n).round(int(rng.integers(0, 3)))
        speeds = rng.choice([1.0, 1.7, 3.0], m) if case % 2 else np.ones(m)
        engines = [
            PlanEngine(
                f"engine-{index}",
                int(rng.integers(1, 64)),
                int(rng.integers(5_000, 90_000)),
                1,
                DecodeCurve(0.01 / speed, 2e-4, 1e-8, 2e4),
            )
            for index, speed in enumerate(speeds)
        ]
        curves = [BENDS if rng.random() < 0.5 else None for _ in range(m)]
        model = list(CostModel)[case % len(CostModel)]
        contexts = rng.uniform(0.0, 5_000.0, n)
        costs = tabulate(model, lengths, contexts, rng.random(n) < 0.5, engines, curves=curves)
        exact_s = least_makespan(costs)
        largest = max(largest, abs(partition(costs)[1] - exact_s) / max(exact_s, 1e-300))
    return largest
