"""The rewards as they stand, and who watches them.

Invariants: a watcher is told of every reward that matches, as it stands when it is read: one that changes faster than
its watcher reads is told once, with its newest state; a change is never missed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from treadle_tools.rewards.reward import Reward

Matches = Callable[[Reward], bool]


class _Watcher:
    def __init__(self, matches: Matches) -> None:
        self.matches = matches
        self.changed: OrderedDict[str, None] = OrderedDict()
        self.wake = asyncio.Event()

    def note(self, reward: Reward) -> None:
        if self.matches(reward):
            self.changed[reward.reward_id] = None
            self.wake.set()


class Board:
    """See the module."""

    def __init__(self) -> None:
        self._rewards: dict[str, Reward] = {}
        self._watchers: set[_Watcher] = set()

    def __iter__(self) -> Iterator[Reward]:
        return iter(self._rewards.values())

    def get(self, reward_id: str) -> Reward | None:
        """None where there is none of that id."""
        return self._rewards.get(reward_id)

    def put(self, reward: Reward) -> None:
        """A new reward, or a newer state of one."""
        self._rewards[reward.reward_id] = reward
        for watcher in self._watchers:
            watcher.note(reward)

    def remove(self, reward_id: str) -> None:
        """It was kept for long enough."""
        self._rewards.pop(reward_id, None)

    async def watch(self, matches: Matches) -> AsyncIterator[Reward]:
        """Each reward that matches, then each change, for ever."""
        watcher = _Watcher(matches)
        for reward in self._rewards.values():
            watcher.note(reward)
        self._watchers.add(watcher)
        try:
            while True:
                await watcher.wake.wait()
                watcher.wake.clear()
                while watcher.changed:
                    reward_id, _ = watcher.changed.popitem(last=False)
                    if (newest := self._rewards.get(reward_id)) is not None:
                        yield newest
        finally:
            self._watchers.discard(watcher)

    async def watch_until_ended(self, reward_ids: Iterable[str]) -> AsyncIterator[Reward]:
        """As `watch`, of these, until all of them have ended."""
        left = set(reward_ids)
        wanted = frozenset(left)
        async for reward in self.watch(lambda reward: reward.reward_id in wanted):
            yield reward
            if reward.ended:
                left.discard(reward.reward_id)
            if not left:
                return
