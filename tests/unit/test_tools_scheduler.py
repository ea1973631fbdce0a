"""Actions start first come, first served, never on more than there is, and nothing is lost when a
caller gives up."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from support.conditions import until
from treadle_core.tools.action import CPU_CORES, Action, Amdahl, Demand, Fixed, Range
from treadle_core.tools.cpu import CpuManager, Machine
from treadle_core.tools.dispatcher import Dispatcher, Resources
from treadle_core.tools.grants import End, Ended
from treadle_core.tools.providers import BasicManager, Provider, Quota
from treadle_runtime.errors import ResourceExhausted
from treadle_tools.actions import ActionScheduler


@asynccontextmanager
async def turns_of(
    cores: int,
    max_waiting: int,
    *providers: BasicManager,
    decided: Callable[[float], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[ActionScheduler]:
    machine = Machine("local", (tuple(range(cores)),), 1 << 30)
    dispatcher = Dispatcher(Resources([CpuManager([machine]), *providers]), clock())
    turns = ActionScheduler(dispatcher, max_waiting, decided, clock)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(turns.run())
        yield turns
        assert (len(dispatcher), dispatcher.running) == (0, 0)
        assert all(each.held == 0 for each in dispatcher.resources.usage(clock())[:1])
        running.cancel()


def wants(name: str, cores: int, **cost: Demand) -> Action:
    return Action(name, name, 0, {CPU_CORES: Fixed(cores), **cost})


def scales(name: str, most: int) -> Action:
    return Action(name, name, 0, {CPU_CORES: Range(1, most)}, 10.0, CPU_CORES, Amdahl(0.0))


class Holder:
    """An action that holds what it gets until it is told to let go."""

    def __init__(
        self, group: asyncio.TaskGroup, turns: ActionScheduler, action: Action, job: str = "one"
    ) -> None:
        self.holds = asyncio.Event()
        self.let_go = asyncio.Event()
        self.cores: tuple[int, ...] = ()
        self.task = group.create_task(self._run(turns, action, job))

    async def _run(self, turns: ActionScheduler, action: Action, job: str) -> None:
        async with turns.hold(action, job) as turn:
            assert turn.started.grant.cpu is not None
            self.cores = turn.started.grant.cpu.cores
            self.holds.set()
            await self.let_go.wait()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_large_action_is_not_passed_by_later_small_ones() -> None:
    """
    GIVEN   4 cores of which 2 are held
    WHEN    an action wants 4, and after it one wants 1
    Result: the small one waits for the large one, although it would fit"""
    async with turns_of(4, max_waiting=10) as turns, asyncio.TaskGroup() as group:
        first = Holder(group, turns, wants("first", 2))
        await settled()
        large, small = (
            Holder(group, turns, wants("large", 4)),
            Holder(group, turns, wants("small", 1)),
        )
        await settled()
        assert (first.holds.is_set(), large.holds.is_set(), small.holds.is_set()) == (
            True,
            False,
            False,
        )
        first.let_go.set()
        await large.holds.wait()
        assert not small.holds.is_set()
        large.let_go.set()
        await small.holds.wait()
        small.let_go.set()


async def test_a_job_that_asks_for_a_lot_does_not_keep_others_waiting() -> None:
    """One core. A job has ten actions in the queue when another one asks for two. Result: they take
    turns, and later the first job's go in their order."""
    order: list[str] = []
    async with turns_of(1, max_waiting=20) as turns, asyncio.TaskGroup() as group:
        held = Holder(group, turns, wants("held", 1))
        await settled()
        waiting = {
            f"many-{at}": Holder(group, turns, wants(f"many-{at}", 1), "many") for at in range(10)
        }
        await settled()
        waiting |= {
            f"few-{at}": Holder(group, turns, wants(f"few-{at}", 1), "few") for at in range(2)
        }
        await settled()
        held.let_go.set()
        while waiting:
            await until(lambda: any(holder.holds.is_set() for holder in waiting.values()))
            (name,) = [name for name, holder in waiting.items() if holder.holds.is_set()]
            order.append(name)
            waiting.pop(name).let_go.set()
    assert {name for name in order[:4] if name.startswith("few")} == {"few-0", "few-1"}
    assert [name for name in order if name.startswith("many")] == [f"many-{at}" for at in range(10)]


