"""Coding on CPU cores: the elastic scheduler against a pod a trajectory and fixed degrees (Figures 3, 6, 7, 8a, 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from treadle_core.elastic.action import CPU_CORES, UnitSet
from treadle_sim.parametric import LogNormal
from treadle_sim.public_traces import read_public
from treadle_sim.tools.coding import Shape, ToolSeconds, coding_batch, shapes
from treadle_sim.tools.elastic_cores import ElasticCores, equal_nodes
from treadle_sim.tools.play import Make, play
from treadle_sim.tools.pods import PodRules, Pods
from treadle_sim.tools.trace import Replay, Trace
from treadle_sim.trace_file import read_traces

from treadle_cli.bench.options import BenchOptions
from treadle_cli.bench.tools_setting import (
    DIGITS,
    Setting,
    act_s,
    middle,
    overheads,
    parts,
    per_action,
    rounded,
    seeds,
    windows,
)

NODE_MEMORY_BYTES = 2_400_000_000_000  # §6.1
OVERHEAD_S = 0.024  # of an action: what the paper's own system takes at batch 1,280 (Table 1); ours is measured live
READY_TIMEOUT_S = 60.0  # a choice; the paper says that the control plane times out at 1,536 and not when
SOURCE = "swebench_verified_mini_gemini3"
GAPS = "claude_code_sessions_kvct"
GAPS_FLOOR_S = 3.0  # the least gap in the sessions, in whole seconds: the harness's own turn-around
WINDOW_S = 30.0

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

    def _nodes(self) -> Any:
        return equal_nodes(self.setting.nodes, self.cores // self.setting.nodes, NODE_MEMORY_BYTES)


def run(options: BenchOptions, setting: Setting, told: Callable[[str], None]) -> dict[str, Any]:
    """Raises PublicTraceError, TraceFileError, OSError."""
    among = _shapes(options)
    batch = partial(coding_batch, among=among)
    whole = Cores(setting, setting.cores)
    all_seeds = list(seeds(options.seed, options.repeats))
    replays: list[Replay] = []
    found: dict[str, Any] = {"shapes": _shapes_from(options)}
    rows = []
    for size in setting.batches:
        told(f"coding, batch {size}")
        rows.append({"batch": size, **middle([_cell(batch(size, seed), whole, replays) for seed in all_seeds])})
    found["batches"] = rows
    told("coding, cores")
    found["cores"] = [
        {"cores": cores, **middle([_cell(batch(setting.batch, seed), Cores(setting, cores), []) for seed in all_seeds])}
        for cores in setting.cores_tried
    ]
    found |= overheads(replays)
    told("coding, one batch from near")
    traces = batch(setting.batch, options.seed)
    found["near"] = near(traces, whole, Cores(setting, setting.cores // 2))
    large = play(batch(setting.large_batch, options.seed), whole.elastic())
    found["table1"] = [
        {"batch": setting.batch, **found["near"]["elastic"]},
        {"batch": setting.large_batch, **parts(large)},
    ]
    told("coding, what the figures hang on")
    found["sensitivity"] = sensitivity(options, setting, whole, among)
    return found


def _cell(traces: Sequence[Trace], at: Cores, kept: list[Replay]) -> dict[str, float]:
    """One batch on one cluster, by everybody; ratios are to the elastic scheduler."""
    elastic = play(traces, at.elastic())
    kept.append(elastic)
    ours_s = act_s(elastic)
    found = {"elastic_s": ours_s}
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
    return rounded(found)


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
        "active_shares": [round(each, 3) for each in sorted(shares)],
        "half": {name: {"act_s": round(act_s(each), DIGITS), **parts(each)} for name, each in halves.items()},
        "act_s": {"elastic": round(act_s(elastic), DIGITS), "pods": round(act_s(pods), DIGITS)},
        "actions": float(len(elastic.records)),
        "per_action_pods": rounded(per_action(pods.records)),
    }


def sensitivity(options: BenchOptions, setting: Setting, whole: Cores, among: Sequence[Shape]) -> list[dict[str, Any]]:
    """The ratio to pods at the smallest batch and at the paper's, with one assumption changed at a time."""
    changed: dict[str, tuple[Batch, PodRules]] = {"as assumed": (partial(coding_batch, among=among), PodRules())}
    for share in ((0.02, 0.02), (0.05, 0.05), (0.1, 0.1), (0.2, 0.2)):
        name = f"serial share of tests {share[0]:g}"
        changed[name] = (partial(coding_batch, among=among, serial_share=share), PodRules())
    changed["pods run tests with -n 4"] = (partial(coding_batch, among=among), PodRules(reward_processes=4))
    changed["pods are there at once"] = (
        partial(coding_batch, among=among),
        PodRules(binds_per_s=1e9, starts_per_s=1e9, start_s=0.0),
    )
    changed["tools take 2.4 s (median 0.8)"] = (
        partial(coding_batch, among=among, tool_s=LogNormal(0.8, 1.48, 120.0).draw),
        PodRules(),
    )
    for active in (0.35, 0.6):
        name = f"actions fill {active:.0%} of a life"
        changed[name] = (partial(coding_batch, among=among, active_share=active), PodRules())
    if among:
        changed["shapes from the fitted distributions"] = (coding_batch, PodRules())
    if options.data is not None:
        for name, drawn in _measured_tools(options).items():
            changed[name] = (partial(coding_batch, among=among, tool_s=drawn), PodRules())
    rows = []
    for name, (batch, rules) in changed.items():
        row: dict[str, Any] = {"changed": name}
        for size in (setting.batches[0], setting.batch):
            ratios, tools_s, rewards_s = [], [], []
            for seed in seeds(options.seed, min(options.repeats, 3)):
                traces = batch(size, seed)
                ratios.append(act_s(play(traces, whole.pods(rules))) / act_s(play(traces, whole.elastic())))
                rewards_s.append(float(np.mean([trace.calls[-1].single_unit_s for trace in traces])))
                tools_s.append(float(np.mean([trace.single_unit_s for trace in traces])) - rewards_s[-1])
            row[f"ratio_{size}"] = round(median(ratios), DIGITS)
            row |= {"tools_s": round(median(tools_s), 1), "rewards_s": round(median(rewards_s), 1)}
        rows.append(row)
    return rows


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


def _measured_tools(options: BenchOptions) -> Mapping[str, ToolSeconds]:
    """Tool times as two public data sets have them; both hold more than the tool (the page says what)."""
    assert options.data is not None
    of_runs = [step.tool_s for work in read_public(SOURCE, options.data) for step in work.steps[:-1]]
    of_sessions = [
        max(0.0, step.tool_s - GAPS_FLOOR_S)
        for work in read_public(GAPS, options.data)
        if len(work.steps) > 1
        for step in work.steps[:-1]
    ]

    def drawn(among: Sequence[float]) -> ToolSeconds:
        values = np.array(among)
        return lambda rng, count: values[rng.integers(len(values), size=count)]

    return {f"tools as in {SOURCE}": drawn(of_runs), f"tools as in {GAPS}": drawn(of_sessions)}


__all__ = ["Cores", "fixed", "near", "run", "sensitivity"]
