"""Actions that follow their cores: idle ones are lent to them as the gateway lends them (`Loans`).

Who borrows is decided on what is known of durations; how long an action takes with its cores is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from treadle_core.elastic.action import Action
from treadle_core.managers.loans import LENDING_PAUSE_S, Loans, serial_s
from treadle_core.managers.progress import Progress

from treadle_sim.events import Timeline
from treadle_sim.tools.trace import Record, ran_s


@dataclass(slots=True)
class _Follower:
    """ends: counts the times that its end has been set."""

    record: Record
    home: str
    truth: Progress
    ends: int = 0


class Followers:
    """See the module. free: by node, the cores that no action was granted. finish: what an action's end is told."""

    def __init__(
        self,
        timeline: Timeline,
        free: Callable[[], Mapping[str, int]],
        finish: Callable[[Record, str], None],
    ) -> None:
        self._timeline, self._free, self._finish = timeline, free, finish
        self._loans = Loans()
        self._running: dict[str, _Follower] = {}
        self._lending = False

    def begin(self, action: Action, record: Record, home: str) -> None:
        """An action starts with record.units cores."""
        begins_s = record.started_s + record.overhead_s
        self._loans.begin(action, home, record.units, begins_s)
        # What each worker does for itself is longer than in the profile by as much as the whole.
        joining_s = serial_s(action) * record.asked.call.single_unit_s / action.duration.single_unit_s
        truth = Progress(partial(ran_s, record.asked), record.units, joining_s, begins_s)
        self._running[action.action_id] = follower = _Follower(record, home, truth)
        self._set_end(follower)

    def ends_s(self, action_id: str) -> float | None:
        """When it is expected to end; None for one that does not follow."""
        return self._loans.ends_at_s(action_id) if action_id in self._loans else None

    def recall(self, home: str) -> None:
        """Cores of a node were granted: those of them that are lent come back."""
        over = self._loans.lent_on(home) - self._free()[home] if self._running else 0
        if over > 0:
            self._move(self._loans.recall(home, over, self._timeline.now))

    def lend_soon(self) -> None:
        """Something has changed."""
        if not self._lending and self._running:
            self._lending = True
            self._timeline.after(LENDING_PAUSE_S, self._lend)

    def _lend(self) -> None:
        self._lending = False
        for home, free in self._free().items():
            self._move(self._loans.lend(home, free - self._loans.lent_on(home), self._timeline.now))

    def _move(self, action_ids: Sequence[str]) -> None:
        for action_id in action_ids:
            follower = self._running[action_id]
            follower.truth.move(follower.record.units + self._loans.lent(action_id), self._timeline.now)
            self._set_end(follower)

    def _set_end(self, follower: _Follower) -> None:
        follower.ends += 1
        self._timeline.at(follower.truth.ends_at_s(), self._end, follower, follower.ends)

    def _end(self, follower: _Follower, which: int) -> None:
        if which == follower.ends:
            action_id = follower.record.asked.action_id
            del self._running[action_id]
            self._loans.end(action_id)
            self._finish(replace(follower.record, finished_s=self._timeline.now), follower.home)
