"""Workloads for the placement's property tests, and what any assignment of them costs, counted the
slow way."""

import itertools
import subprocess
import sys

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from treadle.placement.v1.placement_pb2 import PlacedColumns
from treadle_core.compiled import AHEAD_MODULE, Floats, Indexes
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing import paths
from treadle_core.placing.paths import Work
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.solver import Costs, group_cost, tabulate
from treadle_core.placing.workload import SUM_KV, SUM_PREFILL

curves = st.builds(
    DecodeCurve,
    base_s=st.floats(1e-4, 0.1),
    per_sequence_s=st.one_of(st.just(0.0), st.floats(1e-6, 0.01)),
    per_kv_token_s=st.one_of(st.just(0.0), st.floats(1e-9, 1e-6)),
    prefill_tokens_per_s=st.one_of(st.just(0.0), st.floats(100.0, 1e5)),
)
engines = st.builds(
    PlanEngine,
    engine_id=st.just("e"),
    slot_limit=st.integers(1, 12),
    kv_tokens_capacity=st.one_of(st.just(0), st.integers(100, 100_000)),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    decode_curve=curves,
)
tokens = st.one_of(st.sampled_from([0.0, 1.0, 100.0]), st.floats(0.0, 40_000.0))


@st.composite
def workloads(
    draw: st.DrawFn, *, n: int, m: int, alike: bool = False, model: CostModel | None = None
) -> Costs:
    """At most n trajectories on at most m engines, each of which fits somewhere; some engines hold
    less than some."""
    count = draw(st.integers(1, n))
    lengths = np.array(draw(st.lists(tokens, min_size=count, max_size=count)))
    contexts = np.array(draw(st.lists(tokens, min_size=count, max_size=count)))
    placed = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    number = draw(st.integers(1, m))
    those = (
        [draw(engines)] * number
        if alike
        else draw(st.lists(engines, min_size=number, max_size=number))
    )
    most = max(engine.kv_tokens_capacity or np.inf for engine in those)
    chosen = model or draw(st.sampled_from(list(CostModel)))
    return tabulate(chosen, lengths, np.minimum(contexts, most), placed, those)


def group_seconds(costs: Costs, bounds: npt.NDArray[np.int64]) -> list[float]:
    return [
        group_cost(costs.table, e, int(bounds[e]), int(bounds[e + 1]))
        for e in range(len(bounds) - 1)
    ]


WITHOUT_AHEAD = f"import sys; sys.modules[{AHEAD_MODULE!r}] = None\n"
WITHOUT_NUMBA = "import sys; sys.modules['numba'] = None\n"


def check_without_numba(script: str, results: int, also: str = WITHOUT_AHEAD) -> None:
    """The same last bits with numba and without it, where `also` runs first; so many lines begin
    with False there."""
    plain, compiled = (
        subprocess.run(
            [sys.executable, "-c", before + script], capture_output=True, text=True, check=True
        ).stdout
        for before in (WITHOUT_NUMBA + also, WITHOUT_AHEAD)
    )
    assert plain.count("False") == results
    assert plain.replace("False", "True") == compiled


def least_makespan(costs: Costs) -> float:
    """Return the makespan of the best contiguous partition, by Heddle's dynamic program (eq. 3).

    It shares only the cost of a group with the solver. Groups may be empty.
    """
    n = len(costs.table.lengths)
    best = [0.0] + [np.inf] * n
    for engine in range(len(costs.table.engines)):
        best = [
            min(
                max(best[first], group_cost(costs.table, engine, first, end))
                for first in range(end + 1)
            )
            for end in range(n + 1)
        ]
    return float(best[-1])


def contiguous_costs(costs: Costs) -> list[list[float]]:
    """The costs of the groups of every contiguous partition, empty groups allowed."""
    n, m = len(costs.table.lengths), len(costs.table.engines)
    return [
        [
            group_cost(costs.table, e, *pair)
            for e, pair in enumerate(itertools.pairwise((0, *cuts, n)))
        ]
        for cuts in itertools.combinations_with_replacement(range(n + 1), m - 1)
    ]


def makespans_of_all(costs: Costs) -> list[float]:
    """The makespan of every assignment whatever that fits, each group's cost computed afresh from
    its members."""
    table = costs.table
    kv, prefill = np.diff(table.ranks[:, [SUM_KV, SUM_PREFILL]], axis=0).T
    spans = []
    for choice in itertools.product(range(len(table.engines)), repeat=len(table.lengths)):
        of = np.array(choice)
        worst = 0.0
        for engine, (base, sequence, per_kv, slots, capacity, prefill_s) in enumerate(
            table.engines
        ):
            mine = of == engine
            if not mine.any():
                continue
            longest, work, size = table.lengths[mine].max(), table.lengths[mine].sum(), mine.sum()
            if table.model == CostModel.GROUP_SIZE:
                cost = (base + sequence * min(size, slots)) * max(1.0, size / slots) * longest
            else:
                cost = (
                    base * max(longest, work / slots, kv[mine].sum() / capacity) + sequence * work
                )
                cost += per_kv * kv[mine].sum() + prefill_s * prefill[mine].sum()
            if len(table.reach):
                reach = table.reach[table.reach_of[engine]]
                if any(reach[rank] == rank for rank in np.flatnonzero(mine)):
                    cost = np.inf
            worst = max(worst, cost)
        spans.append(float(worst))
    return spans


PATH_CURVE = DecodeCurve(0.01, 2e-4, 1e-8, 5_000.0, 1e-9)


def path_rows(*slots: int, kv_tokens: int = 60_000) -> Floats:
    return paths.engine_rows(
        [PlanEngine(f"e{at}", each, kv_tokens, 1, PATH_CURVE) for at, each in enumerate(slots)]
    )


def ends_s(engines: Floats, work: Work, placement: Indexes) -> Floats:
    """Return when each engine ends in each sample."""
    return paths.finish(engines, work, placement, paths.reading_order(engines, work))[0]


def draw_work(seed: int, n: int, samples: int = 1) -> Work:
    """Random work, of which about half has started, and three samples a prompt."""
    rng = np.random.default_rng(seed)
    tokens, contexts = rng.lognormal(6.0, 1.0, n), rng.uniform(100.0, 9_000.0, n)
    tool_s = rng.choice([0.0, 1.0], n) * rng.lognormal(2.0, 1.5, n)
    factors = rng.uniform(0.5, 2.0, (samples, n))
    started, prompts = rng.random(n) < 0.5, np.arange(n) // 3
    read = started & (rng.random(n) < 0.7)
    return paths.work_of(tokens, contexts, 0.5 * tokens, tool_s, started, read, prompts, factors)


def columns(trajectories: int, **changed: bytes) -> PlacedColumns:
    """Return columns of so many trajectories: of 0, 100, 200, … tokens, placed nowhere."""
    floats = np.zeros(trajectories, "<f8").tobytes()
    given = {
        "remaining_tokens_float64": (100.0 * np.arange(trajectories)).astype("<f8").tobytes(),
        "context_tokens_float64": floats,
        "current_engine_int32": np.full(trajectories, -1, "<i4").tobytes(),
        "log_sigma_float64": floats,
        "room_tokens_float64": floats,
        "remaining_tool_s_float64": floats,
        "remaining_observed_tokens_float64": floats,
        "prompt_int32": np.arange(trajectories).astype("<i4").tobytes(),
        "started_uint8": bytes(trajectories),
        "unread_uint8": bytes(trajectories),
    }
    return PlacedColumns(**{**given, **changed})
