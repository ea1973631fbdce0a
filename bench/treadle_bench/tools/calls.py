"""API calls of search agents: each for itself with retries, or through the Basic manager (Figures 3d, 6)."""

from __future__ import annotations

from typing import Any

import numpy as np
from treadle_sim.tools.api_calls import LIMITS, ManagedCalls, ProviderModel, UnmanagedCalls, search_batch
from treadle_sim.tools.trace import Make, Replay, play

from treadle_bench.tools.setting import Plan, Timed, act_s, middle, overheads, rounded, timed, windows

WINDOW_S = 15.0


def run(plan: Plan) -> dict[str, Any]:
    plan.told("API calls")
    size = plan.setting.search_batch
    managed: list[dict[str, float]] = []
    unmanaged: list[dict[str, float]] = []
    kept: list[Timed] = []
    shown: dict[str, Any] = {}
    for seed in plan.seeds:
        traces = search_batch(size, seed)
        for name, rows in (("managed", managed), ("unmanaged", unmanaged)):
            provider = ProviderModel(LIMITS)
            replay = play(traces, _make(name, provider, seed))
            rows.append(_row(replay, provider))
            if name == "managed":
                kept.append(timed(replay))
            shown.setdefault(name, windows(replay, WINDOW_S))
    return {
        "batch": size,
        "limits": {"concurrency": LIMITS.concurrency, "quota": LIMITS.quota, "period_s": LIMITS.period_s},
        "managed": middle(managed),
        "unmanaged": middle(unmanaged),
        "windows": shown,
        **overheads(kept),
    }


def _make(name: str, provider: ProviderModel, seed: int) -> Make:
    if name == "managed":
        return lambda timeline, report: ManagedCalls(timeline, report, provider)
    return lambda timeline, report: UnmanagedCalls(timeline, report, provider, seed)


def _row(replay: Replay, provider: ProviderModel) -> dict[str, float]:
    answered = [record for record in replay.records if not record.failed]
    without = {record.asked.trace.trajectory_id for record in replay.records if record.failed}
    total_s = sum(record.completion_s for record in replay.records)
    return rounded(
        {
            "act_s": act_s(replay),
            "call_s": float(np.mean([record.completion_s for record in replay.records])),
            "answered_call_s": total_s / len(answered),
            "whole_trajectory_s": total_s / (len(replay.traces) - len(without)),
            "failed_calls": 1.0 - len(answered) / len(replay.records),
            "failed_trajectories": len(without) / len(replay.traces),
            "refused": float(provider.refused),
            "makespan_s": max(replay.ends_s.values()),
        }
    )
