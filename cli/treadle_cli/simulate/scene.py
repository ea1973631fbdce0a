"""Compute the data of the pictures: engines over time, and where the longest trajectories' time
went.

All systems show the same trajectories in the same order, so that a row compares across systems.
Below them comes the trajectory that ends last, unless it is one of them. A cell of a strip is the
mean over its time.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_sim.cluster import engine_id
from treadle_sim.outcome import Span
from treadle_sim.rollout import Run
from treadle_sim.systems import HEDDLE, TREADLE, System
from treadle_sim.workloads.workload import Workload

from treadle_cli.simulate.comparison import Comparison, sort_longest_first
from treadle_cli.simulate.logs import Log

MOST_BARS = 12  # trajectories of a panel
CELLS = 900  # cells of time: about one a pixel
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one trajectory without gaps: time without a span is queue, also the wait for a
    ticket. moved_s: when it continued on another engine."""

    label: str
    spans: tuple[Span, ...]
    moved_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """Cells of one engine. batch: mean sequences that decode; prefill: share of the time that it
    prefills."""

    engine_id: str
    gpus: int
    batch: Floats
    prefill: Floats


@dataclass(frozen=True, slots=True)
class Panel:
    name: str
    title: str
    engines: str
    makespan_s: float
    lanes: tuple[Lane, ...]
    bars: tuple[Bars, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """All panels, on one axis from 0 to end_s. cells_s: edges of the cells."""

    panels: tuple[Panel, ...]
    cells_s: Floats
    bound_s: float

    @property
    def end_s(self) -> float:
        return float(self.cells_s[-1])

    @property
    def most_batch(self) -> float:
        """Return the largest mean batch of any cell."""
        return (
            max(
                (float(lane.batch.max()) for panel in self.panels for lane in panel.lanes),
                default=1.0,
            )
            or 1.0
        )


def choose_systems(
    systems: Sequence[System], comparison: Comparison, log: Log | None = None
) -> list[str]:
    """Return the names of the systems to draw: the best baseline, Heddle and Treadle, else the
    first two; of a logged step, how it was run in place of Heddle."""
    known = [system.name for system in systems]
    names = dict.fromkeys((comparison.best_baseline, log.way if log else HEDDLE.name, TREADLE.name))
    wanted = [name for name in names if name in known]
    return wanted or known[:2]


def make_scene(runs: Sequence[Run], workload: Workload, comparison: Comparison) -> Scene:
    """Return the scene of several runs. runs: of the systems to draw, with spans."""
    end_s = max(run.outcome.makespan_s for run in runs)
    edges = np.linspace(0.0, end_s, CELLS + 1)
    longest = sort_longest_first(workload)[:MOST_BARS]
    return Scene(
        panels=tuple(_panel(run, workload, edges, longest, comparison) for run in runs),
        cells_s=edges,
        bound_s=comparison.bound.lower_s,
    )


def _panel(
    run: Run, workload: Workload, edges: Floats, longest: list[int], comparison: Comparison
) -> Panel:
    times = run.outcome.times
    last = max(range(len(times)), key=lambda index: times[index].finished_s)
    shown = [(index, "") for index in longest] + ([] if last in longest else [(last, "last: ")])
    best = " (the best baseline)" if run.system.name == comparison.best_baseline else ""
    name, _, told = run.system.title.partition(": ")
    return Panel(
        name=run.system.name,
        title=f"{name}{best}" + (f": {told}" if told else ""),
        engines=run.cluster.describe(),
        makespan_s=run.outcome.makespan_s,
        lanes=tuple(
            Lane(engine_id(index), model.gpus, *average_cells(spans, edges))
            for index, (model, spans) in enumerate(
                zip(run.cluster.engines, run.outcome.engine_spans, strict=True)
            )
        ),
        bars=tuple(_bars(workload, index, before, times[index].spans) for index, before in shown),
    )


def _bars(workload: Workload, index: int, before: str, spans: Sequence[Span]) -> Bars:
    work = workload.trajectories[index]
    ordered = sorted(spans, key=lambda span: span.start_s)
    waits = [
        Span("queue", before_s, span.start_s, span.engine)
        for before_s, span in zip([0.0, *(span.end_s for span in ordered)], ordered, strict=False)
        if span.start_s > before_s
    ]
    moved = tuple(
        later.start_s
        for earlier, later in itertools.pairwise(ordered)
        if later.engine != earlier.engine
    )
    return Bars(
        f"{before}{work.prompt_id} #{work.sample} · {work.gen_tokens:,} tok",
        (*waits, *ordered),
        moved,
    )


def average_cells(
    spans: Sequence[tuple[float, float, int]], edges: Floats
) -> tuple[Floats, Floats]:
    """Return the mean batch and the share of prefill between each two edges; spans in order of
    time, batch -1 for a prefill."""
    if not spans:
        return np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    starts, ends, batches = (np.asarray(column, np.float64) for column in zip(*spans, strict=True))
    corners = np.column_stack([starts, ends]).ravel()
    width = np.diff(edges)

    def mean(weights: Floats) -> Floats:
        grown = np.cumsum(weights * (ends - starts))
        at_corners = np.column_stack([np.concatenate([[0.0], grown[:-1]]), grown]).ravel()
        return np.asarray(
            np.diff(np.interp(edges, corners, at_corners, left=0.0)) / width, np.float64
        )

    return mean(np.maximum(batches, 0.0)), np.clip(
        mean((batches < 0.0).astype(np.float64)), 0.0, 1.0
    )
