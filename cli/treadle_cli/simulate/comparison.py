"""Compare the figures of simulated rollouts: one definition of each, for the terminal, the page and
the JSON.

A ratio is the other's makespan over the system's own, so above 1 is faster, whatever the other is.
The best baseline is the fastest of those simulated, seed by seed. Over several seeds every figure
is the median.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from operator import truediv
from typing import Any

import numpy as np
from treadle_sim.lower_bound import alone_s, work_s
from treadle_sim.systems import BASELINES, HEDDLE, ORACLE, TREADLE, VERL, Run, Setting, System
from treadle_sim.workloads.workload import Workload

from treadle_cli.simulate.logs import Log

TAIL = 0.1  # share of the trajectories, by tokens: those that a rollout waits for
MOST = 0.9  # share of the trajectories


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one rollout. queue_share_longest: the share of the wall time of the longest tenth
    that is neither prefill nor decode nor tool, but waiting at an engine or for a ticket.
    recomputed_tokens: prefilled more than once."""

    makespan_s: float
    tokens_per_s: float
    half_ended_s: float
    most_ended_s: float
    queue_share_longest: float
    migrations: float
    preemptions: float
    prefilled_tokens: float
    recomputed_tokens: float


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one system. engines: of the first seed. ratios: to "best_baseline", "verl",
    "oracle" and "bound", None if that was not simulated."""

    system: System
    engines: str
    median: Figures
    makespans_s: tuple[float, ...]
    ratios: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Bound:
    """Bounds of a workload, as medians over seeds. longest_alone_s: of the slowest trajectory on an
    engine of `longest_gpus`, of which longest_tools_s are tools; work_s: all work spread evenly."""

    lower_s: float
    longest_alone_s: float
    longest_tools_s: float
    longest_gpus: int
    work_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All systems on one workload. best_baseline: its name, empty without any."""

    bound: Bound
    rows: tuple[Row, ...]
    best_baseline: str

    def row(self, name: str) -> Row | None:
        """Return the row of a system, None if it was not simulated."""
        return next((row for row in self.rows if row.system.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Return the part of summary.json that cli/README.md describes."""
        return {
            "bound": asdict(self.bound),
            "best_baseline": self.best_baseline or None,
            "systems": [
                {
                    "system": row.system.name,
                    "title": row.system.title,
                    "engines": row.engines,
                    **asdict(row.median),
                    "makespans_s": list(row.makespans_s),
                    **{f"ratio_to_{other}": ratio for other, ratio in row.ratios.items()},
                }
                for row in self.rows
            ],
        }


def compare(
    systems: Sequence[System], settings: Sequence[Setting], runs: Mapping[str, Sequence[Run]]
) -> Comparison:
    """Compare systems. runs: of each system's name one a setting, in the settings' order."""
    makespans: dict[str, list[float]] = {
        name: [run.outcome.makespan_s for run in each] for name, each in runs.items()
    }
    bounds = [_bound(setting) for setting in settings]
    baselines = [system.name for system in BASELINES if system.name in runs]
    others: dict[str, Sequence[float]] = {
        "best_baseline": [
            min(each_s) for each_s in zip(*(makespans[name] for name in baselines), strict=True)
        ],
        "verl": makespans.get(VERL.name, ()),
        "oracle": makespans.get(ORACLE.name, ()),
        "bound": [bound.lower_s for bound in bounds],
    }

    def make_row(system: System) -> Row:
        own, own_s = runs[system.name], makespans[system.name]
        figures = [
            _figures(run, setting.workload) for run, setting in zip(own, settings, strict=True)
        ]
        ratios = {
            name: statistics.median(map(truediv, other_s, own_s)) if other_s else None
            for name, other_s in others.items()
        }
        return Row(
            system, own[0].cluster.describe(), Figures(*_medians(figures)), tuple(own_s), ratios
        )

    return Comparison(
        bound=Bound(*_medians(bounds)),
        rows=tuple(make_row(system) for system in systems),
        best_baseline=min(
            baselines, key=lambda name: statistics.median(makespans[name]), default=""
        ),
    )


def _medians(each: Sequence[Figures] | Sequence[Bound]) -> list[Any]:
    """Return the median of every field, in their order."""
    return [statistics.median(values) for values in zip(*map(astuple, each), strict=True)]


def _figures(run: Run, workload: Workload) -> Figures:
    outcome = run.outcome
    tail = max(1, round(TAIL * len(workload.trajectories)))
    longest = [outcome.times[index] for index in sort_longest_first(workload)[:tail]]
    wall_s = sum(times.finished_s for times in longest)
    queue_s = wall_s - sum(times.prefill_s + times.decode_s + times.tool_s for times in longest)
    prefilled = sum(times.prefilled_tokens for times in outcome.times)
    return Figures(
        makespan_s=outcome.makespan_s,
        tokens_per_s=outcome.tokens_per_s,
        half_ended_s=outcome.finish_quantile_s(0.5),
        most_ended_s=outcome.finish_quantile_s(MOST),
        queue_share_longest=queue_s / wall_s if wall_s > 0.0 else 0.0,
        migrations=outcome.migrations,
        preemptions=outcome.preemptions,
        prefilled_tokens=prefilled,
        recomputed_tokens=max(0, prefilled - count_once_tokens(workload)),
    )


def sort_longest_first(workload: Workload) -> list[int]:
    """Return the indices of the trajectories, the one with the most tokens first."""
    tokens = [work.gen_tokens for work in workload.trajectories]
    return [int(index) for index in np.argsort(np.negative(tokens), kind="stable")]


def count_once_tokens(workload: Workload) -> int:
    """Return the tokens that any schedule prefills: each prompt once, and what tools answered
    before a further step.

    A step whose context is all cached computes one token; those count as computed once too.
    """
    works = workload.trajectories
    prompts = {work.prompt_id: work.prompt_tokens for work in works}
    answers = sum(max(1, step.obs_tokens) for work in works for step in work.steps[:-1])
    return sum(prompts.values()) + answers + len(works) - len(prompts)


def _bound(setting: Setting) -> Bound:
    usable = [
        model for model in setting.models if model.kv_tokens > 0 and model.gpus <= setting.gpus
    ]
    works = setting.workload.trajectories
    fastest = [min((alone_s(work, model), model.gpus) for model in usable) for work in works]
    longest_s, gpus = max(fastest)
    tools_s = works[fastest.index((longest_s, gpus))].tool_s
    all_s = work_s(setting.workload, usable, setting.gpus)
    return Bound(max(longest_s, all_s), longest_s, tools_s, gpus, all_s)


def choose_systems(
    systems: Sequence[System], comparison: Comparison, log: Log | None = None
) -> list[str]:
    """Return the names of the systems to draw: the best baseline, Heddle and Treadle, else the
    first two; of a logged step, how it was run in place of Heddle."""
    known = [system.name for system in systems]
    names = dict.fromkeys((comparison.best_baseline, log.way if log else HEDDLE.name, TREADLE.name))
    wanted = [name for name in names if name in known]
    return wanted or known[:2]
