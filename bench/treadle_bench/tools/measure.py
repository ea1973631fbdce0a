"""`treadle bench tools`: ARL-Tangram's evaluation under a virtual clock, and the tools service itself.

`act_ratio_*`: mean completion time of a trajectory's actions under the baseline over that under the elastic scheduler,
medians over `repeats` seeds. `pod`: a pod for each trajectory, without timeouts; `_1280` at that batch on 1,280 cores,
`_min` the least over batches. `dop4_256`, `dop16_1280`: the same scheduler with a fixed number of cores a reward, at
that batch. gpu_fraction_same_act: the least part of the GPUs on which rewards complete as soon as on groups of their
own, null where none does; at the pace of Figure 3b. decision_p99_ms: real, of the worst state; overhead_pct: real
seconds of the decisions that actions waited for, over the virtual seconds that they executed. live_*: null where there
is no sandbox, and `live.missing` says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from treadle_bench.options import BenchOptions
from treadle_bench.tools import calls as tools_calls
from treadle_bench.tools import cores as tools_cores
from treadle_bench.tools import decisions as tools_decisions
from treadle_bench.tools import gpus as tools_gpus
from treadle_bench.tools import live as tools_live
from treadle_bench.tools.setting import FULL, QUICK, planned

NAME = "tools"
KEYS = (
    "decision_p99_ms",
    "overhead_pct",
    "act_ratio_pod_1280",
    "act_ratio_min",
    "act_ratio_dop4_256",
    "act_ratio_dop16_1280",
    "gpu_fraction_same_act",
    "live_p50_ms",
    "live_p99_ms",
    "sessions_ok",
)


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises PublicTraceError, TraceFileError, OSError, ProcessError."""
    setting = QUICK if options.quick else FULL

    def told(what: str) -> None:
        options.progress.print(f"tools: {what}", style="dim", highlight=False)

    told("the live service")
    live = await tools_live.run(options, setting)
    seeds = range(options.seed, options.seed + options.repeats)
    with planned(setting, seeds, setting.workers or options.workers, told) as plan:
        decisions = await asyncio.to_thread(tools_decisions.run, plan)
        cores = await asyncio.to_thread(tools_cores.run, options, plan)
        gpus = await asyncio.to_thread(tools_gpus.run, plan)
        calls = await asyncio.to_thread(tools_calls.run, plan)
    at_batch = {row["batch"]: row for row in cores["batches"]}
    here = live["missing"] is None
    return {
        "decision_p99_ms": decisions["worst_row_p99_ms"],
        "overhead_pct": cores["overhead_pct"],
        "act_ratio_pod_1280": at_batch[setting.batch]["ratio_pods"],
        "act_ratio_min": min(_column(cores["batches"], "ratio_pods")),
        "act_ratio_dop4_256": at_batch[setting.small_batch]["ratio_degree_4"],
        "act_ratio_dop16_1280": at_batch[setting.batch]["ratio_degree_16"],
        "gpu_fraction_same_act": gpus["fractions"][tools_gpus.SPARSE_PACE]["fraction"],
        "live_p50_ms": live["invoke"]["p50_ms"] if here else None,
        "live_p99_ms": live["invoke"]["p99_ms"] if here else None,
        "sessions_ok": live["sessions"]["ok"] if here else None,
        "repeats": options.repeats,
        "seeds": [seeds[0], seeds[-1]],
        "quick": options.quick,
        "setting": {"cores": setting.cores, "nodes": setting.nodes, "gpus": setting.gpus, "batch": setting.batch}
        | {"small_batch": setting.small_batch, "scored_batch": setting.scored_batch},
        "decisions": decisions,
        "cores": cores,
        "gpus": gpus,
        "calls": calls,
        "live": live,
    }


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows]
