"""How long a resource plan takes and how good it is: exact, annealed as Heddle prints it, and with
one degree.

Qwen3-14B on H200 (a shipped profile) at degrees 1 to 8, 64 and 1,024 GPUs, 100 and 16 trajectories
a GPU; log-normal lengths capped at 40,000 tokens, this project's workloads, and --traces. Keys: the
top level is 64 GPUs with 6,400 trajectories of log-sigma 1 under LINEAR_INTEGRAL; `larger`: the
same on 1,024; `rows`: all. `ms`: the whole call (tables, search, balance, lower bound). `optimal`:
no multiset of engines has a contiguous plan of smaller makespan; on 64 GPUs found by trying all
969, on more by the search's proof (`optimal_by`). `gap`: the makespan over a time that no engines
and no assignment beat, less 1. `annealing_rel`, `homogeneous_rel`: makespans over the exact plan's.
Figures are medians over repeats, each of which draws another workload and anneals with another
seed.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.progress import track
from treadle_core.model import CostModel
from treadle_core.placing.solver import partition
from treadle_sim.allocation.plan import (
    PLANNED_MODELS,
    Allocation,
    EngineKind,
    allocate,
    homogeneous,
    prepare,
)
from treadle_sim.engine_model import engine_model
from treadle_sim.systems import engine_kinds
from treadle_sim.workloads.parametric import WORKLOADS, make
from treadle_sim.workloads.workload import TrajectoryWork, read_traces

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.resources.annealing import COOLING, EPSILON_S, Annealed, anneal
from treadle_bench.summary import median_of, range_of

Floats = npt.NDArray[np.float64]
Batch = tuple[Floats, Floats]  # lengths and contexts, tokens

LLM, ACCELERATOR = "Qwen3-14B", "H200"
DEGREES = (1, 2, 4, 8)
BUDGETS = (64, 1024)
TRAJECTORIES_A_GPU = (100, 16)
LOG_SIGMAS = (0.5, 1.0, 1.5)
MEDIAN_TOKENS = 3_000.0
CAP_TOKENS = 40_000.0
PROMPT_TOKENS = 500.0
MOST_ENUMERATED = (
    2_000  # multisets that are tried one by one: the 969 of 64 GPUs, not the millions of 1,024
)
SAME = 1e-9  # relative, between the plan and the best multiset
RATIO_DIGITS = 5
KEYS = (
    "gpus",
    "trajectories",
    "cost",
    "ms",
    "optimal",
    "gap",
    "annealing_ms",
    "annealing_rel",
    "homogeneous_rel",
)


@dataclass(frozen=True)
class Case:
    """One row: `batch` draws the workload of a repeat."""

    lengths: str
    gpus: int
    model: CostModel
    batch: Callable[[int], Batch]


class Trial(NamedTuple):
    """One repeat of a case."""

    exact: Allocation
    exact_ms: float
    annealed: Annealed
    annealing_ms: float
    same_degree: Allocation


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError."""
    kinds = engine_kinds([engine_model(LLM, ACCELERATOR, degree) for degree in DEGREES])
    for model in PLANNED_MODELS:  # compile before anything is timed
        plan_three_ways(
            Case("warm-up", 8, model, partial(draw_lengths, options.seed, 64, 1.0)), 0, kinds, 0
        )
    bar = track(list_cases(options), "resource plans", console=options.progress, transient=True)
    rows = [measure_case(case, kinds, options) for case in bar]
    named = {(row["lengths"], row["gpus"], row["trajectories"], row["cost"]): row for row in rows}
    top, larger = (
        named["log-normal 1.0", gpus, 100 * gpus, CostModel.LINEAR_INTEGRAL.name]
        for gpus in BUDGETS
    )
    return {
        "llm": LLM,
        "accelerator": ACCELERATOR,
        "degrees": list(DEGREES),
        **{key: top[key] for key in KEYS},
        "larger": {key: larger[key] for key in KEYS},
        "annealing": {
            "cooling": COOLING,
            "epsilon_s": EPSILON_S,
            "iterations": top["annealing_iterations"],
        },
        "rows": rows,
    }


def list_cases(options: BenchOptions) -> list[Case]:
    """A case for each row; workloads and traces on 64 GPUs only."""
    cases = [
        Case(
            f"log-normal {sigma}",
            gpus,
            model,
            partial(draw_lengths, options.seed, each * gpus, sigma),
        )
        for gpus, each, sigma, model in itertools.product(
            BUDGETS, TRAJECTORIES_A_GPU, LOG_SIGMAS, PLANNED_MODELS
        )
    ]
    batches: dict[str, Callable[[int], Batch]]
    if options.traces is not None:
        traced = lengths_of(read_traces(options.traces))
        batches = {options.traces.name: lambda _: traced}
    else:
        batches = {name: partial(_make_lengths, name, options.seed) for name in WORKLOADS}
    others = itertools.product(batches.items(), PLANNED_MODELS)
    return cases + [Case(name, BUDGETS[0], model, batch) for (name, batch), model in others]


