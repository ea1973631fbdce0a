"""Reward models on GPUs: a shared pool against groups of GPUs for each model, and against loading
(Figures 3b, 8b)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle_bench.summary import median_by_key, rounded
from treadle_bench.tools.gpu_groups import ElasticGpus, LoadingGroups, StaticGroups
from treadle_bench.tools.reward_models import (
    DENSE,
    HOST_BYTES_PER_S,
    JUDGE,
    SPARSE,
    Restoring,
    scored_batch,
    services,
    teachers,
)
from treadle_bench.tools.setting import (
    DecisionSeconds,
    Plan,
    Setting,
    decision_seconds,
    mean_act_s,
    mean_action,
)
from treadle_bench.tools.trace import Make, Replay, Trace, play

GROUP = 4  # §6.1: four GPUs a model
JUDGE_GROUP, JUDGE_REPLICAS = 8, 5  # §6.1: of search alone
# Serverless loading, each time into a new engine: from its authors' local storage of a node, or
# from the host's memory.
STORAGE_BYTES_PER_S = 10e9
ENGINE_START_S = 1.0  # contexts and communicators; a choice
BUSY_TEACHERS = 12  # Figure 3b
SPARSE_PACE, DENSE_PACE = "as in Figure 3b", "as in Table 1"
PACES = {SPARSE_PACE: SPARSE, DENSE_PACE: DENSE}


def elastic(gpus: int, names: Sequence[str], *, aware: bool = True) -> Make:
    known = services(list(names))
    return lambda timeline, report: ElasticGpus(
        timeline, report, gpus, known, Restoring(), aware=aware
    )


def static(names: Sequence[str], degree: int = GROUP, replicas: int = 1) -> Make:
    return lambda timeline, report: StaticGroups(timeline, report, names, degree, replicas)


def loading(gpus: int, bytes_per_s: float) -> Make:
    rule = Restoring(bytes_per_s, ENGINE_START_S)
    return lambda timeline, report: LoadingGroups(timeline, report, gpus // GROUP, GROUP, rule)


@dataclass(frozen=True)
class Cell:
    """One batch of rewards. fewer: other numbers of GPUs on which it is played."""

    models: tuple[str, ...]
    gpus: int
    size: int
    pace: float
    seed: int
    fewer: tuple[int, ...] = ()


def measure(plan: Plan) -> dict[str, Any]:
    setting = plan.setting
    models = (*teachers(setting.gpus // GROUP - 1), JUDGE)
    pairs = [(size, name) for size in setting.scored_batches for name in PACES]
    cells = [
        [Cell(models, setting.gpus, size, PACES[name], seed) for seed in plan.seeds]
        for size, name in pairs
    ]
    medians, costs = plan.run_cells("rewards", play_cell, cells)
    rows = [
        {"batch": size, "pace": name, **row}
        for (size, name), row in zip(pairs, medians, strict=True)
    ]
    fractions = {name: _fraction(plan, models, pace) for name, pace in PACES.items()}
    plan.report("one judge; twelve teachers")
    return {
        "batches": rows,
        "fractions": fractions,
        "judge": median_by_key([_play_judge(setting, seed) for seed in plan.seeds]),
        "busy": _measure_busy(setting, plan.seeds[0]),
        "skewed": median_by_key([_play_skewed(setting, models, seed) for seed in plan.seeds]),
        **costs,
    }


def play_cell(cell: Cell) -> tuple[dict[str, float], DecisionSeconds]:
    """One batch under every system; ratios are to the elastic scheduler."""
    models, gpus = cell.models, cell.gpus
    traces = scored_batch(cell.size, cell.seed, models, pace=cell.pace)
    ours = play(traces, elastic(gpus, models))
    found = {"elastic_s": mean_act_s(ours), **mean_action(ours.records)}
    found["units"] = float(np.mean([record.units for record in ours.records]))
    others = {
        "static": static(models),
        "loading_storage": loading(gpus, STORAGE_BYTES_PER_S / GROUP),
        "loading_memory": loading(gpus, HOST_BYTES_PER_S),
        "as_printed": elastic(gpus, models, aware=False),
    }
    for name, make in others.items():
        found[f"{name}_s"] = mean_act_s(play(traces, make))
        found[f"ratio_{name}"] = found[f"{name}_s"] / found["elastic_s"]
    return rounded(found), decision_seconds(ours)


def play_on_fewer(cell: Cell) -> dict[str, float]:
    """Own groups on all GPUs, how busy they are, and our pool on fewer GPUs."""
    traces = scored_batch(cell.size, cell.seed, cell.models, pace=cell.pace)
    own = play(traces, static(cell.models))
    executed_s = sum(record.execution_s for record in own.records)
    found = {
        "static_s": mean_act_s(own),
        "static_busy": executed_s / len(cell.models) / max(own.ends_s.values()),
    }
    for gpus in cell.fewer:
        found[f"elastic_{gpus}_s"] = mean_act_s(play(traces, elastic(gpus, cell.models)))
        found[f"loading_memory_{gpus}_s"] = mean_act_s(
            play(traces, loading(gpus, HOST_BYTES_PER_S))
        )
    return found


def _fraction(plan: Plan, models: tuple[str, ...], pace: float) -> dict[str, Any]:
    """The fewest GPUs on which the rewards of one batch complete as soon as on own groups (Figure
    8b, right)."""
    setting = plan.setting
    cells = [
        Cell(models, setting.gpus, setting.scored_batch, pace, seed, setting.gpus_tried)
        for seed in plan.seeds
    ]
    found = median_by_key(plan.run_jobs("rewards on fewer GPUs", play_on_fewer, cells))
    rows = [
        {
            "gpus": gpus,
            **{key: found[f"{key[:-2]}_{gpus}_s"] for key in ("elastic_s", "loading_memory_s")},
        }
        for gpus in setting.gpus_tried
    ]
    enough = [row["gpus"] for row in rows if row["elastic_s"] <= found["static_s"]]
    return {
        "static_s": found["static_s"],
        "static_busy": found["static_busy"],
        "gpus": rows,
        "fraction": rounded(min(enough) / setting.gpus) if enough else None,
    }


def _play_judge(setting: Setting, seed: int) -> dict[str, float]:
    """Search alone, one judge on all GPUs: five replicas of eight GPUs against the pool."""
    traces = scored_batch(setting.search_batch, seed, [JUDGE], pace=DENSE)
    replicas = min(JUDGE_REPLICAS, setting.gpus // JUDGE_GROUP)
    ours, ratio = _compare(
        traces, elastic(setting.gpus, [JUDGE]), static([JUDGE], JUDGE_GROUP, replicas)
    )
    return rounded({**ratio, **mean_action(ours.records)})


def _play_skewed(setting: Setting, models: Sequence[str], seed: int) -> dict[str, float]:
    """Domains whose shares fall as 1 / rank, at the batch of Table 1."""
    traces = scored_batch(setting.search_batch, seed, models, pace=DENSE, skew=1.0)
    return rounded(_compare(traces, elastic(setting.gpus, models), static(models))[1])


def _compare(traces: Sequence[Trace], pool: Make, groups: Make) -> tuple[Replay, dict[str, float]]:
    """The replay of the pool, and its seconds against those of groups of their own."""
    ours = play(traces, pool)
    ours_s, own_s = mean_act_s(ours), mean_act_s(play(traces, groups))
    return ours, {"elastic_s": ours_s, "static_s": own_s, "ratio": own_s / ours_s}


def _measure_busy(setting: Setting, seed: int) -> dict[str, Any]:
    """How busy the own groups of each of twelve teachers are (Figure 3b)."""
    names = teachers(BUSY_TEACHERS)
    replay = play(scored_batch(setting.scored_batch, seed, names, pace=SPARSE), static(names))
    executed: dict[str, float] = defaultdict(float)
    for record in replay.records:
        executed[record.asked.call.service] += record.execution_s
    span_s = max(replay.ends_s.values())
    shares = [rounded(executed[name] / span_s) for name in names]
    return {"shares": shares, "mean": rounded(float(np.mean(shares)))}
