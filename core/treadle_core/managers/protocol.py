"""What a kind of resource does for the scheduler, whatever it is (ARL-Tangram §5: one interface, three managers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from treadle_core.elastic.action import Action
from treadle_core.elastic.decision import Start
from treadle_core.elastic.executing import Executing
from treadle_core.elastic.pools import Pool
from treadle_core.managers.grants import CpuGrant, Ended, GpuGrant, Usage

NEVER_S = float("inf")


class Manager(Protocol):
    """Owner of some dimensions. Invariants: never more units are held than there are; what is taken by an action is
    given back once."""

    @property
    def dimensions(self) -> tuple[str, ...]: ...

    def check(self, action: Action) -> None:
        """Raises InvalidActionError for an action that could not be given what it asks of this manager."""
        ...

    def pools(self, now_s: float) -> Sequence[Pool]:
        """What is free, as `elastic.decide` asks it. Their capacities are the same at all times."""
        ...

    def executing(self, now_s: float) -> Sequence[Executing]:
        """What comes back by itself: of running actions, and when."""
        ...

    def take(
        self, start: Start, units: Mapping[str, int], now_s: float, expected_s: float
    ) -> CpuGrant | GpuGrant | None:
        """The units that a start gets; None: any will do. units: of this manager's dimensions, one at least.

        Raises InvalidHoldingError, and changes nothing then.
        """
        ...

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        """The action has ended. Raises InvalidHoldingError for one that holds nothing here."""
        ...

    def forget(self, trajectory_id: str) -> None:
        """The trajectory has ended: what is held for it beyond its actions is free. An unknown one is no error."""
        ...

    def next_change_s(self, now_s: float) -> float:
        """When, on the clock of `now_s`, more is free although no action ends; NEVER_S: at no time."""
        ...

    def usage(self, now_s: float) -> Sequence[Usage]:
        """Each dimension's figures."""
        ...