def _make_lengths(name: str, seed: int, repeat: int) -> Batch:
    return lengths_of(make(name, seed=seed + repeat).trajectories)


def draw_lengths(seed: int, count: int, sigma: float, repeat: int) -> Batch:
    """Log-normal lengths around MEDIAN_TOKENS, capped, and prompts of one size."""
    rng = np.random.default_rng([seed, repeat, count, round(sigma * 10)])
    lengths = np.minimum(rng.lognormal(np.log(MEDIAN_TOKENS), sigma, count), CAP_TOKENS)
    return lengths, np.full(count, PROMPT_TOKENS)


def lengths_of(works: tuple[TrajectoryWork, ...]) -> Batch:
    """Generated tokens and prompts of trajectories."""
    lengths, contexts = np.array(
        [(work.gen_tokens, work.prompt_tokens) for work in works], np.float64
    ).T
    return np.ascontiguousarray(lengths), np.ascontiguousarray(contexts)


def plan_three_ways(case: Case, repeat: int, kinds: list[EngineKind], seed: int) -> Trial:
    """Plan one workload: exact, annealed, and with one degree."""
    batch, gpus, model = case.batch(repeat), case.gpus, case.model
    rng = np.random.default_rng([seed, repeat])
    began = time.perf_counter()
    exact = allocate(*batch, gpus, kinds, model)
    planned = time.perf_counter()
    annealed = anneal(*batch, gpus, kinds, rng, model)
    ended = time.perf_counter()
    same_degree = homogeneous(*batch, gpus, kinds, model)
    return Trial(exact, 1e3 * (planned - began), annealed, 1e3 * (ended - planned), same_degree)


def measure_case(case: Case, kinds: list[EngineKind], options: BenchOptions) -> dict[str, Any]:
    """All repeats of a case."""
    trials = [
        plan_three_ways(case, repeat, kinds, options.seed) for repeat in range(options.repeats)
    ]
    first = trials[0].exact
    exact_ms = [each.exact_ms for each in trials]
    ratios = {
        "gap": [each.exact.gap for each in trials],
        "annealing_rel": [
            each.annealed.allocation.makespan_s / each.exact.makespan_s for each in trials
        ],
        "homogeneous_rel": [each.same_degree.makespan_s / each.exact.makespan_s for each in trials],
    }
    medians = {key: median_of(values, RATIO_DIGITS) for key, values in ratios.items()}
    ranges = {f"{key}_range": range_of(values, RATIO_DIGITS) for key, values in ratios.items()}
    best_s, enumeration_s, tried = try_all_multisets(case, kinds)
    return {
        "lengths": case.lengths,
        "gpus": case.gpus,
        "trajectories": len(case.batch(0)[0]),
        "cost": case.model.name,
        "ms": median_of(exact_ms, 2),
        "ms_range": range_of(exact_ms, 2),
        "makespan_s": round(first.makespan_s, 3),
        "engines": {str(gpus): count for gpus, count in sorted(Counter(first.degrees).items())},
        "optimal": first.optimal and (not tried or abs(first.makespan_s / best_s - 1.0) <= SAME),
        "optimal_by": f"trying all {tried}" if tried else "proof",
        "enumeration_ms": round(1e3 * enumeration_s, 1) if tried else None,
        "annealing_ms": median_of((each.annealing_ms for each in trials), 2),
        "annealing_iterations": round(median(each.annealed.iterations for each in trials)),
        "homogeneous_degree": trials[0].same_degree.degrees[0],
        **medians,
        **ranges,
    }


def try_all_multisets(case: Case, kinds: list[EngineKind]) -> tuple[float, float, int]:
    """The smallest makespan over every multiset of engines that uses the whole budget, the seconds
    that this took, and the number of multisets; 0 of them where they are too many to try."""
    every = list(itertools.islice(multisets(case.gpus, DEGREES), MOST_ENUMERATED + 1))
    if len(every) > MOST_ENUMERATED:
        return np.inf, 0.0, 0
    batch = case.batch(0)
    started = time.perf_counter()
    problem = prepare(*batch, case.gpus, kinds, case.model)
    places = [DEGREES.index(int(gpus)) for gpus in problem.gpus]
    least = min(
        partition(problem.engines(np.array(counts)[places]), fill_budget=0)[1] for counts in every
    )
    return least, time.perf_counter() - started, len(every)


def multisets(gpus: int, degrees: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Numbers of engines of each degree, in every way to use exactly `gpus`."""
    if len(degrees) == 1:
        if gpus % degrees[0] == 0:
            yield (gpus // degrees[0],)
        return
    for count in range(gpus // degrees[-1] + 1):
        for others in multisets(gpus - count * degrees[-1], degrees[:-1]):
            yield (*others, count)


BENCH = Bench(
    "resources",
    "The exact resource plan for 64 and 1,024 GPUs, against annealing and the best single degree. "
    "Takes about 2 minutes.",
    measure,
    decides=("sim/treadle_sim/allocation",),
)
