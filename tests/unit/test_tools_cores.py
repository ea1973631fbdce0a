"""The cores of a node: first come, first served, never more than there are."""

import asyncio

import pytest
from treadle_runtime.errors import ResourceExhausted
from treadle_tools.cores import Cores


class Holder:
    """An action that holds cores until it is told to let go."""

    def __init__(self, group: asyncio.TaskGroup, cores: Cores, wanted: int) -> None:
        self.holds = asyncio.Event()
        self.let_go = asyncio.Event()
        self.task = group.create_task(self._run(cores, wanted))

    async def _run(self, cores: Cores, wanted: int) -> None:
        async with cores.hold(wanted):
            self.holds.set()
            await self.let_go.wait()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_large_action_is_not_passed_by_later_small_ones() -> None:
    """
    GIVEN   4 cores of which 2 are held
    WHEN    an action wants 4, and after it one wants 1
    Result: the small one waits for the large one, although it would fit
    """
    cores = Cores(4, max_waiting=10)
    async with asyncio.TaskGroup() as group:
        first = Holder(group, cores, 2)
        await settled()
        large, small = Holder(group, cores, 4), Holder(group, cores, 1)
        await settled()
        assert (first.holds.is_set(), large.holds.is_set(), small.holds.is_set()) == (True, False, False)
        first.let_go.set()
        await settled()
        assert (large.holds.is_set(), small.holds.is_set()) == (True, False)
        large.let_go.set()
        await settled()
        assert small.holds.is_set()
        small.let_go.set()


async def test_an_action_that_wants_more_than_there_is_gets_all() -> None:
    cores = Cores(2, max_waiting=0)
    async with cores.hold(64):
        with pytest.raises(ResourceExhausted):
            async with cores.hold(1):
                pass
    async with cores.hold(2):
        pass


async def test_an_action_that_gives_up_leaves_the_queue() -> None:
    """
    WHEN    the first in the queue is cancelled while it waits, or in the moment it is served
    Result: the next one gets the core, and none is lost
    """
    cores = Cores(1, max_waiting=10)
    async with asyncio.TaskGroup() as group:
        first = Holder(group, cores, 1)
        await settled()
        waits, served, last = (Holder(group, cores, 1) for _ in range(3))
        await settled()
        waits.task.cancel()
        await settled()
        first.let_go.set()
        await asyncio.sleep(0)
        served.task.cancel()
        await settled()
        assert last.holds.is_set()
        last.let_go.set()
    async with cores.hold(1):
        pass
