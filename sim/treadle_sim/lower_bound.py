"""Lower bound of the makespan that no schedule beats, whatever its engines, its assignment and its
order.

A trajectory that shares an engine with many others costs little of a GPU's time and ends late;
alone it ends soon and costs much. To end by a makespan T, it must sample all its tokens in T less
its tools and prefills, and that costs at least some GPU-seconds. No T is reached where all
trajectories together, and all prefills, cost more than the GPUs have.

One decode step takes at least base + growth: base and slope are a line below the engine's decode
curve, the growth is slope + k * KV tokens for each sequence of the batch. Each sequence pays for
its growth, and for a share of base in proportion to a weight. The weights of a batch are at most 1
together, and at most growth / full growth; which weights give the best bound depends on whether
slots or KV limit the batch, so both are tried, and several lines.

The limit T on a trajectory's time is a constraint, and a price of a second (in GPU-seconds) relaxes
it (a Lagrange multiplier). At any price, take the least that the tokens cost, with the price of the
seconds that they take, and subtract the price of the time that the trajectory has: the rest is a
lower bound on its cost. Left out are the fixed part of each prefill, and the time for which
prefills of others stop a trajectory.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle_sim.engine_model import EngineModel
from treadle_sim.workloads.workload import TrajectoryWork, Workload

Floats = npt.NDArray[np.float64]
LINE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the largest slope: lines below a decode curve
LIMITS = ("slots", "kv", "both")  # of a batch: what the weights follow
# GPU-seconds for a second; from far too low to too high
PRICES = np.concatenate([[0.0], np.logspace(-3.0, 4.0, 57)])
NEAR = 1e-6  # of the bound: it is searched no closer
TRAJECTORIES_AT_ONCE = 500  # of which all turns are computed together, some 10 MB an array


@dataclass(frozen=True, slots=True)
class _Turns:
    """All turns of a workload. tokens: decoded (the prefill yields the first). context_tokens:
    before the first of them. first: index of each trajectory's first turn, then the number of all
    turns. waits_s: seconds of each trajectory's tools and prefills."""

    tokens: Floats
    context_tokens: Floats
    prompt_tokens: Floats
    first: npt.NDArray[np.int64]
    waits_s: Floats


def lower_bound_s(workload: Workload, models: Sequence[EngineModel], gpus: int) -> float:
    """Return the bound in seconds. models: the engines to choose from; those that hold nothing are
    left out."""
    usable = [model for model in models if model.kv_tokens > 0 and model.gpus <= gpus]
    turns, prefill_gpu_s = _turns_of(workload, usable), _prefill_gpu_s(workload, usable)
    found_s = longest_alone_s(workload, usable)
    for costs in _all_costs(turns, usable):

        def lacking_gpu_s(makespan_s: float, costs: Floats = costs) -> float:
            left_s = makespan_s - turns.waits_s
            return float(
                (costs - PRICES * left_s[:, None]).max(axis=1).sum()
                + prefill_gpu_s
                - gpus * makespan_s
            )

        if lacking_gpu_s(found_s) > 0.0:
            enough_s = 2.0 * found_s
            while lacking_gpu_s(enough_s) > 0.0:
                enough_s *= 2.0
            while enough_s - found_s > NEAR * found_s:
                middle_s = 0.5 * (found_s + enough_s)
                found_s, enough_s = (
                    (middle_s, enough_s) if lacking_gpu_s(middle_s) > 0.0 else (found_s, middle_s)
                )
    return found_s


def longest_alone_s(workload: Workload, models: Sequence[EngineModel]) -> float:
    """Return the seconds of the slowest trajectory where each runs alone."""
    return max(min(alone_s(work, model) for model in models) for work in workload.trajectories)


def alone_s(work: TrajectoryWork, model: EngineModel) -> float:
    """Return the seconds of one trajectory on an empty engine."""
    curve = model.curve
    step_s = curve.decode_s(1.0)
    context, cached, seconds = work.prompt_tokens, 0, 0.0
    for step in work.steps:
        seconds += curve.prefill_s(context - cached, cached)
        seconds += (step.gen_tokens - 1) * (
            step_s + curve.per_kv_token_s * (context + 0.5 * step.gen_tokens)
        )
        seconds += step.tool_s
        total = context + step.gen_tokens
        cached = (total - 1) // model.page_tokens * model.page_tokens
        context = total + step.obs_tokens
    return seconds


def work_s(workload: Workload, models: Sequence[EngineModel], gpus: int) -> float:
    """Return the seconds of all work spread evenly over GPUs that are never idle, each part on the
    degree with the least cost."""
    turns = _turns_of(workload, models)
    decode_gpu_s = max(float(costs[:, 0].sum()) for costs in _all_costs(turns, models, PRICES[:1]))
    return (decode_gpu_s + _prefill_gpu_s(workload, models)) / gpus


