"""Coding on CPU cores: the elastic scheduler against a pod for each trajectory and fixed degrees
(Figures 3, 6–9)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from treadle_core.tools.action import CPU_CORES, UnitSet, key_units
from treadle_core.tools.cpu import Machine
from treadle_sim.workloads.workload import TrajectoryWork, read_traces

from treadle_bench.bench import BenchOptions
from treadle_bench.public_traces import read_public
from treadle_bench.summary import rounded
from treadle_bench.tools.coding import Floats, ToolSeconds, coding_batch, drop_texts
from treadle_bench.tools.elastic_cores import ElasticCores, equal_machines
from treadle_bench.tools.pods import PodRules, Pods
from treadle_bench.tools.setting import (
    DecisionSeconds,
    Plan,
    Setting,
    by_arrival,
    decision_seconds,
    mean_act_s,
    mean_action,
    split_times,
)
from treadle_bench.tools.trace import Make, Trace, play

NODE_MEMORY_BYTES = 2_400_000_000_000  # §6.1
OVERHEAD_S = (
    0.024  # of an action: the paper's own system at batch 1,280 (Table 1); ours is measured live
)
# a choice; the paper says that the control plane times out at 1,536, but not after how long
READY_TIMEOUT_S = 60.0
SOURCE = "swebench_verified_mini_gemini3"
GAPS = "claude_code_sessions_kvct"
GAPS_FLOOR_S = 3.0  # the smallest gap in the sessions, in whole seconds: time of the harness itself
WINDOW_S = 30.0
PODS = PodRules()
SMALL_NODE = 64  # cores: twice the most that a reward may have

Batch = Callable[[int, int], tuple[Trace, ...]]


@dataclass(frozen=True)
class Cores:
    """A cluster of one size, and the systems that run on it."""

    setting: Setting
    cores: int

    def elastic(self, *, foresees: bool = True) -> Make:
        nodes = self._nodes()
        return lambda timeline, report: ElasticCores(
            timeline, report, nodes, OVERHEAD_S, foresees=foresees
        )

    def pods(self, rules: PodRules = PODS) -> Make:
        nodes = self._nodes()
        return lambda timeline, report: Pods(timeline, report, nodes, rules)

    def _nodes(self) -> tuple[Machine, ...]:
        return equal_machines(
            self.setting.nodes, self.cores // self.setting.nodes, NODE_MEMORY_BYTES
        )


@dataclass(frozen=True)
class Cell:
    """One batch on one cluster."""

    at: Cores
    size: int
    seed: int
    batch: Batch


def measure(options: BenchOptions, plan: Plan) -> dict[str, Any]:
    """Raises PublicTraceError, TraceFileError, OSError."""
    setting, (source, among) = plan.setting, _read_shapes(options)
    batch = partial(coding_batch, among=among)
    whole = Cores(setting, setting.cores)
    clusters = [Cores(setting, cores) for cores in setting.cores_tried]
    pairs = [(whole, size) for size in setting.batches] + [(at, setting.batch) for at in clusters]
    cells = [[Cell(at, size, seed, batch) for seed in plan.seeds] for at, size in pairs]
    medians, costs = plan.run_cells("coding", play_cell, cells)
    rows = [
        {"batch": size, "cores": at.cores, **row}
        for (at, size), row in zip(pairs, medians, strict=True)
    ]
    plan.report("coding, one batch in detail")
    near = _play_in_detail(
        batch(setting.batch, plan.seeds[0]), whole, Cores(setting, setting.cores // 2)
    )
    large = play(batch(setting.large_batch, plan.seeds[0]), whole.elastic())
    return {
        "shapes": source,
        "batches": [row for row in rows if row["cores"] == setting.cores],
        "cores": sorted(
            (row for row in rows if row["batch"] == setting.batch),
            key=lambda row: int(row["cores"]),
        ),
        **costs,
        "near": near,
        "varied_batch": setting.varied_batch,
        "table1": [
            {"batch": setting.batch, **near["elastic"]},
            {"batch": setting.large_batch, **split_times(large)},
        ],
        "sensitivity": sensitivity(options, plan, among),
    }


def play_cell(cell: Cell) -> tuple[dict[str, float], DecisionSeconds]:
    """One batch on one cluster under every system; ratios are to the elastic scheduler."""
    at, traces = cell.at, cell.batch(cell.size, cell.seed)
    elastic = play(traces, at.elastic())
    ours_s = mean_act_s(elastic)
    found = {"elastic_s": ours_s, "least_s": least_s(traces)}
    others = {
        "pods": (traces, at.pods()),
        "pods_timeouts": (traces, at.pods(PodRules(ready_timeout_s=READY_TIMEOUT_S))),
        "as_printed": (traces, at.elastic(foresees=False)),
        "degree_4": (fix_degree(traces, 4), at.elastic()),
        "degree_16": (fix_degree(traces, 16), at.elastic()),
    }
    for name, (asked, make) in others.items():
        found[f"{name}_s"] = mean_act_s(play(asked, make))
        found[f"ratio_{name}"] = found[f"{name}_s"] / ours_s
    return rounded(found), decision_seconds(elastic)


def fix_degree(traces: Sequence[Trace], degree: int) -> tuple[Trace, ...]:
    """The same trajectories, each reward with exactly so many cores (Figure 9)."""
    cost = {CPU_CORES: UnitSet((degree,))}
    return tuple(
        replace(
            trace,
            calls=tuple(replace(call, cost=cost) if call.reward else call for call in trace.calls),
        )
        for trace in traces
    )


def least_s(traces: Sequence[Trace]) -> float:
    """The lowest mean ACT that is possible: every action starts at once on the most cores that it
    may have."""
    ran_s = [
        sum(call.seconds_on(key_units(call.cost[CPU_CORES])[-1]) for call in trace.calls)
        for trace in traces
    ]
    return OVERHEAD_S * float(np.mean([len(trace.calls) for trace in traces])) + float(
        np.mean(ran_s)
    )


def _play_in_detail(traces: Sequence[Trace], whole: Cores, half: Cores) -> dict[str, Any]:
    """One batch with the values of Figures 3, 6 and 7."""
    runs = {"elastic": play(traces, whole.elastic()), "pods": play(traces, whole.pods())}
    halves = {"elastic": play(traces, half.elastic()), "pods": play(traces, half.pods())}
    shares = [trace.single_unit_s / (trace.single_unit_s + trace.generation_s) for trace in traces]
    return {
        **{name: split_times(each) for name, each in runs.items()},
        "windows": {name: by_arrival(each, WINDOW_S) for name, each in runs.items()},
        "active_share": rounded(float(np.mean(shares))),
        "active_share_deciles": np.percentile(shares, range(0, 101, 10)).round(3).tolist(),
        "half": {
            name: {"act_s": rounded(mean_act_s(each)), **split_times(each)}
            for name, each in halves.items()
        },
        "act_s": {name: rounded(mean_act_s(each)) for name, each in runs.items()},
        "actions": float(len(runs["elastic"].records)),
        "per_action_pods": rounded(mean_action(runs["pods"].records)),
    }


@dataclass(frozen=True)
class Changed:
    """One changed assumption at one batch size. degree: cores of each reward of the baseline; 0:
    the baseline is pods."""

    name: str
    at: Cores
    batch: Batch
    rules: PodRules = PODS
    size: int = 0
    seed: int = 0
    degree: int = 0


def sensitivity(
    options: BenchOptions, plan: Plan, among: Sequence[TrajectoryWork]
) -> list[dict[str, Any]]:
    """Ratios to pods at three sizes and to two fixed degrees (Figure 9), one seed, one assumption
    changed at a time."""
    setting = plan.setting
    batch, whole = partial(coding_batch, among=among), Cores(setting, setting.cores)
    small = replace(setting, nodes=max(setting.cores // SMALL_NODE, 1))
    at_once = PodRules(binds_per_s=1e9, starts_per_s=1e9, start_s=0.0)
    changed = [
        Changed("as assumed", whole, batch),
        *(
            Changed(
                f"serial share of tests {share:g}",
                whole,
                partial(batch, serial_share=(share, share)),
            )
            for share in (0.02, 0.05, 0.1, 0.2)
        ),
        Changed("pods run tests with -n 4", whole, batch, PodRules(reward_processes=4)),
        Changed("pods are there at once", whole, batch, at_once),
        *(
            Changed(
                f"actions fill {active:.0%} of a life", whole, partial(batch, active_share=active)
            )
            for active in (0.35, 0.6)
        ),
        Changed(f"nodes of {SMALL_NODE} cores", Cores(small, setting.cores), batch),
    ]
    if among:
        changed.append(Changed("shapes from the fitted distributions", whole, coding_batch))
    if options.data is not None:
        measured = _measured_tools(options.data)
        changed += [
            Changed(name, whole, partial(batch, tool_s=drawn)) for name, drawn in measured.items()
        ]
    sizes = [(size, 0) for size in (setting.batches[0], setting.varied_batch, setting.batch)]
    sizes += [(setting.small_batch, 4), (setting.batch, 16)]
    jobs = [
        replace(each, size=size, seed=plan.seeds[0], degree=degree)
        for each in changed
        for size, degree in sizes
    ]
    rows: dict[str, dict[str, Any]] = {}
    for job, found in zip(
        jobs, plan.run_jobs("coding, one assumption changed", play_changed, jobs), strict=True
    ):
        rows.setdefault(job.name, {"changed": job.name}).update(found)
    return list(rows.values())


def play_changed(job: Changed) -> dict[str, float]:
    """The ratio of the baseline to the elastic scheduler; against pods also the seconds of tools
    and rewards."""
    traces = job.batch(job.size, job.seed)
    ours_s = mean_act_s(play(traces, job.at.elastic()))
    if job.degree:
        fixed_s = mean_act_s(play(fix_degree(traces, job.degree), job.at.elastic()))
        return {f"ratio_degree_{job.degree}": rounded(fixed_s / ours_s)}
    pods_s = mean_act_s(play(traces, job.at.pods(job.rules)))
    rewards_s = float(np.mean([trace.calls[-1].single_unit_s for trace in traces]))
    tools_s = float(np.mean([trace.single_unit_s for trace in traces])) - rewards_s
    return rounded(
        {f"ratio_{job.size}": pods_s / ours_s, "tools_s": tools_s, "rewards_s": rewards_s}
    )


def _read_shapes(options: BenchOptions) -> tuple[str, tuple[TrajectoryWork, ...]]:
    """Where the shapes of trajectories come from, and the shapes; none: they are drawn from fitted
    distributions."""
    if options.traces is not None:
        return "traces", drop_texts(read_traces(options.traces))
    if options.data is not None:
        return SOURCE, drop_texts(read_public(SOURCE, options.data))
    return "fitted", ()


def _measured_tools(data: Path) -> Mapping[str, ToolSeconds]:
    """Tool times of two public data sets; both include more than the tool, as the page says."""
    of_runs = [step.tool_s for work in read_public(SOURCE, data) for step in work.steps[:-1]]
    of_sessions = [
        max(0.0, step.tool_s - GAPS_FLOOR_S)
        for work in read_public(GAPS, data)
        for step in work.steps[:-1]
    ]
    of = {SOURCE: of_runs, GAPS: of_sessions}
    return {
        f"tools as in {name}": partial(_draw_from, np.array(values)) for name, values in of.items()
    }


def _draw_from(values: Floats, rng: np.random.Generator, count: int) -> Floats:
    return values[rng.integers(len(values), size=count)]
