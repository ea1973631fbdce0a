"""Which cores are lent to which action: `Loans` by number, here by name.

Owns: the lent cores of each action. Invariants: a lent core is of one action and of nobody's grant; as many are lent to
an action as `Loans` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle_core.elastic.action import Action
from treadle_core.managers.loans import Loans
from treadle_core.managers.numa import Cores, count_of, minus, pick, plus


class LentCores:
    """See the module. Nodes are called by their names; cores come and go by NUMA node."""

    def __init__(self) -> None:
        self._loans = Loans()
        self._of: dict[str, Cores] = {}
        self._nodes: dict[str, str] = {}
        self._moved: dict[str, None] = {}

    def __len__(self) -> int:
        """How many run that cores can be lent to."""
        return len(self._of)

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._of

    def begin(self, action: Action, node: str, granted: Cores, now_s: float) -> None:
        """An action that follows has started."""
        self._loans.begin(action, node, count_of(granted), now_s)
        self._of[action.action_id] = tuple(frozenset[int]() for _ in granted)
        self._nodes[action.action_id] = node

    def end(self, action_id: str) -> None:
        """It has ended. One that cores are not lent to is no error."""
        self._loans.end(action_id)
        self._moved.pop(action_id, None)
        if self._of.pop(action_id, None) is not None:
            del self._nodes[action_id]

    def lent_to(self, action_id: str) -> Cores:
        """By NUMA node."""
        return self._of[action_id]

    def ends_at_s(self, action_id: str) -> float:
        """When it should end if nothing changes."""
        return self._loans.ends_at_s(action_id)

    def moved(self) -> list[str]:
        """Actions whose lent cores have changed since this was last asked, those that lost some first."""
        found = list(self._moved)
        self._moved.clear()
        return found

    def count(self) -> int:
        """Cores that are lent."""
        return sum(map(count_of, self._of.values()))

    def make_room(self, node: str, free: Cores, count: int, now_s: float) -> Cores:
        """`count` of the cores that no grant has, after which nobody borrows them."""
        unlent = self._unlent(node, free)
        short = count - count_of(unlent)
        if short > 0:
            wanted = [at for at, cores in enumerate(pick(free, count)) if cores]
            for action_id in self._loans.recall(node, short, now_s):
                self._shrink(action_id, wanted)
            unlent = self._unlent(node, free)
        return pick(unlent, count)

    def lend(self, node: str, free: Cores, now_s: float) -> None:
        """Lends what is idle of the cores that no grant has."""
        unlent = self._unlent(node, free)
        for action_id in self._loans.lend(node, count_of(unlent), now_s):
            more = pick(unlent, self._loans.lent(action_id) - count_of(self._of[action_id]))
            unlent = minus(unlent, more)
            self._of[action_id] = plus(self._of[action_id], more)
            self._moved.setdefault(action_id)

    def _unlent(self, node: str, free: Cores) -> Cores:
        for action_id, lent in self._of.items():
            if self._nodes[action_id] == node:
                free = minus(free, lent)
        return free

    def _shrink(self, action_id: str, wanted: Sequence[int]) -> None:
        """Down to what `Loans` says, first of the NUMA nodes that are wanted."""
        lent = [set(cores) for cores in self._of[action_id]]
        left = count_of(self._of[action_id]) - self._loans.lent(action_id)
        for at in (*wanted, *range(len(lent))):
            gone = sorted(lent[at])[:left]
            lent[at] -= set(gone)
            left -= len(gone)
        self._of[action_id] = tuple(map(frozenset, lent))
        self._moved = {action_id: None, **self._moved}
