"""Queue, decision and resource managers as one state machine, which the gateway and the simulator
drive.

The driver submits actions, requests decisions, and reports ends. Invariants: an action starts once.
It takes its units from all the managers that own them; if one of these refuses, it takes nothing.
It gives its units back once. If a trajectory has no node yet, only one of its actions is in the
queue, and its other actions wait until this one has a node.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from treadle_core.tools.action import Action, InvalidActionError, check_action, seconds_at
from treadle_core.tools.cpu import CpuManager
from treadle_core.tools.decision import ActionQueue, Executing, Start, decide, start_alone
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
    units_of,
)
from treadle_core.tools.pools import InvalidPoolError, Pool, capacities

FIRST_TYPICAL_S = 1.0  # what an action of unknown duration is taken to last before any has ended
TYPICAL_SHARE = (
    0.05  # of the newest in the typical duration: some twenty back still count for a third
)


class Resources:
    """All resource managers as one."""

    def __init__(self, managers: Sequence[Manager]) -> None:
        """Combine the managers. Raises InvalidPoolError for a dimension that two managers own."""
        self._managers = tuple(managers)
        owned = [dimension for manager in managers for dimension in manager.dimensions]
        if len(set(owned)) < len(owned):
            raise InvalidPoolError("managers", f"own a dimension twice: {sorted(owned)}")
        self._owner = {
            dimension: manager for manager in managers for dimension in manager.dimensions
        }
        self._cpu = next((manager for manager in managers if isinstance(manager, CpuManager)), None)
        self._taken: dict[str, tuple[Manager, ...]] = {}

    def check(self, action: Action) -> None:
        """Raise InvalidActionError for an action whose demand could never be met."""
        for manager in self._managers:
            manager.check(action)

    def send_home(self, action: Action) -> Action:
        """Return the action for the node that its trajectory lives on, if any."""
        return action if self._cpu is None else self._cpu.send_home(action)

    def needs_placement(self, action: Action) -> bool:
        """Return whether the action, which was sent home, decides the node of its trajectory."""
        return (
            self._cpu is not None
            and action.node_id is None
            and not action.cost.keys().isdisjoint(self._cpu.dimensions)
        )

    def pools(self, now_s: float) -> list[Pool]:
        return [pool for manager in self._managers for pool in manager.pools(now_s)]

    def executing(self, now_s: float) -> list[Executing]:
        return [each for manager in self._managers for each in manager.executing(now_s)]

    def take(self, start: Start, now_s: float, expected_s: float) -> Grant:
        """Take the units of a start. Raises InvalidHoldingError where the action holds already, or
        requires more than is free; it holds nothing then."""
        action_id, trajectory_id = start.action.action_id, start.action.trajectory_id
        if action_id in self._taken:
            raise InvalidHoldingError("start.action.action_id", f"{action_id!r} holds already")
        units = units_of(start)
        homeless = self._cpu is not None and self._cpu.home(trajectory_id) is None
        taken: list[Manager] = []
        parts: list[CpuGrant | GpuGrant | None] = []
        try:
            for manager in dict.fromkeys(self._owner[dimension] for dimension in units):
                mine = {
                    dimension: units[dimension]
                    for dimension in manager.dimensions
                    if dimension in units
                }
                parts.append(manager.take(start, mine, now_s, expected_s))
                taken.append(manager)
        except InvalidHoldingError:
            for manager in taken:
                manager.give_back(action_id, Ended(End.ABANDONED), now_s)
            if homeless:
                self.forget(trajectory_id)
            raise
        self._taken[action_id] = tuple(taken)
        return Grant(
            units,
            cpu=next((part for part in parts if isinstance(part, CpuGrant)), None),
            gpu=next((part for part in parts if isinstance(part, GpuGrant)), None),
        )

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        """Give back what an ended action holds. Raises InvalidHoldingError for an action that holds
        nothing."""
        if action_id not in self._taken:
            raise InvalidHoldingError("action_id", f"{action_id!r} holds nothing")
        for manager in self._taken.pop(action_id):
            manager.give_back(action_id, ended, now_s)

    def forget(self, trajectory_id: str) -> None:
        """Free what the trajectory, which has ended, holds."""
        for manager in self._managers:
            manager.forget(trajectory_id)

    def next_change_s(self, now_s: float) -> float:
        """Return when more becomes free although no action ends; NEVER_S: at no time."""
        return min((manager.next_change_s(now_s) for manager in self._managers), default=NEVER_S)

    def usage(self, now_s: float) -> list[Usage]:
        return [figures for manager in self._managers for figures in manager.usage(now_s)]


class Started(NamedTuple):
    """Action that starts now. units: of its `sized_dimension`. expected_s: how long it should
    take."""

    action: Action
    units: int
    grant: Grant
    expected_s: float


class Dispatcher:
    """Queue of actions with the managers of their resources. Times are of one clock that never
    falls."""

    def __init__(self, resources: Resources, now_s: float) -> None:
        self.resources = resources
        self.typical_s = FIRST_TYPICAL_S
        self._capacities = capacities(resources.pools(now_s))
        self._queue = ActionQueue(self._capacities)
        # by trajectory without a node: the action that decides it
        self._placing: dict[str, str] = {}
        # by such a trajectory: its actions that wait for the node
        self._behind: dict[str, deque[Action]] = {}
        self._behind_ids: set[str] = set()
        self._began_s: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many actions wait."""
        return len(self._queue) + len(self._behind_ids)

    @property
    def running(self) -> int:
        """Return how many actions have started and not ended."""
        return len(self._began_s)

    def waiting_for(self) -> dict[str, int]:
        """Return how many waiting actions require each dimension."""
        asking = (self._queue.least[: len(self._queue)] > 0).sum(axis=0).tolist()
        found = Counter(dict(zip(self._queue.dimensions, asking, strict=True)))
        for behind in self._behind.values():
            found.update(dimension for action in behind for dimension in action.cost)
        return found

    def check(self, action: Action) -> None:
        """Raise InvalidActionError for a bad figure, or a demand for more than there ever is."""
        check_action(action, self._capacities)
        self.resources.check(action)

    def submit(self, action: Action) -> None:
        """Queue the action. Raises what `check` raises, and InvalidActionError for an id that waits
        or runs."""
        self.check(action)
        if any(action.action_id in ids for ids in (self._began_s, self._behind_ids, self._queue)):
            raise InvalidActionError(
                "action_id", f"{action.action_id!r} waits or runs already; use an id once"
            )
        action = self.resources.send_home(action)
        trajectory_id = action.trajectory_id
        if not self.resources.needs_placement(action):
            self._queue.add(action)
        elif trajectory_id not in self._placing:
            self._queue.add(action)
            self._placing[trajectory_id] = action.action_id
        else:
            self._behind.setdefault(trajectory_id, deque()).append(action)
            self._behind_ids.add(action.action_id)

    def start_at_once(self, action: Action, now_s: float) -> Started | None:
        """Start a checked action without a choice of units if no action waits and there is room.
        Returns None where the caller must submit it."""
        if action.scalable or len(self):
            return None
        start = start_alone(self.resources.send_home(action), self.resources.pools(now_s))
        return None if start is None else self._start(start, now_s)

    def withdraw(self, action_id: str) -> None:
        """Remove a waiting action whose caller is gone. Raises KeyError for one that does not
        wait."""
        if action_id in self._behind_ids:
            self._behind_ids.remove(action_id)
            for trajectory_id, behind in self._behind.items():
                self._behind[trajectory_id] = deque(
                    action for action in behind if action.action_id != action_id
                )
            return
        self._submit_behind(self._queue.remove(action_id))

    def decide(self, now_s: float) -> list[Started]:
        """Start the actions that a decision chooses, in their order."""
        started: list[Started] = []
        while len(self._queue) and self._may_start(now_s):
            starts = decide(
                self._queue,
                self.resources.pools(now_s),
                self.resources.executing(now_s),
                self.typical_s,
            )
            for start in starts:
                self._queue.remove(start.action.action_id)
                started.append(self._start(start, now_s))
            if not sum(self._submit_behind(start.action) for start in starts):
                break
        return started

    def end(self, action_id: str, now_s: float, ended: Ended = SERVED) -> None:
        """Free what a started action holds. Raises InvalidHoldingError for one that does not
        run."""
        self.resources.give_back(action_id, ended, now_s)
        took_s = now_s - self._began_s.pop(action_id)
        if ended.end is End.SERVED:
            self.typical_s += TYPICAL_SHARE * (took_s - self.typical_s)

    def forget(self, trajectory_id: str) -> None:
        """Free what the trajectory, which has ended, holds."""
        self.resources.forget(trajectory_id)

    def next_change_s(self, now_s: float) -> float:
        """Return when to decide again although no action arrived or ended; NEVER_S: at no time."""
        return self.resources.next_change_s(now_s) if len(self._queue) else NEVER_S

    def _may_start(self, now_s: float) -> bool:
        """Return whether a decision could start an action: no dimension has less free than the
        least that any waiting action requires of it."""
        free = {each.dimension: each.free for each in self.resources.usage(now_s)}
        least = self._queue.least[: len(self._queue)].min(axis=0)
        return bool((least <= [free[dimension] for dimension in self._queue.dimensions]).all())

    def _start(self, start: Start, now_s: float) -> Started:
        known_s = seconds_at(start.action, start.units)
        expected_s = self.typical_s if known_s is None else known_s
        grant = self.resources.take(start, now_s, expected_s)
        self._began_s[start.action.action_id] = now_s
        return Started(start.action, start.units, grant, expected_s)

    def _submit_behind(self, action: Action) -> int:
        """Queue the actions that waited for the node of this one. Returns how many."""
        if self._placing.get(action.trajectory_id) != action.action_id:
            return 0
        del self._placing[action.trajectory_id]
        behind = self._behind.pop(action.trajectory_id, ())
        self._behind_ids -= {action.action_id for action in behind}
        for each in behind:
            self.submit(each)
        return len(behind)
