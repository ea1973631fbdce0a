"""All managers as one: what decisions ask of them, and what an action takes of each and gives back."""

from __future__ import annotations

from collections.abc import Sequence

from treadle_core.elastic.action import Action
from treadle_core.elastic.decision import Start
from treadle_core.elastic.executing import Executing
from treadle_core.elastic.pools import InvalidPoolError, Pool, capacities
from treadle_core.managers.cpu import CpuManager
from treadle_core.managers.grants import CpuGrant, End, Ended, GpuGrant, Grant, InvalidHoldingError, Usage, held_units
from treadle_core.managers.protocol import NEVER_S, Manager


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

    @property
    def borrowers(self) -> int:
        """How many run that idle cores can be lent to."""
        return 0 if self._cpu is None else self._cpu.borrowers

    def lend(self, now_s: float) -> None:
        """Lend idle cores."""
        if self._cpu is not None:
            self._cpu.lend(now_s)

    def moved(self) -> dict[str, tuple[int, ...]]:
        """All cores of each action that has other ones than when this was last asked, those that lost some first."""
        return {} if self._cpu is None else self._cpu.moved()

    def next_change_s(self, now_s: float) -> float:
        """When more is free although no action ends; NEVER_S: at no time."""
        return min((manager.next_change_s(now_s) for manager in self._managers), default=NEVER_S)

    def usage(self, now_s: float) -> list[Usage]:
        return [figures for manager in self._managers for figures in manager.usage(now_s)]
