"""Coding on CPU cores: the elastic scheduler against a pod a trajectory and fixed degrees (Figures 3, 6, 7, 8a, 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from treadle_core.tools.action import CPU_CORES, UnitSet, key_units
from treadle_core.tools.cpu import Machine
from treadle_sim.tools.coding import Floats, Shape, ToolSeconds, coding_batch, shapes
from treadle_sim.tools.cores import ElasticCores, equal_machines
from treadle_sim.tools.pods import PodRules, Pods
from treadle_sim.tools.trace import Call, Make, Trace, play
from treadle_sim.workloads.public_traces import read_public
from treadle_sim.workloads.workload import read_traces

from treadle_bench.options import BenchOptions
from treadle_bench.tools.setting import (
    DIGITS,
    Plan,
    Setting,
    Timed,
    act_s,
    middle,
    overheads,
    parts,
    per_action,
    rounded,
    timed,
    windows,
)

NODE_MEMORY_BYTES = 2_400_000_000_000  # §6.1
OVERHEAD_S = 0.024  # of an action: what the paper's own system takes at batch 1,280 (Table 1); ours is measured live
READY_TIMEOUT_S = 60.0  # a choice; the paper says that the control plane times out at 1,536 and not when
SOURCE = "swebench_verified_mini_gemini3"
GAPS = "claude_code_sessions_kvct"
GAPS_FLOOR_S = 3.0  # the least gap in the sessions, in whole seconds: the harness's own turn-around
WINDOW_S = 30.0
SMALL_NODE = 64  # cores: twice what a reward may have

Batch = Callable[[int, int], tuple[Trace, ...]]


@dataclass(frozen=True)
class Cores:
    """One size of the cluster, and who may run on it."""

    setting: Setting
    cores: int

    def elastic(self, *, foresees: bool = True) -> Make:
        nodes = self._nodes()
        return lambda timeline, report: ElasticCores(timeline, report, nodes, OVERHEAD_S, foresees=foresees)

    def pods(self, rules: PodRules | None = None) -> Make:
        nodes, asked = self._nodes(), rules or PodRules()
        return lambda timeline, report: Pods(timeline, report, nodes, asked)

    def _nodes(self) -> tuple[Machine, ...]:
        return equal_machines(self.setting.nodes, self.cores // self.setting.nodes, NODE_MEMORY_BYTES)


@dataclass(frozen=True)
class Cell:
    """One batch on one cluster."""

    at: Cores
    size: int
    seed: int
    batch: Batch


def run(options: BenchOptions, plan: Plan) -> dict[str, Any]:
    """Raises PublicTraceError, TraceFileError, OSError."""
    setting, among = plan.setting, _shapes(options)
    batch = partial(coding_batch, among=among)
    whole = Cores(setting, setting.cores)
    found: dict[str, Any] = {"shapes": _shapes_from(options)}
    clusters = [Cores(setting, cores) for cores in setting.cores_tried]
    pairs = [(whole, size) for size in setting.batches] + [(at, setting.batch) for at in clusters]
    cells = [Cell(at, size, seed, batch) for at, size in pairs for seed in plan.seeds]
    done = plan.each("coding", played, cells)
    rows = [
        {"batch": size, "cores": at.cores, **middle([figures for figures, _ in done[first : first + len(plan.seeds)]])}
        for (at, size), first in zip(pairs, range(0, len(cells), len(plan.seeds)), strict=True)
    ]
    found["batches"] = [row for row in rows if row["cores"] == setting.cores]
    found["cores"] = sorted((row for row in rows if row["batch"] == setting.batch), key=lambda row: int(row["cores"]))
    found |= overheads([part for _, part in done])
    plan.told("coding, one batch from near")
    found["near"] = near(batch(setting.batch, plan.seeds[0]), whole, Cores(setting, setting.cores // 2))
    large = play(batch(setting.large_batch, plan.seeds[0]), whole.elastic())
    found["varied_batch"] = setting.varied_batch
    found["table1"] = [
        {"batch": setting.batch, **found["near"]["elastic"]},
        {"batch": setting.large_batch, **parts(large)},
    ]
    found["sensitivity"] = sensitivity(options, plan, among)
    return found


def played(cell: Cell) -> tuple[dict[str, float], Timed]:
    """One batch on one cluster, by everybody; ratios are to the elastic scheduler."""
    at, traces = cell.at, cell.batch(cell.size, cell.seed)
    elastic = play(traces, at.elastic())
    ours_s = act_s(elastic)
    found = {"elastic_s": ours_s, "least_s": least_s(traces)}
    others = {
        "pods": (traces, at.pods()),
        "pods_timeouts": (traces, at.pods(PodRules(ready_timeout_s=READY_TIMEOUT_S))),
        "as_printed": (traces, at.elastic(foresees=False)),
        "degree_4": (fixed(traces, 4), at.elastic()),
        "degree_16": (fixed(traces, 16), at.elastic()),
    }
    for name, (asked, make) in others.items():
        found[f"{name}_s"] = act_s(play(asked, make))
        found[f"ratio_{name}"] = found[f"{name}_s"] / ours_s
    return rounded(found), timed(elastic)


def fixed(traces: Sequence[Trace], degree: int) -> tuple[Trace, ...]:
    """The same trajectories, each reward with exactly so many cores (Figure 9)."""
    return tuple(
        replace(
            trace,
            calls=tuple(
                replace(call, cost={CPU_CORES: UnitSet((degree,))}) if call.reward else call for call in trace.calls
            ),
        )
        for trace in traces
    )


def least_s(traces: Sequence[Trace]) -> float:
    """What no scheduler can be below: every action at once, on the most cores that it may have."""
    return OVERHEAD_S * float(np.mean([len(trace.calls) for trace in traces])) + float(
        np.mean([sum(_at_most_s(call) for call in trace.calls) for trace in traces])
    )


def _at_most_s(call: Call) -> float:
    most = key_units(call.cost[CPU_CORES])[-1]
    return call.single_unit_s / (1.0 if call.elasticity is None else call.elasticity.efficiency(most) * most)


def near(traces: Sequence[Trace], whole: Cores, half: Cores) -> dict[str, Any]:
    """One batch as Figures 3, 6 and 7 show it."""
    elastic, pods = play(traces, whole.elastic()), play(traces, whole.pods())
    shares = [trace.single_unit_s / (trace.single_unit_s + trace.generation_s) for trace in traces]
    halves = {"elastic": play(traces, half.elastic()), "pods": play(traces, half.pods())}
    return {
        "elastic": parts(elastic),
        "pods": parts(pods),
        "windows": {"elastic": windows(elastic, WINDOW_S), "pods": windows(pods, WINDOW_S)},
        "active_share": round(float(np.mean(shares)), DIGITS),
        "active_share_deciles": np.percentile(shares, range(0, 101, 10)).round(3).tolist(),
        "half": {name: {"act_s": round(act_s(each), DIGITS), **parts(each)} for name, each in halves.items()},
        "act_s": {"elastic": round(act_s(elastic), DIGITS), "pods": round(act_s(pods), DIGITS)},
        "actions": float(len(elastic.records)),
        "per_action_pods": rounded(per_action(pods.records)),
    }


@dataclass(frozen=True)
class Changed:
    """One assumption changed, at one size of a batch, against pods (0) or rewards with so many cores."""

    name: str
    batch: Batch
    rules: PodRules
    at: Cores
    size: int
    seed: int
    degree: int = 0


def sensitivity(options: BenchOptions, plan: Plan, among: Sequence[Shape]) -> list[dict[str, Any]]:
    """The ratios to pods at three sizes and to fixed degrees at one each (Figure 9), one seed, with one assumption
    changed at a time."""
    setting = plan.setting
    batch, whole = partial(coding_batch, among=among), Cores(setting, setting.cores)
    changed: dict[str, tuple[Batch, PodRules, Cores]] = {"as assumed": (batch, PodRules(), whole)}
    for share in (0.02, 0.05, 0.1, 0.2):
        fixed_share = partial(batch, serial_share=(share, share))
        changed[f"serial share of tests {share:g}"] = (fixed_share, PodRules(), whole)
    changed["pods run tests with -n 4"] = (batch, PodRules(reward_processes=4), whole)
    changed["pods are there at once"] = (batch, PodRules(binds_per_s=1e9, starts_per_s=1e9, start_s=0.0), whole)
    for active in (0.35, 0.6):
        changed[f"actions fill {active:.0%} of a life"] = (partial(batch, active_share=active), PodRules(), whole)
    small = replace(setting, nodes=max(setting.cores // SMALL_NODE, 1))
    changed[f"nodes of {SMALL_NODE} cores"] = (batch, PodRules(), Cores(small, setting.cores))
    if among:
        changed["shapes from the fitted distributions"] = (coding_batch, PodRules(), whole)
    if options.data is not None:
        for name, drawn in _measured_tools(options.data).items():
            changed[name] = (partial(batch, tool_s=drawn), PodRules(), whole)
    sizes = [(size, 0) for size in (setting.batches[0], setting.varied_batch, setting.batch)]
    sizes += [(setting.small_batch, 4), (setting.batch, 16)]
    jobs = [Changed(name, *how, size, plan.seeds[0], degree) for name, how in changed.items() for size, degree in sizes]
    rows: dict[str, dict[str, Any]] = {}
    for job, found in zip(jobs, plan.each("coding, what it hangs on", compared, jobs), strict=True):
        rows.setdefault(job.name, {"changed": job.name}).update(found)
    return list(rows.values())


def compared(job: Changed) -> dict[str, float]:
    """Whom the elastic scheduler is held against, and what the batch is like."""
    traces = job.batch(job.size, job.seed)
    ours_s = act_s(play(traces, job.at.elastic()))
    if job.degree:
        return rounded(
            {f"ratio_degree_{job.degree}": act_s(play(fixed(traces, job.degree), job.at.elastic())) / ours_s}
        )
    pods_s = act_s(play(traces, job.at.pods(job.rules)))
    rewards_s = float(np.mean([trace.calls[-1].single_unit_s for trace in traces]))
    tools_s = float(np.mean([trace.single_unit_s for trace in traces])) - rewards_s
    return rounded({f"ratio_{job.size}": pods_s / ours_s, "tools_s": tools_s, "rewards_s": rewards_s})


@dataclass(frozen=True)
class Resampled:
    """Seconds drawn from measured ones."""

    values: tuple[float, ...]

    def __call__(self, rng: np.random.Generator, count: int) -> Floats:
        return np.array(self.values)[rng.integers(len(self.values), size=count)]


def _shapes(options: BenchOptions) -> tuple[Shape, ...]:
    if options.traces is not None:
        return shapes(read_traces(options.traces))
    if options.data is not None:
        return shapes(read_public(SOURCE, options.data))
    return ()


def _shapes_from(options: BenchOptions) -> str:
    if options.traces is not None:
        return "traces"
    return SOURCE if options.data is not None else "fitted"


def _measured_tools(data: Path) -> Mapping[str, ToolSeconds]:
    """Tool times as two public data sets have them; both hold more than the tool (the page says what)."""
    of_runs = [step.tool_s for work in read_public(SOURCE, data) for step in work.steps[:-1]]
    of_sessions = [
        max(0.0, step.tool_s - GAPS_FLOOR_S)
        for work in read_public(GAPS, data)
        if len(work.steps) > 1
        for step in work.steps[:-1]
    ]
    return {f"tools as in {SOURCE}": Resampled(tuple(of_runs)), f"tools as in {GAPS}": Resampled(tuple(of_sessions))}
