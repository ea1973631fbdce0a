"""Drives the gateway's `Dispatcher` under the virtual clock: all that happens at one instant is decided on together."""

from __future__ import annotations

import time
from collections.abc import Callable

from treadle_core.tools.action import Action
from treadle_core.tools.dispatcher import Dispatcher, Started
from treadle_core.tools.grants import NEVER_S

from treadle_sim.timeline import Timeline
from treadle_sim.tools.trace import Asked, Decisions, Record, Report, ran_s


class Dispatched:
    """Actions of one dispatcher. overhead_s: the system's own seconds before an action that starts runs."""

    def __init__(
        self,
        timeline: Timeline,
        report: Report,
        dispatcher: Dispatcher,
        decisions: Decisions,
        overhead_s: Callable[[Started], float],
    ) -> None:
        self.dispatcher = dispatcher
        self._timeline, self._report, self._decisions, self._overhead_s = timeline, report, decisions, overhead_s
        self._asked: dict[str, Asked] = {}
        self._deciding = False

    def submit(self, action: Action, asked: Asked) -> None:
        """Start the action at once where the dispatcher does so, else have it wait for a decision."""
        began = time.perf_counter()
        self._asked[action.action_id] = asked
        started = self.dispatcher.start_at_once(action, self._timeline.now)
        if started is not None:
            self._decisions.add(time.perf_counter() - began, 1)
            self._start(started)
            return
        self.dispatcher.submit(action)
        self.wake()

    def wake(self) -> None:
        """Decide once for all that happens at this instant, if actions wait."""
        if len(self.dispatcher) and not self._deciding:
            self._deciding = True
            self._timeline.at(self._timeline.now, self._decide)

    def _decide(self) -> None:
        self._deciding = False
        began, now = time.perf_counter(), self._timeline.now
        starting = self.dispatcher.decide(now)
        self._decisions.add(time.perf_counter() - began, len(starting))
        for started in starting:
            self._start(started)
        changes_s = self.dispatcher.next_change_s(now)
        if changes_s < NEVER_S:
            self._timeline.at(changes_s, self.wake)

    def _start(self, started: Started) -> None:
        asked, now = self._asked.pop(started.action.action_id), self._timeline.now
        overhead_s = self._overhead_s(started)
        ends_s = now + overhead_s + ran_s(asked, started.units)
        self._timeline.at(ends_s, self._finish, Record(asked, now, overhead_s, ends_s, started.units))

    def _finish(self, record: Record) -> None:
        self.dispatcher.end(record.asked.action_id, self._timeline.now)
        self.wake()
        self._report(record)
