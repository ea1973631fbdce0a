"""What every part of `treadle bench tools` plays on: the paper's testbed, its sizes, and a smaller one for --quick."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
from treadle_sim.tools.trace import Record, Replay

DIGITS = 4
Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Setting:
    """Sizes of ARL-Tangram §6. cores: in `nodes` machines. batches: of Figure 8a; fewer of both in a quick run."""

    nodes: int = 5
    cores: int = 1_280
    batches: tuple[int, ...] = (128, 256, 512, 1_024, 1_280, 1_536)
    batch: int = 1_280  # §6.1
    small_batch: int = 256  # §6.4: against degree 4
    large_batch: int = 1_536  # §6.3
    cores_tried: tuple[int, ...] = (768, 1_024, 1_920)  # beside `cores`
    varied_batch: int = 512  # of what the ratios hang on
    gpus: int = 40  # five nodes of eight
    scored_batches: tuple[int, ...] = (256, 1_024, 2_048, 3_072)
    scored_batch: int = 1_024  # §6.3, figure 8b right
    gpus_tried: tuple[int, ...] = (8, 11, 12, 16, 20, 24, 32, 40)
    search_batch: int = 2_048  # §6.1
    waiting: int = 1_536  # of the decisions that are timed
    sessions: int = 200
    live_calls: int = 400
    live_trajectories: int = 24
    workers: int | None = None  # processes; None: as many as the bench is given


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


def act_s(replay: Replay) -> float:
    """Mean over trajectories of their actions' completion times, summed (§6.3); what came to nothing counts too."""
    totals: dict[str, float] = defaultdict(float)
    for record in replay.records:
        totals[record.asked.trace.trajectory_id] += record.completion_s
    return float(np.mean(list(totals.values())))


def parts(replay: Replay) -> dict[str, float]:
    """Seconds a trajectory by part of its life, and of an action by part of its completion (Figure 7, Table 1)."""
    count = len(replay.traces)
    of = {
        kind: [record for record in replay.records if record.asked.call.reward == reward]
        for kind, reward in (("tools", False), ("rewards", True))
    }
    found = {f"{kind}_s": sum(record.completion_s for record in records) / count for kind, records in of.items()}
    found["generation_s"] = sum(trace.generation_s for trace in replay.traces) / count
    found |= per_action(replay.records)
    found["makespan_s"] = max(replay.ends_s.values())
    if of["rewards"]:
        found["reward_units"] = float(np.mean([record.units for record in of["rewards"]]))
    return rounded(found)


def per_action(records: Sequence[Record]) -> dict[str, float]:
    """Mean seconds of an action: executing, queueing, and the system's own (Table 1); the 99th percentile of ACT."""
    return {
        "execution_s": float(np.mean([record.execution_s for record in records])),
        "queue_s": float(np.mean([record.queue_s for record in records])),
        "overhead_s": float(np.mean([record.overhead_s for record in records])),
        "act_p99_s": float(np.percentile([record.completion_s for record in records], 99)),
    }


def windows(replay: Replay, width_s: float) -> dict[str, list[float]]:
    """By window of the time of arrival: mean ACT of the actions that came in it, and how many did (Figures 3d, 6)."""
    came: dict[int, list[float]] = defaultdict(list)
    for record in replay.records:
        came[int(record.asked.arrived_s // width_s)].append(record.completion_s)
    order = sorted(came)
    return {
        "at_s": [at * width_s for at in order],
        "act_s": [round(float(np.mean(came[at])), DIGITS) for at in order],
        "actions": [float(len(came[at])) for at in order],
    }


def middle(of_seeds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Of each key the median over seeds, and under `spread` least and greatest."""
    found: dict[str, Any] = {key: round(median(each[key] for each in of_seeds), DIGITS) for key in of_seeds[0]}
    if len(of_seeds) > 1:
        found["spread"] = {
            key: [
                round(min(each[key] for each in of_seeds), DIGITS),
                round(max(each[key] for each in of_seeds), DIGITS),
            ]
            for key in of_seeds[0]
        }
    return found


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {key: round(value, DIGITS) for key, value in values.items()}


class Timed(NamedTuple):
    """Real seconds of a replay's decisions: each of them, and those that actions waited for, summed; and the virtual
    seconds that its actions executed."""

    took_s: list[float]
    felt_s: float
    executed_s: float


def timed(replay: Replay) -> Timed:
    executed_s = sum(record.execution_s for record in replay.records)
    return Timed(replay.decisions.took_s, sum(replay.decisions.felt_s), executed_s)


def overheads(parts: Sequence[Timed]) -> dict[str, float]:
    """Real seconds of decisions against the virtual seconds of what they started. `overhead_pct`: each action counts
    the whole decision that it waited for; `busy_pct`: each decision counts once."""
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
    """How the bench is run. told: of each step that begins. pool: processes that take jobs; None: this one does."""

    setting: Setting
    seeds: Sequence[int]
    told: Callable[[str], None]
    pool: ProcessPoolExecutor | None = None

    def each(self, what: str, function: Callable[[Job], Done], jobs: Sequence[Job]) -> list[Done]:
        """What comes of each job, in their order. A job and what comes of it can be pickled."""
        self.told(what)
        return list(map(function, jobs) if self.pool is None else self.pool.map(function, jobs))


@contextmanager
def planned(setting: Setting, seeds: Sequence[int], workers: int, told: Callable[[str], None]) -> Iterator[Plan]:
    """A plan, with processes of its own where there are to be several."""
    if workers <= 1:
        yield Plan(setting, seeds, told)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield Plan(setting, seeds, told, pool)
