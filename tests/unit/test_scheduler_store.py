"""The scheduler's store, with a lease that writes when the test says so."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import nats.errors
import pytest
from treadle_core.model import Policy
from treadle_scheduler.driver import MeshRecord, Store


class FakeLease:
    """Writes while `open_gate` is set. failing: keys whose writes fail."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []
        self.failing: set[str] = set()
        self.open_gate = asyncio.Event()
        self.writing = asyncio.Lock()

    async def write(self, values: Mapping[str, bytes | None]) -> dict[str, Exception]:
        """Keys that failed."""
        self.written.append(list(values))
        await self.open_gate.wait()
        return {key: nats.errors.TimeoutError() for key in values if key in self.failing}


def open_store() -> tuple[Store, FakeLease]:
    """A store over a lease whose gate is closed."""
    lease = FakeLease()
    return Store(cast(Any, lease)), lease


async def settle(store: Store, *keys: str) -> "asyncio.Task[None]":
    """Note keys and begin to settle them, as far as the lease."""
    for key in keys:
        store.put(key, MeshRecord(Policy(), 0.0))
    task = asyncio.create_task(store.settle(keys))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_what_is_noted_during_a_write_goes_out_together_afterwards() -> None:
    store, lease = open_store()
    waiting = [await settle(store, "a")]
    waiting += [await settle(store, key) for key in ("b", "c", "a")]
    lease.open_gate.set()
    await asyncio.gather(*waiting)
    assert lease.written == [["a"], ["b", "c", "a"]]
    await store.settle(["a", "b"])
    assert len(lease.written) == 2, "everything is stored already"


async def test_a_write_that_failed_is_raised_to_its_own_callers_and_made_again() -> None:
    store, lease = open_store()
    lease.open_gate.set()
    lease.failing = {"bad"}
    good, bad = await settle(store, "good"), await settle(store, "bad")
    await good
    with pytest.raises(nats.errors.TimeoutError):
        await bad
    lease.failing = set()
    await store.settle_all()
    assert lease.written[-1] == ["bad"]
    await store.settle(["bad"])


async def test_records_of_a_cancelled_caller_are_written_for_who_waits() -> None:
    store, lease = open_store()
    first, second = await settle(store, "a"), await settle(store, "b")
    joined = asyncio.create_task(store.settle(["a"]))
    await asyncio.sleep(0)
    first.cancel()
    lease.open_gate.set()
    await asyncio.gather(second, joined)
    assert sorted(key for batch in lease.written[1:] for key in batch) == ["a", "b"]