def _turns_of(workload: Workload, models: Sequence[EngineModel]) -> _Turns:
    rows: list[tuple[int, int, int]] = []
    first: list[int] = []
    waits_s: list[float] = []
    for work in workload.trajectories:
        context, cached, waited_s = work.prompt_tokens, 0, 0.0
        first.append(len(rows))
        for step in work.steps:
            waited_s += (
                min(model.curve.prefill_s(context - cached, cached) for model in models)
                + step.tool_s
            )
            rows.append((step.gen_tokens - 1, context, work.prompt_tokens))
            cached = context + step.gen_tokens - 1
            context += step.gen_tokens + step.obs_tokens
        waits_s.append(waited_s)
    first.append(len(rows))
    tokens, contexts, prompts = np.array(rows, dtype=np.float64).T
    return _Turns(tokens, contexts, prompts, np.array(first), np.array(waits_s))


def _prefill_gpu_s(workload: Workload, models: Sequence[EngineModel]) -> float:
    """Return the GPU-seconds of all prefills: each prompt once, and the answers of tools but after
    the last turn."""
    prompts = {work.prompt_id: work.prompt_tokens for work in workload.trajectories}
    new, pairs = float(sum(prompts.values())), 0.5 * sum(tokens**2 for tokens in prompts.values())
    for work in workload.trajectories:
        context = work.prompt_tokens
        for step in work.steps[:-1]:
            context += step.gen_tokens + step.obs_tokens
            new += step.obs_tokens
            pairs += step.obs_tokens * (context - 0.5 * step.obs_tokens)
    token_gpu_s = min(model.gpus * model.curve.prefill_token_s for model in models)
    return (
        token_gpu_s * new + min(model.gpus * model.curve.prefill_pair_s for model in models) * pairs
    )


def _all_costs(
    turns: _Turns, models: Sequence[EngineModel], prices: Floats = PRICES
) -> Iterator[Floats]:
    """Yield for each line and limit the cost of each trajectory at each price: GPU-seconds that its
    decoded tokens cost at least, plus the price of the seconds that they take."""
    for share, limit in itertools.product(LINE_SHARES, LIMITS):
        costs = np.empty((len(turns.waits_s), len(prices)))
        for start in range(0, len(costs), TRAJECTORIES_AT_ONCE):
            first = turns.first[start : start + TRAJECTORIES_AT_ONCE + 1]
            part = slice(first[0], first[-1])
            prompt, began = turns.prompt_tokens[part], turns.context_tokens[part]
            ends = [
                np.minimum.reduce(
                    [_token_costs(at, at - prompt, model, share, limit, prices) for model in models]
                )
                for at in (began, began + turns.tokens[part] + 1.0)
            ]
            # A cost is concave in the context: the mean of the turn's two ends is at most the mean
            # of its tokens.
            of_turns = 0.5 * turns.tokens[part, None] * (ends[0] + ends[1])
            costs[start : start + TRAJECTORIES_AT_ONCE] = np.add.reduceat(
                of_turns, first[:-1] - first[0], axis=0
            )
        yield costs


def _token_costs(
    context: Floats,
    own_tokens: Floats,
    model: EngineModel,
    share: float,
    limit: str,
    prices: Floats,
) -> Floats:
    """Return the cost of a token on one kind of engine, by context and price. own_tokens: of the
    context, beyond the prompt, whose KV the samples share."""
    batches = np.arange(1.0, model.slots + 1.0)
    steps_s = np.array([model.curve.decode_s(batch) for batch in batches])
    slope_s = share * float((steps_s / batches).min())
    base_s = float((steps_s - slope_s * batches).min())
    # growth where either is full
    slots_s, kv_s = (slope_s * model.slots, model.curve.per_kv_token_s * model.kv_tokens)
    by_slots = {"slots": 1.0, "kv": 0.0, "both": slots_s / (slots_s + kv_s) if slots_s else 0.0}[
        limit
    ]
    full_s = {"slots": slots_s, "kv": kv_s, "both": slots_s + kv_s}[limit]
    growth_s = slope_s + model.curve.per_kv_token_s * context
    weights = by_slots / model.slots + (1.0 - by_slots) * own_tokens / model.kv_tokens
    paid, waited = model.gpus * base_s * weights[:, None], prices * full_s
    # the best growth: full, or less
    shared = np.where(waited <= paid, paid + waited, 2.0 * np.sqrt(paid * waited))
    return model.gpus * growth_s[:, None] + prices * base_s + shared
