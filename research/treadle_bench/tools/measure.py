"""`treadle bench tools`: ARL-Tangram's evaluation under a virtual clock, and the tools service
itself.

`act_ratio_*`: mean action completion time of a trajectory under the baseline over that under the
elastic scheduler, medians over `repeats` seeds. `pod`: a pod for each trajectory, without timeouts;
`_1280`: at that batch on 1,280 cores; `_min`: the least over batches. `dop4_256`, `dop16_1280`: the
same scheduler with a fixed number of cores for a reward, at that batch. `gpu_fraction_same_act`:
the smallest fraction of the GPUs on which rewards complete as soon as on groups of GPUs of their
own, null where there is none; at the pace of Figure 3b. `decision_p99_ms`: real, of the worst
state. `overhead_pct`: real seconds of the decisions that actions waited for, over the virtual
seconds that actions executed. `live_*`: null where there is no sandbox; `live.missing` says why.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.summary import median_by_key, rounded
from treadle_bench.tools import cores, decisions, gpus, live
from treadle_bench.tools.api_calls import (
    LIMITS,
    ManagedCalls,
    ProviderModel,
    UnmanagedCalls,
    search_batch,
)
from treadle_bench.tools.page import page_values
from treadle_bench.tools.plot import draw
from treadle_bench.tools.setting import (
    FULL,
    QUICK,
    Plan,
    by_arrival,
    decision_seconds,
    mean_act_s,
    open_plan,
    overheads,
)
from treadle_bench.tools.trace import Executor, Replay, play

CALLS_WINDOW_S = 15.0


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises PublicTraceError, TraceFileError, OSError, ProcessError."""
    setting = QUICK if options.quick else FULL

    def report(what: str) -> None:
        options.progress.print(f"tools: {what}", style="dim", highlight=False)

    report("the live service")
    lived = await live.measure(options, setting)
    with open_plan(setting, options.seeds, setting.workers or options.workers, report) as plan:
        decided = await asyncio.to_thread(decisions.measure, plan)
        coding = await asyncio.to_thread(cores.measure, options, plan)
        rewards = await asyncio.to_thread(gpus.measure, plan)
        calls = await asyncio.to_thread(_play_calls, plan)
    at_batch = {row["batch"]: row for row in coding["batches"]}
    here = lived["missing"] is None
    return {
        "decision_p99_ms": decided["worst_row_p99_ms"],
        "overhead_pct": coding["overhead_pct"],
        "act_ratio_pod_1280": at_batch[setting.batch]["ratio_pods"],
        "act_ratio_min": min(float(row["ratio_pods"]) for row in coding["batches"]),
        "act_ratio_dop4_256": at_batch[setting.small_batch]["ratio_degree_4"],
        "act_ratio_dop16_1280": at_batch[setting.batch]["ratio_degree_16"],
        "gpu_fraction_same_act": rewards["fractions"][gpus.SPARSE_PACE]["fraction"],
        "live_p50_ms": lived["invoke"]["p50_ms"] if here else None,
        "live_p99_ms": lived["invoke"]["p99_ms"] if here else None,
        "sessions_ok": lived["sessions"]["ok"] if here else None,
        "repeats": options.repeats,
        "seeds": [options.seeds[0], options.seeds[-1]],
        "quick": options.quick,
        "setting": {
            key: getattr(setting, key)
            for key in ("cores", "nodes", "gpus", "batch", "small_batch", "scored_batch")
        },
        "decisions": decided,
        "cores": coding,
        "gpus": rewards,
        "calls": calls,
        "live": lived,
    }


def _play_calls(plan: Plan) -> dict[str, Any]:
    """API calls of search agents: each agent calls and retries by itself, or all calls go through
    the Basic manager (Figures 3d, 6)."""
    plan.report("API calls")
    rows: dict[str, list[dict[str, float]]] = {"managed": [], "unmanaged": []}
    kept = []
    windows: dict[str, Any] = {}
    for seed in plan.seeds:
        traces = search_batch(plan.setting.search_batch, seed)
        makes: tuple[Callable[..., Executor], ...] = (
            ManagedCalls,
            partial(UnmanagedCalls, seed=seed),
        )
        for name, make in zip(rows, makes, strict=True):
            provider = ProviderModel(LIMITS)
            replay = play(traces, partial(make, provider=provider))
            rows[name].append(_summarize_calls(replay, provider))
            windows.setdefault(name, by_arrival(replay, CALLS_WINDOW_S))
            if name == "managed":
                kept.append(decision_seconds(replay))
    return {
        "batch": plan.setting.search_batch,
        "limits": {
            "concurrency": LIMITS.concurrency,
            "quota": LIMITS.quota,
            "period_s": LIMITS.period_s,
        },
        **{name: median_by_key(of_seeds) for name, of_seeds in rows.items()},
        "windows": windows,
        **overheads(kept),
    }


def _summarize_calls(replay: Replay, provider: ProviderModel) -> dict[str, float]:
    answered = [record for record in replay.records if not record.failed]
    lost = {record.asked.trace.trajectory_id for record in replay.records if record.failed}
    total_s = sum(record.completion_s for record in replay.records)
    return rounded(
        {
            "act_s": mean_act_s(replay),
            "call_s": float(np.mean([record.completion_s for record in replay.records])),
            "answered_call_s": total_s / len(answered),
            "whole_trajectory_s": total_s / (len(replay.traces) - len(lost)),
            "failed_calls": 1.0 - len(answered) / len(replay.records),
            "failed_trajectories": len(lost) / len(replay.traces),
            "refused": float(provider.refused),
            "makespan_s": max(replay.ends_s.values()),
        }
    )


BENCH = Bench(
    "tools",
    "Actions of tools and rewards: the elastic scheduler against pods, fixed degrees, GPU groups "
    "and retries under a virtual clock; decisions and the live service in real time. --quick: "
    "seconds. Takes 10 minutes.",
    measure,
    page=page_values,
    draw=draw,
    decides=("core/treadle_core/tools",),
)
