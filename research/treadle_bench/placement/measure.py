"""How long a plan takes from unsorted lengths to the engine of each trajectory, by the cost model
that ships and by the two that are solved exactly, and how the exact ones compare with Heddle's
dynamic program.

Keys: `ms`: the whole of `placement.plan` for trajectories without an engine, by the shipped cost
model (CRITICAL_PATH), at the sizes `n` and `m`, in a workspace that the caller keeps between plans.
`rows`: every cost model and size, the shipped one first. `fresh_ms`: without a workspace.
`replan_ms`: for trajectories that all have an engine. `all_tried_ratio`, of the shipped model: the
mean makespan of the plan over that of a search that tries every candidate, which takes
`all_tried_ms`. `sort_ms` (sort and running sums) and `solve_ms` (partition with balance), of the
exact models. `bound_ratio`: the makespan over a time that no assignment beats. `dp_ms`: the dynamic
program at the first size under LINEAR_INTEGRAL; `max_rel_diff`: the largest relative difference
from it, over that size and `cases` random small ones, with engines that differ.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from rich.progress import track
from treadle_core.compiled import Floats, Indexes, compiled
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing import paths
from treadle_core.placing.placement import Plan, plan
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.solver import Costs, Table, group_cost, partition, tabulate
from treadle_core.placing.workload import Workspace
from treadle_sim.workloads.workload import read_traces

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.summary import milliseconds

SIZES = ((6_400, 16), (6_400, 64), (20_000, 128), (100_000, 512))
MODELS = (CostModel.CRITICAL_PATH, CostModel.GROUP_SIZE, CostModel.LINEAR_INTEGRAL)
SAMPLES = 16  # of a prompt
DOUBT = 0.8  # standard deviation of ln(length) of a prediction
CASES = 300
# A mid-sized model on one accelerator, in seconds; only the order of magnitude matters.
ENGINE = DecodeCurve(
    base_s=0.01, per_sequence_s=2e-4, per_kv_token_s=1e-8, prefill_tokens_per_s=2e4
)
SLOTS = 100
KV_TOKENS = 400_000
# Predicted lengths: log-normal, most about 1,800 tokens, the longest cut at 40,000.
LOG_MEAN, LOG_SIGMA, MOST_TOKENS = 7.5, 1.1, 40_000.0
LEAST_CONTEXT, MOST_CONTEXT = 500.0, 4_000.0
# The paper bundles short trajectories: here the shortest nine tenths, 16 at a time.
SHORT_QUANTILE, BUNDLE = 0.9, 16
PLANS = 5  # timed in each repeat


async def measure(options: BenchOptions) -> dict[str, Any]:
    """With `traces` the lengths are drawn, with replacement, from the file's generated tokens and
    the contexts are its prompts. Raises TraceFileError, OSError."""
    works = read_traces(options.traces) if options.traces is not None else ()
    pool = np.array([(work.gen_tokens, work.prompt_tokens) for work in works], np.float64)
    sizes = [(n, m, model) for model in MODELS for n, m in SIZES]
    bar = track(sizes, "placement", console=options.progress, transient=True)
    rows = [_row(*_workload(n, options.seed, pool), m, model, options) for n, m, model in bar]
    n, m = SIZES[0]
    costs = _costs(*_workload(n, options.seed, pool), m, CostModel.LINEAR_INTEGRAL)
    program = _compare_with_program(costs, options.repeats)
    difference = max(program.pop("rel_diff"), _largest_difference(options.seed))
    return {
        **{key: rows[0][key] for key in ("n", "m", "ms")},
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


def _costs(
    lengths: Floats, contexts: Floats, m: int, model: CostModel, workspace: Workspace | None = None
) -> Costs:
    nowhere = np.zeros(len(lengths), np.bool_)
    return tabulate(model, lengths, contexts, nowhere, _engines(m), workspace)


def _row(
    lengths: Floats, contexts: Floats, m: int, model: CostModel, options: BenchOptions
) -> dict[str, Any]:
    n = len(lengths)
    engines = _engines(m)
    nowhere = np.full(n, -1)
    placed = np.random.default_rng([options.seed, n, m]).integers(0, m, n)
    workspace = Workspace()
    shipped = model is CostModel.CRITICAL_PATH
    more: dict[str, Any] = {}
    if shipped:
        more = {"log_sigma": np.full(n, DOUBT), "prompts": np.arange(n) // SAMPLES}

    def make(current: Indexes, memory: Workspace | None, **changed: Any) -> Plan:
        return plan(lengths, contexts, current, engines, model, workspace=memory, **more, **changed)

    def mean_s(found: Plan) -> float:
        room, nothing = np.full(n, np.inf), np.zeros(n)
        factors = paths.sample_factors(np.arange(n), more["log_sigma"], lengths, room)
        of = (nothing, nothing, nothing > 0, nothing > 0, more["prompts"], factors)
        work = paths.work_of(lengths, contexts, *of)
        return float(paths.makespans_s(paths.engine_rows(engines), work, found.engine_of).mean())

    calls: dict[str, Callable[[], object]] = {
        "ms": lambda: make(nowhere, workspace),
        "fresh_ms": lambda: make(nowhere, None),
        "replan_ms": lambda: make(placed, workspace),
    }
    if shipped:
        calls["all_tried_ms"] = lambda: make(nowhere, workspace, goes_on=_always)
    else:
        costs = _costs(lengths, contexts, m, model)
        calls["sort_ms"] = lambda: _costs(lengths, contexts, m, model, workspace)
        calls["solve_ms"] = lambda: partition(costs)
    took_ms = {
        key: milliseconds(call, options.repeats, 1 if key == "all_tried_ms" else PLANS)
        for key, call in calls.items()
    }
    found = make(nowhere, workspace, bound=True)
    row = {
        "n": n,
        "m": m,
        "model": model.name.lower(),
        "ms_range": [min(took_ms["ms"]), max(took_ms["ms"])],
        **{key: median(of_key) for key, of_key in took_ms.items()},
        "bound_ratio": found.makespan_s / found.lower_bound_s if found.lower_bound_s else 1.0,
    }
    if shipped:
        best = make(nowhere, workspace, goes_on=_always)
        row["all_tried_ratio"] = mean_s(found) / mean_s(best)
    return row


def _always(amounts: int) -> bool:
    return True


def least_makespan(costs: Costs, cuts: Indexes | None = None) -> float:
    """Seconds of the best contiguous partition by Heddle's dynamic program (eq. 3, O(n² m)),
    engines in the table's order, groups may be empty. It shares only the cost of a group with the
    solver.

    `cuts`: ranks at which a group may end, rising, with 0 and n; all where None.
    """
    if cuts is None:
        cuts = np.arange(len(costs.table.lengths) + 1)
    return float(dynamic_program(costs.table, cuts))


@compiled
def dynamic_program(table: Table, cuts: Indexes) -> float:
    best = np.full(len(cuts), np.inf)
    best[0] = 0.0
    for engine in range(len(table.engines)):
        after = np.full(len(cuts), np.inf)
        for end in range(len(cuts)):
            least = np.inf
            for first in range(end + 1):
                least = min(
                    least, max(best[first], group_cost(table, engine, cuts[first], cuts[end]))
                )
            after[end] = least
        best = after
    return float(best[-1])


def aggregate(costs: Costs, threshold_tokens: float, bundle: int) -> Indexes:
    """Heddle's aggregation (5.2): cuts that take the trajectories below the threshold `bundle` at a
    time."""
    n = len(costs.table.lengths)
    long = int(np.count_nonzero(costs.table.lengths >= threshold_tokens))
    return np.unique(np.concatenate([np.arange(long + 1), np.arange(long, n, max(bundle, 1)), [n]]))


def _compare_with_program(costs: Costs, repeats: int) -> dict[str, Any]:
    """The dynamic program on one workload, with all trajectories and with short trajectories in
    bundles."""
    cuts = aggregate(costs, float(np.quantile(costs.table.lengths, SHORT_QUANTILE)), BUNDLE)
    repeats = min(repeats, 3)  # it takes seconds
    exact_s, bundled_s = least_makespan(costs), least_makespan(costs, cuts)
    makespan_s = partition(costs)[1]
    return {
        "dp_ms": median(milliseconds(lambda: least_makespan(costs), repeats, 1)),
        "dp_aggregated_ms": median(milliseconds(lambda: least_makespan(costs, cuts), repeats, 1)),
        "dp_aggregated_loss": bundled_s / exact_s - 1.0,
        "rel_diff": abs(makespan_s - exact_s) / exact_s,
    }


def _largest_difference(seed: int) -> float:
    """The largest relative difference from the dynamic program over random workloads, engines and
    cost models."""
    rng = np.random.default_rng([seed, CASES])
    largest = 0.0
    for case in range(CASES):
        n, m = int(rng.integers(1, 300)), int(rng.integers(1, 13))
        lengths = rng.lognormal(LOG_MEAN, rng.uniform(0.0, 2.0), n).round(int(rng.integers(0, 3)))
        speeds = rng.choice([1.0, 1.7, 3.0], m) if case % 2 else np.ones(m)
        engines = []
        for index, speed in enumerate(speeds):
            slots, kv_tokens = int(rng.integers(1, 64)), int(rng.integers(5_000, 90_000))
            engines.append(
                PlanEngine(
                    f"engine-{index}", slots, kv_tokens, 1, replace(ENGINE, base_s=0.01 / speed)
                )
            )
        model = list(CostModel)[case % len(CostModel)]
        contexts = rng.uniform(0.0, 5_000.0, n)
        costs = tabulate(model, lengths, contexts, rng.random(n) < 0.5, engines)
        exact_s = least_makespan(costs)
        largest = max(largest, abs(partition(costs)[1] - exact_s) / max(exact_s, 1e-300))
    return largest


BENCH = Bench(
    "placement",
    "How long a plan of up to 100,000 trajectories on 512 engines takes, by the shipped cost model "
    "and by the exact ones, and these against the dynamic program. Takes about a minute.",
    measure,
    decides=("core/treadle_core/placing",),
)
