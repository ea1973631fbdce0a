"""Queue, decision and managers as one state machine: who drives it tells it what comes and what ends, and carries out
what starts.

The gateway and the simulator drive the same. Invariants: an action starts once; what it holds is given back once; of a
trajectory that lives nowhere yet one action alone is decided on, and the others wait for it to say where.

All managers as one: what decisions ask of them, and what an action takes of each and gives back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from treadle_core.tools.action import Action, InvalidActionError, Knowledge, check_action, check_fits, seconds_at
from treadle_core.tools.completions import Executing
from treadle_core.tools.cpu import CpuManager
from treadle_core.tools.decision import DEPTH, Start, decide, start_alone
from treadle_core.tools.grants import (
    NEVER_S,
    SERVED,
    CpuGrant,
    End,
    Ended,
    GpuGrant,
    Grant,
    InvalidHoldingError,
    Manager,
    Usage,
    held_units,
)
from treadle_core.tools.pools import InvalidPoolError, Pool, capacities
from treadle_core.tools.queue import Ordering, Waiting, first_come


class Resources:
    """See the module. Invariant: an action holds of all managers that it asks or of none."""

    def __init__(self, managers: Sequence[Manager]) -> None:
        """Raises InvalidPoolError for a dimension that two managers own, or two managers of CPUs."""
        self._managers = tuple(managers)
        owned = [dimension for manager in managers for dimension in manager.dimensions]
        if len(set(owned)) < len(owned):
            raise InvalidPoolError("managers", f"own a dimension twice: {sorted(owned)}")
        self._owner = {dimension: manager for manager in managers for dimension in manager.dimensions}
        self._cpu = next((manager for manager in managers if isinstance(manager, CpuManager)), None)
        self._taken: dict[str, tuple[Manager, ...]] = {}

    def capacities(self, now_s: float) -> dict[str, int]:
        """By dimension, the most that one action can get: the same at all times."""
        return capacities(self.pools(now_s))

    def check(self, action: Action) -> None:
        """Raises InvalidActionError."""
        for manager in self._managers:
            manager.check(action)

    def at_home(self, action: Action) -> Action:
        """The action, where its trajectory lives if it lives anywhere."""
        return action if self._cpu is None else self._cpu.at_home(action)

    def places(self, action: Action) -> bool:
        """Whether this action is to decide where its trajectory lives."""
        return (
            self._cpu is not None
            and action.node_id is None
            and any(dimension in action.cost for dimension in self._cpu.dimensions)
        )

    def pools(self, now_s: float) -> list[Pool]:
        return [pool for manager in self._managers for pool in manager.pools(now_s)]

    def executing(self, now_s: float) -> list[Executing]:
        return [item for manager in self._managers for item in manager.executing(now_s)]

    def take(self, start: Start, now_s: float, expected_s: float) -> Grant:
        """Raises InvalidHoldingError where it holds already or more is asked than is free; nothing is held then."""
        action_id = start.action.action_id
        if action_id in self._taken:
            raise InvalidHoldingError("start.action.action_id", f"{action_id!r} holds already")
        units = held_units(start)
        homeless = self._cpu is not None and self._cpu.home(start.action.trajectory_id) is None
        taken: list[Manager] = []
        parts: list[CpuGrant | GpuGrant | None] = []
        try:
            for manager in dict.fromkeys(self._owner[dimension] for dimension in units):
                mine = {dimension: units[dimension] for dimension in manager.dimensions if dimension in units}
                parts.append(manager.take(start, mine, now_s, expected_s))
                taken.append(manager)
        except InvalidHoldingError:
            for manager in taken:
                manager.give_back(action_id, Ended(End.ABANDONED), now_s)
            if homeless:
                self.forget(start.action.trajectory_id)
            raise
        self._taken[action_id] = tuple(taken)
        return Grant(
            units,
            cpu=next((part for part in parts if isinstance(part, CpuGrant)), None),
            gpu=next((part for part in parts if isinstance(part, GpuGrant)), None),
        )

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        """Raises InvalidHoldingError for one that holds nothing."""
        if action_id not in self._taken:
            raise InvalidHoldingError("action_id", f"{action_id!r} holds nothing")
        for manager in self._taken.pop(action_id):
            manager.give_back(action_id, ended, now_s)

    def forget(self, trajectory_id: str) -> None:
        """The trajectory has ended."""
        for manager in self._managers:
            manager.forget(trajectory_id)

    def next_change_s(self, now_s: float) -> float:
        """When more is free although no action ends; NEVER_S: at no time."""
        return min((manager.next_change_s(now_s) for manager in self._managers), default=NEVER_S)

    def usage(self, now_s: float) -> list[Usage]:
        return [figures for manager in self._managers for figures in manager.usage(now_s)]


FIRST_TYPICAL_S = 1.0  # what an action of unknown duration is taken to last before any has ended
TYPICAL_SHARE = 0.05  # of the newest in the typical duration: some twenty back still count for a third


class Started(NamedTuple):
    """An action that starts now. units: of its key dimension. expected_s: seconds that it should take."""

    action: Action
    units: int
    grant: Grant
    expected_s: float


class Dispatcher:
    """See the module. Times are of one clock that never falls."""

    def __init__(self, resources: Resources, now_s: float, order: Ordering = first_come, depth: int = DEPTH) -> None:
        self.resources = resources
        self.typical_s = FIRST_TYPICAL_S
        self._order = order
        self._depth = depth
        self._capacities = resources.capacities(now_s)
        self._waiting = Waiting(self._capacities)
        self._placing: dict[str, str] = {}  # the action that says where, by trajectory
        self._behind: dict[str, deque[Action]] = {}  # those that wait for it
        self._behind_ids: set[str] = set()
        self._began_s: dict[str, float] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting) + len(self._behind_ids)

    @property
    def running(self) -> int:
        """How many have started and not ended."""
        return len(self._began_s)

    def waiting_for(self) -> dict[str, int]:
        """How many wait that ask for it, by dimension."""
        asking = (self._waiting.least[: len(self._waiting)] > 0).sum(axis=0).tolist()
        found = dict(zip(self._waiting.dimensions, asking, strict=True))
        for behind in self._behind.values():
            for action in behind:
                for dimension in action.cost:
                    found[dimension] += 1
        return found

    def check(self, action: Action) -> None:
        """Raises InvalidActionError for an action that cannot be queued: a bad figure, or more than there ever is."""
        check_action(action, self._capacities)
        check_fits(action, self._capacities)
        self.resources.check(action)

    def submit(self, action: Action) -> None:
        """The action waits. Raises what `check` raises, and InvalidActionError for an id that waits or runs."""
        self.check(action)
        if any(action.action_id in ids for ids in (self._began_s, self._behind_ids, self._waiting)):
            raise InvalidActionError("action_id", f"{action.action_id!r} waits or runs already; use an id once")
        action = self.resources.at_home(action)
        trajectory_id = action.trajectory_id
        if not self.resources.places(action):
            self._waiting.add(action)
        elif trajectory_id not in self._placing:
            self._waiting.add(action)
            self._placing[trajectory_id] = action.action_id
        else:
            self._behind.setdefault(trajectory_id, deque()).append(action)
            self._behind_ids.add(action.action_id)

    def submit_alone(self, action: Action, now_s: float) -> Started | None:
        """Starts a checked action without a choice at once, where nobody waits and there is room; None: submit it."""
        if action.scalable or len(self):
            return None
        start = start_alone(self.resources.at_home(action), self.resources.pools(now_s))
        return None if start is None else self._begin(start, now_s)

    def withdraw(self, action_id: str) -> None:
        """Nobody wants a waiting action any more. Raises KeyError for one that does not wait."""
        if action_id in self._behind_ids:
            self._behind_ids.remove(action_id)
            for trajectory_id, behind in self._behind.items():
                self._behind[trajectory_id] = deque(action for action in behind if action.action_id != action_id)
            return
        action = self._waiting.remove(action_id)
        if self._placing.get(action.trajectory_id) == action_id:
            del self._placing[action.trajectory_id]
            self._resubmit(action.trajectory_id)

    def decide(self, now_s: float) -> list[Started]:
        """Those that start now, in their order."""
        started: list[Started] = []
        while len(self._waiting) and self._may_start(now_s):
            starts = decide(
                self._waiting,
                self.resources.pools(now_s),
                self.resources.executing(now_s),
                self.typical_s,
                self._order,
                self._depth,
            )
            for start in starts:
                self._waiting.remove(start.action.action_id)
                started.append(self._begin(start, now_s))
            settled = [
                start.action.trajectory_id
                for start in starts
                if self._placing.get(start.action.trajectory_id) == start.action.action_id
            ]
            followed = [self._settle(trajectory_id) for trajectory_id in settled]
            if not any(followed):
                break
        return started

    def end(self, action_id: str, now_s: float, ended: Ended = SERVED) -> None:
        """A started action has ended. Raises InvalidHoldingError for one that does not run."""
        self.resources.give_back(action_id, ended, now_s)
        took_s = now_s - self._began_s.pop(action_id)
        if ended.end is End.SERVED:
            self.typical_s += TYPICAL_SHARE * (took_s - self.typical_s)

    def forget(self, trajectory_id: str) -> None:
        """The trajectory has ended, and with it what is held for it."""
        self.resources.forget(trajectory_id)

    def next_change_s(self, now_s: float) -> float:
        """When to decide again although nothing came or ended; NEVER_S: not by the clock."""
        return self.resources.next_change_s(now_s) if len(self._waiting) else NEVER_S

    def _may_start(self, now_s: float) -> bool:
        """Whether no dimension has less free than every waiting action asks for: else there is nothing to decide."""
        free = {each.dimension: each.free for each in self.resources.usage(now_s)}
        least = self._waiting.least[: len(self._waiting)].min(axis=0)
        return bool((least <= [free[dimension] for dimension in self._waiting.dimensions]).all())

    def _begin(self, start: Start, now_s: float) -> Started:
        known = start.action.duration.knowledge is not Knowledge.UNKNOWN
        expected_s = seconds_at(start.action, start.units) if known else self.typical_s
        grant = self.resources.take(start, now_s, expected_s)
        self._began_s[start.action.action_id] = now_s
        return Started(start.action, start.units, grant, expected_s)

    def _settle(self, trajectory_id: str) -> bool:
        """A trajectory lives somewhere now. Whether others of its actions waited for that."""
        del self._placing[trajectory_id]
        return self._resubmit(trajectory_id)

    def _resubmit(self, trajectory_id: str) -> bool:
        behind = self._behind.pop(trajectory_id, ())
        self._behind_ids -= {action.action_id for action in behind}
        for action in behind:
            self.submit(action)
        return bool(behind)
