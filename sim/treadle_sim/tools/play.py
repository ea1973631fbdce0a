"""Plays traces on an executor under the virtual clock: who generates, who waits for an action, when it ends.

Invariants: an action is submitted once, when the generation before it is over; the next generation starts when the
action has ended, failed or not; a trajectory ends with its last action. A trajectory opens when it starts, before its
first generation, as its environment does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from treadle_sim.events import Timeline
from treadle_sim.tools.trace import Asked, Decisions, Record, Replay, Trace

Report = Callable[[Record], None]


class Executor(Protocol):
    """Who runs actions. It reports each when it has ended."""

    decisions: Decisions

    def open(self, trace: Trace) -> None: ...

    def submit(self, asked: Asked) -> None: ...

    def close(self, trace: Trace) -> None: ...


Make = Callable[[Timeline, Report], Executor]


class StuckError(RuntimeError):
    """An executor that left actions undone."""


def play(traces: Sequence[Trace], make: Make) -> Replay:
    """Raises StuckError where an executor runs out of events before all trajectories have ended."""
    timeline = Timeline()
    records: list[Record] = []
    ends_s: dict[str, float] = {}

    def generate(trace: Trace, at: int) -> None:
        if at == len(trace.calls):
            executor.close(trace)
            ends_s[trace.trajectory_id] = timeline.now
            return
        timeline.after(trace.calls[at].generation_s, submit, trace, at)

    def submit(trace: Trace, at: int) -> None:
        executor.submit(Asked(trace, at, timeline.now))

    def report(record: Record) -> None:
        records.append(record)
        generate(record.asked.trace, record.asked.at + 1)

    def begin(trace: Trace) -> None:
        executor.open(trace)
        generate(trace, 0)

    executor = make(timeline, report)
    for trace in traces:
        timeline.at(trace.starts_s, begin, trace)
    timeline.run(lambda: len(ends_s) < len(traces))
    if len(ends_s) < len(traces):
        raise StuckError(f"{len(traces) - len(ends_s)} of {len(traces)} trajectories never ended")
    return Replay(tuple(traces), tuple(records), ends_s, executor.decisions)


class Together:
    """Several executors as one, by the key of an action's cost: `routes` names one for each first dimension."""

    def __init__(self, routes: dict[str, Executor]) -> None:
        self._routes = routes
        self._all = list(dict.fromkeys(routes.values()))
        self.decisions = Decisions()
        for each in self._all:
            each.decisions = self.decisions

    def open(self, trace: Trace) -> None:
        for executor in self._all:
            executor.open(trace)

    def submit(self, asked: Asked) -> None:
        self._routes[next(iter(asked.call.cost))].submit(asked)

    def close(self, trace: Trace) -> None:
        for executor in self._all:
            executor.close(trace)
