"""What the parts of `treadle bench tools` share: sizes, replays turned into figures, and processes
for their jobs."""

import itertools
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from treadle_bench.summary import median_by_key, rounded
from treadle_bench.tools.trace import Record, Replay

Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Setting:
    """Sizes of ARL-Tangram §6; a quick run has smaller ones. cores: in `nodes` machines. batches:
    of Figure 8a."""

    nodes: int = 5
    cores: int = 1_280
    batches: tuple[int, ...] = (128, 256, 512, 1_024, 1_280, 1_536)
    batch: int = 1_280  # §6.1
    small_batch: int = 256  # §6.4: against degree 4
    large_batch: int = 1_536  # §6.3
    cores_tried: tuple[int, ...] = (768, 1_024, 1_920)  # beside `cores`
    varied_batch: int = 512  # where assumptions are changed
    gpus: int = 40  # five nodes of eight
    scored_batches: tuple[int, ...] = (256, 1_024, 2_048, 3_072)
    scored_batch: int = 1_024  # §6.3, figure 8b right
    gpus_tried: tuple[int, ...] = (8, 11, 12, 16, 20, 24, 32, 40)
    search_batch: int = 2_048  # §6.1
    waiting: int = 1_536  # actions, in the decisions that are timed
    sessions: int = 200
    live_calls: int = 400
    live_trajectories: int = 24
    workers: int | None = None  # processes; None: as many as the options say


FULL = Setting()
QUICK = Setting(
    nodes=1,
    cores=128,
    batches=(16, 32),
    batch=32,
    small_batch=16,
    large_batch=48,
    cores_tried=(64,),
    varied_batch=32,
    gpus=16,
    scored_batches=(64,),
    scored_batch=64,
    gpus_tried=(8, 16),
    search_batch=64,
    waiting=128,
    sessions=8,
    live_calls=20,
    live_trajectories=4,
    workers=1,
)


def mean_act_s(replay: Replay) -> float:
    """Mean over trajectories of the sum of their actions' completion times (§6.3), failed actions
    included."""
    totals: dict[str, float] = defaultdict(float)
    for record in replay.records:
        totals[record.asked.trace.trajectory_id] += record.completion_s
    return float(np.mean(list(totals.values())))


def split_times(replay: Replay) -> dict[str, float]:
    """Seconds of a trajectory's tools, rewards and generation, and of an action's parts (Figure 7,
    Table 1)."""
    count = len(replay.traces)
    of = {
        kind: [record for record in replay.records if record.asked.call.reward == reward]
        for kind, reward in (("tools", False), ("rewards", True))
    }
    found = {
        f"{kind}_s": sum(record.completion_s for record in records) / count
        for kind, records in of.items()
    }
    found["generation_s"] = sum(trace.generation_s for trace in replay.traces) / count
    found |= mean_action(replay.records)
    found["makespan_s"] = max(replay.ends_s.values())
    if of["rewards"]:
        found["reward_units"] = float(np.mean([record.units for record in of["rewards"]]))
    return rounded(found)


def mean_action(records: Sequence[Record]) -> dict[str, float]:
    """Mean seconds of an action: execution, queue, the system's overhead (Table 1); 99th percentile
    of completion."""
    return {
        "execution_s": float(np.mean([record.execution_s for record in records])),
        "queue_s": float(np.mean([record.queue_s for record in records])),
        "overhead_s": float(np.mean([record.overhead_s for record in records])),
        "act_p99_s": float(np.percentile([record.completion_s for record in records], 99)),
    }


def by_arrival(replay: Replay, width_s: float) -> dict[str, list[float]]:
    """For each window of `width_s` seconds: mean completion time and number of the actions that
    arrived in it (Figures 3d, 6)."""
    arrived: dict[int, list[float]] = defaultdict(list)
    for record in replay.records:
        arrived[int(record.asked.arrived_s // width_s)].append(record.completion_s)
    order = sorted(arrived)
    return {
        "at_s": [at * width_s for at in order],
        "act_s": [rounded(float(np.mean(arrived[at]))) for at in order],
        "actions": [float(len(arrived[at])) for at in order],
    }


class DecisionSeconds(NamedTuple):
    """Real seconds of a replay's decisions: took_s: of each decision. felt_s: of the decisions that
    actions waited for, summed over actions. executed_s: virtual seconds that its actions executed.
    """

    took_s: list[float]
    felt_s: float
    executed_s: float


def decision_seconds(replay: Replay) -> DecisionSeconds:
    """Of one replay."""
    executed_s = sum(record.execution_s for record in replay.records)
    return DecisionSeconds(replay.decisions.took_s, sum(replay.decisions.felt_s), executed_s)


def overheads(parts: Sequence[DecisionSeconds]) -> dict[str, float]:
    """Real seconds of decisions over the virtual seconds of what they started. `overhead_pct`: each
    action counts the whole decision that it waited for. `busy_pct`: each decision counts once."""
    executed_s = sum(part.executed_s for part in parts)
    took_s = [took for part in parts for took in part.took_s]
    return {
        "overhead_pct": round(100.0 * sum(part.felt_s for part in parts) / executed_s, 5),
        "busy_pct": round(100.0 * sum(took_s) / executed_s, 5),
        "decisions": float(len(took_s)),
        "decision_mean_ms": round(1e3 * float(np.mean(took_s)), 4),
        "decision_p99_ms": round(1e3 * float(np.percentile(took_s, 99)), 4),
    }


@dataclass(frozen=True)
class Plan:
    """How the bench is run. report: prints which part begins. pool: processes for jobs; None: jobs
    run in this one."""

    setting: Setting
    seeds: Sequence[int]
    report: Callable[[str], None]
    pool: ProcessPoolExecutor | None = None

    def run_jobs(
        self, what: str, function: Callable[[Job], Done], jobs: Sequence[Job]
    ) -> list[Done]:
        """The result of each job, in their order. Jobs and results are pickled."""
        self.report(what)
        return list(map(function, jobs) if self.pool is None else self.pool.map(function, jobs))

    def run_cells(
        self,
        what: str,
        play: Callable[[Job], tuple[dict[str, float], DecisionSeconds]],
        cells: Sequence[Sequence[Job]],
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Of each cell, which has a job for each seed, the medians of its figures; and the
        overheads of all."""
        done = iter(self.run_jobs(what, play, [job for cell in cells for job in cell]))
        of_cells = [list(itertools.islice(done, len(cell))) for cell in cells]
        medians = [median_by_key([figures for figures, _ in seeds]) for seeds in of_cells]
        return medians, overheads([spent for seeds in of_cells for _, spent in seeds])


@contextmanager
def open_plan(
    setting: Setting, seeds: Sequence[int], workers: int, report: Callable[[str], None]
) -> Iterator[Plan]:
    """A plan, with a pool of processes where there are several workers."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) if workers > 1 else nullcontext() as pool:
        yield Plan(setting, seeds, report, pool)