async def test_where_nobody_may_wait_what_fits_starts_all_the_same() -> None:
    async with turns_of(2, max_waiting=0) as turns:
        async with turns.hold(scales("scales", 2), "") as turn:
            assert turn.started.units == 2
            with pytest.raises(ResourceExhausted):
                async with turns.hold(wants("fixed", 1), ""):
                    pass
        async with turns.hold(wants("fixed", 2), ""):
            pass


async def test_an_action_that_gives_up_leaves_the_queue() -> None:
    """
    WHEN    the first in the queue is cancelled while it waits, or in the moment it is served
    Result: the next one gets the core, and none is lost"""
    served: list[Holder] = []

    def cancel_the_served(_: float) -> None:
        while served and len(turns.dispatcher) == 1:
            served.pop().task.cancel()

    async with (
        turns_of(1, max_waiting=10, decided=cancel_the_served) as turns,
        asyncio.TaskGroup() as group,
    ):
        first = Holder(group, turns, wants("first", 1))
        await first.holds.wait()
        waits, second, last = (
            Holder(group, turns, wants(name, 1)) for name in ("waits", "second", "last")
        )
        await until(lambda: len(turns.dispatcher) == 3)
        waits.task.cancel()
        await until(lambda: len(turns.dispatcher) == 2)
        served.append(second)
        first.let_go.set()
        await last.holds.wait()
        assert not served
        assert not waits.holds.is_set()
        assert not second.holds.is_set()
        last.let_go.set()


async def test_a_turn_that_does_not_come_in_time_is_given_up() -> None:
    async with turns_of(1, max_waiting=10) as turns:
        async with turns.hold(wants("first", 1), ""):
            with pytest.raises(TimeoutError):
                async with turns.hold(wants("second", 1), "", within_s=0.01):
                    pass
        async with turns.hold(wants("third", 1), ""):
            pass


async def test_those_that_come_together_share_the_cores() -> None:
    """
    WHEN    two actions that could each use all the cores come in one turn of the loop
    Result: neither has taken them all before the other is known"""
    async with turns_of(8, max_waiting=10) as turns, asyncio.TaskGroup() as group:
        both = [Holder(group, turns, scales(name, 8)) for name in ("one", "other")]
        for holder in both:
            await holder.holds.wait()
        assert [len(holder.cores) for holder in both] == [4, 4]
        for holder in both:
            holder.let_go.set()


async def test_a_provider_that_refuses_is_left_alone_until_it_said_and_then_called_again() -> None:
    """
    WHEN    a call is refused for 50 ms
    Result: the next call's turn comes by the clock alone, not before; another's does not wait"""
    now_s = 7.0
    search = BasicManager(Provider("search", concurrency=1))
    async with turns_of(2, 10, search, clock=lambda: now_s) as turns:
        async with turns.hold(wants("refused", 1, **search.cost()), "") as turn:
            turn.ended = Ended(End.REFUSED, 0.05)
        async with asyncio.TaskGroup() as group:
            call = Holder(group, turns, wants("again", 1, **search.cost()))
            await settled()
            async with turns.hold(wants("other", 1), ""):
                assert not call.holds.is_set()
            now_s += 0.05
            await call.holds.wait()
            call.let_go.set()


async def test_a_turn_that_comes_by_the_clock_as_a_decision_is_made_is_not_missed() -> None:
    """WHEN    a decision falls just before the time that a provider asked to wait for, and ends
    after it Result: the call's turn comes all the same, long before its quota would be whole again
    """
    until_s = float("inf")

    def clock() -> float:
        nonlocal until_s
        now_s = time.monotonic()
        if now_s < until_s:
            return now_s
        almost_s, until_s = until_s - 1e-6, float("inf")
        return almost_s

    search = BasicManager(Provider("search", quotas=(Quota(5, 3600.0),)))
    async with turns_of(2, 10, search, clock=clock) as turns:
        async with turns.hold(wants("refused", 1, **search.cost()), "") as turn:
            turn.ended = Ended(End.REFUSED, 0.05)
        until_s = time.monotonic() + search.rests_s(time.monotonic())
        async with turns.hold(wants("again", 1, **search.cost()), "", within_s=20.0):
            pass
