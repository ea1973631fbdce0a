"""Reward models on GPUs: evict on execution, groups of their own, and loading (Figures 3b and 8b, Table 1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from treadle_sim.tools.gpus import ElasticGpus, LoadingGroups, StaticGroups
from treadle_sim.tools.reward_models import (
    DENSE,
    HOST_BYTES_PER_S,
    JUDGE,
    SPARSE,
    Restoring,
    scored_batch,
    services,
    teachers,
)
from treadle_sim.tools.trace import Make, play

from treadle_bench.tools.setting import (
    DIGITS,
    Plan,
    Setting,
    Timed,
    act_s,
    middle,
    overheads,
    per_action,
    rounded,
    timed,
)

GROUP = 4  # §6.1: four GPUs a model
JUDGE_GROUP, JUDGE_REPLICAS = 8, 5  # §6.1: of search alone
# Serverless loading: what its authors' local storage gives each node, or the host's memory; a new engine each time.
STORAGE_BYTES_PER_S = 10e9
ENGINE_START_S = 1.0  # contexts and communicators; a choice
BUSY_TEACHERS = 12  # Figure 3b
SPARSE_PACE, DENSE_PACE = "as in Figure 3b", "as in Table 1"
PACES = {SPARSE_PACE: SPARSE, DENSE_PACE: DENSE}


def elastic(gpus: int, names: Sequence[str], *, aware: bool = True) -> Make:
    known = services(list(names))
    return lambda timeline, report: ElasticGpus(timeline, report, gpus, known, Restoring(), aware=aware)


def static(names: Sequence[str], degree: int = GROUP, replicas: int = 1) -> Make:
    return lambda timeline, report: StaticGroups(timeline, report, names, degree, replicas)


def loading(gpus: int, bytes_per_s: float) -> Make:
    rule = Restoring(bytes_per_s, ENGINE_START_S)
    return lambda timeline, report: LoadingGroups(timeline, report, gpus // GROUP, GROUP, rule)


@dataclass(frozen=True)
class Cell:
    """One batch of rewards. fewer: on how few GPUs else it is tried."""

    models: tuple[str, ...]
    gpus: int
    size: int
    pace: float
    seed: int
    fewer: tuple[int, ...] = ()


def run(plan: Plan) -> dict[str, Any]:
    setting = plan.setting
    models = (*teachers(setting.gpus // GROUP - 1), JUDGE)
    pairs = [(size, name) for size in setting.scored_batches for name in PACES]
    cells = [Cell(models, setting.gpus, size, PACES[name], seed) for size, name in pairs for seed in plan.seeds]
    done = plan.each("rewards", played, cells)
    rows = [
        {"batch": size, "pace": name, **middle([figures for figures, _ in done[first : first + len(plan.seeds)]])}
        for (size, name), first in zip(pairs, range(0, len(cells), len(plan.seeds)), strict=True)
    ]
    fractions = {name: _fraction(plan, models, pace) for name, pace in PACES.items()}
    plan.told("one judge; twelve teachers")
    return {
        "batches": rows,
        "fractions": fractions,
        "judge": middle([_judge(setting, seed) for seed in plan.seeds]),
        "busy": _busy(setting, plan.seeds[0]),
        "skewed": middle([_skewed(setting, models, seed) for seed in plan.seeds]),
        **overheads([part for _, part in done]),
    }


def played(cell: Cell) -> tuple[dict[str, float], Timed]:
    """One batch by everybody; ratios are to the elastic scheduler."""
    models, gpus = cell.models, cell.gpus
    traces = scored_batch(cell.size, cell.seed, models, pace=cell.pace)
    ours = play(traces, elastic(gpus, models))
    found = {"elastic_s": act_s(ours), **per_action(ours.records)}
    found["units"] = float(np.mean([record.units for record in ours.records]))
    others = {
        "static": static(models),
        "loading_storage": loading(gpus, STORAGE_BYTES_PER_S / GROUP),
        "loading_memory": loading(gpus, HOST_BYTES_PER_S),
        "as_printed": elastic(gpus, models, aware=False),
    }
    for name, make in others.items():
        found[f"{name}_s"] = act_s(play(traces, make))
        found[f"ratio_{name}"] = found[f"{name}_s"] / found["elastic_s"]
    return rounded(found), timed(ours)


def on_fewer(cell: Cell) -> dict[str, float]:
    """Groups of their own on all GPUs, how busy they are, and ours on fewer."""
    traces = scored_batch(cell.size, cell.seed, cell.models, pace=cell.pace)
    own = play(traces, static(cell.models))
    executed_s = sum(record.execution_s for record in own.records)
    found = {"static_s": act_s(own), "static_busy": executed_s / len(cell.models) / max(own.ends_s.values())}
    for gpus in cell.fewer:
        found[f"elastic_{gpus}_s"] = act_s(play(traces, elastic(gpus, cell.models)))
        found[f"loading_memory_{gpus}_s"] = act_s(play(traces, loading(gpus, HOST_BYTES_PER_S)))
    return found


def _fraction(plan: Plan, models: tuple[str, ...], pace: float) -> dict[str, Any]:
    """On how few GPUs the rewards of one batch complete as soon as on groups of their own (Figure 8b, right)."""
    setting = plan.setting
    cells = [Cell(models, setting.gpus, setting.scored_batch, pace, seed, setting.gpus_tried) for seed in plan.seeds]
    found = middle(plan.each("rewards on fewer GPUs", on_fewer, cells))
    rows = [
        {"gpus": gpus, **{key: found[f"{key[:-2]}_{gpus}_s"] for key in ("elastic_s", "loading_memory_s")}}
        for gpus in setting.gpus_tried
    ]
    enough = [row["gpus"] for row in rows if row["elastic_s"] <= found["static_s"]]
    return {
        "static_s": found["static_s"],
        "static_busy": found["static_busy"],
        "gpus": rows,
        "fraction": round(min(enough) / setting.gpus, DIGITS) if enough else None,
    }


def _judge(setting: Setting, seed: int) -> dict[str, float]:
    """Search alone, one judge on all GPUs: five replicas of eight against the pool."""
    traces = scored_batch(setting.search_batch, seed, [JUDGE], pace=DENSE)
    ours = play(traces, elastic(setting.gpus, [JUDGE]))
    replicas = min(JUDGE_REPLICAS, setting.gpus // JUDGE_GROUP)
    own_s = act_s(play(traces, static([JUDGE], JUDGE_GROUP, replicas)))
    return rounded(
        {"elastic_s": act_s(ours), "static_s": own_s, "ratio": own_s / act_s(ours), **per_action(ours.records)}
    )


def _skewed(setting: Setting, models: Sequence[str], seed: int) -> dict[str, float]:
    """Domains whose shares fall as 1 / rank, at the batch of Table 1."""
    traces = scored_batch(setting.search_batch, seed, models, pace=DENSE, skew=1.0)
    ours_s, own_s = act_s(play(traces, elastic(setting.gpus, models))), act_s(play(traces, static(models)))
    return rounded({"elastic_s": ours_s, "static_s": own_s, "ratio": own_s / ours_s})


def _busy(setting: Setting, seed: int) -> dict[str, Any]:
    """How busy each of twelve teachers' own groups are (Figure 3b)."""
    names = teachers(BUSY_TEACHERS)
    replay = play(scored_batch(setting.scored_batch, seed, names, pace=SPARSE), static(names))
    executed: dict[str, float] = defaultdict(float)
    for record in replay.records:
        executed[record.asked.call.service] += record.execution_s
    span_s = max(replay.ends_s.values())
    shares = [round(executed[name] / span_s, DIGITS) for name in names]
    return {"shares": shares, "mean": round(float(np.mean(shares)), DIGITS)}
