"""Request records against a real nats-server: a mutation happens once per request_id."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import nats.errors
import pytest
from support.conditions import until
from support.nats_server import NatsServer
from treadle.migrator.v1.migrator_pb2 import (
    CancelMigrationRequest,
    CancelMigrationResponse,
    Migration,
)
from treadle_runtime import idempotency
from treadle_runtime.bus import Bus, open_bus
from treadle_runtime.errors import FailedPrecondition, InvalidArgument
from treadle_runtime.idempotency import RequestRecords


@dataclass
class Mutation:
    """Counts its executions and answers with the count; waits for `gate`, and fails `failures`
    times first."""

    records: RequestRecords
    failures: int = 0
    answer_bytes: int = 0
    later: Callable[[Coroutine[Any, Any, None]], None] | None = None
    executions: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def is_connected(self) -> bool:
        return self.records._bus._client.is_connected

    async def _execute(self) -> CancelMigrationResponse:
        await self.gate.wait()
        self.executions += 1
        if self.executions <= self.failures:
            raise FailedPrecondition("NOT_YET", "not yet")
        migration = Migration(revision=self.executions, failure_reason="x" * self.answer_bytes)
        return CancelMigrationResponse(migration=migration)

    async def __call__(
        self, request_id: str, migration_id: str = "m", method: str = "Cancel"
    ) -> int:
        request = CancelMigrationRequest(request_id=request_id, migration_id=migration_id)
        response = await self.records.once(
            method, request, CancelMigrationResponse, self._execute, self.later
        )
        assert len(response.migration.failure_reason) == self.answer_bytes
        return response.migration.revision


@asynccontextmanager
async def mutation(nats_url: str, **how: Any) -> AsyncIterator[Mutation]:
    """One by the records of a process of its own."""
    async with open_bus(nats_url, "test") as bus:
        yield Mutation(await RequestRecords.open(bus, "probe"), **how)


@pytest.fixture
async def mutate(bus: Bus) -> Mutation:
    return Mutation(await RequestRecords.open(bus, "probe"))


async def test_a_repeat_gets_the_recorded_answer_and_another_id_its_own(mutate: Mutation) -> None:
    assert [await mutate("r-1"), await mutate("r-1"), await mutate("r-2"), await mutate("r-1")] == [
        1,
        1,
        2,
        1,
    ]


async def test_an_id_with_another_request_and_a_bad_id_are_refused(mutate: Mutation) -> None:
    await mutate("r-1", "m")
    with pytest.raises(InvalidArgument, match="different request") as reused:
        await mutate("r-1", "n")
    assert (reused.value.field, reused.value.reason) == ("request_id", "REQUEST_ID_REUSED")
    for bad in ("", "a b", "x" * 129):
        with pytest.raises(InvalidArgument) as refused:
            await mutate(bad)
        assert refused.value.field == "request_id"
    assert mutate.executions == 1


async def test_the_same_id_under_two_methods_is_two_requests(mutate: Mutation) -> None:
    assert [await mutate("r"), await mutate("r", "x", "Start")] == [1, 2]


async def test_concurrent_repeats_wait_for_the_first(mutate: Mutation) -> None:
    mutate.gate.clear()
    repeats = [asyncio.ensure_future(mutate("r-1")) for _ in range(10)]
    await asyncio.sleep(0)
    with pytest.raises(InvalidArgument):
        await mutate("r-1", "other")
    mutate.gate.set()
    assert await asyncio.gather(*repeats) == [1] * 10


async def test_an_error_is_not_recorded_and_is_shared_by_concurrent_repeats(
    mutate: Mutation,
) -> None:
    mutate.failures = 1
    mutate.gate.clear()
    repeats = [asyncio.ensure_future(mutate("r-1")) for _ in range(3)]
    await asyncio.sleep(0)
    mutate.gate.set()
    outcomes = await asyncio.gather(*repeats, return_exceptions=True)
    assert all(isinstance(outcome, FailedPrecondition) for outcome in outcomes)
    assert await mutate("r-1") == 2


async def test_when_the_first_is_cancelled_a_waiting_repeat_takes_its_turn(
    mutate: Mutation,
) -> None:
    mutate.gate.clear()
    first, second = asyncio.ensure_future(mutate("r-1")), asyncio.ensure_future(mutate("r-1"))
    await asyncio.sleep(0)
    first.cancel()
    mutate.gate.set()
    assert await second == 1
    assert first.cancelled()


async def test_the_oldest_records_go_where_a_bound_is_reached(nats_server: NatsServer) -> None:
    """Ten answers of three parts each, with room for five or so. Result: each call is answered; in
    a new process the last ones are recalled, and the first one is made again and recorded again."""
    answer_bytes = 3 * idempotency.PART_BYTES
    async with mutation(nats_server.url, answer_bytes=answer_bytes) as mutate:
        await mutate.records.bound(6 * answer_bytes)
        assert [await mutate(f"r-{number}") for number in range(10)] == list(range(1, 11))
    async with mutation(nats_server.url, answer_bytes=answer_bytes) as again:
        assert [await again(f"r-{number}") for number in (7, 8, 9)] == [8, 9, 10]
        assert await again("r-0") == 1 == again.executions
    async with mutation(nats_server.url, answer_bytes=answer_bytes) as last:
        assert await last("r-0") == 1 and last.executions == 0


@pytest.mark.parametrize("answer_bytes", [0, 3 * idempotency.PART_BYTES + 17])
async def test_records_outlive_the_process_and_the_nats_server(
    nats_server: NatsServer, answer_bytes: int
) -> None:
    async with mutation(nats_server.url, answer_bytes=answer_bytes) as mutate:
        assert [await mutate("r:1"), await mutate("r:2")] == [1, 2]
    nats_server.kill()
    nats_server.start()
    async with mutation(nats_server.url, answer_bytes=answer_bytes) as again:
        assert [await again("r:2"), await again("r:1")] == [2, 1]
        with pytest.raises(InvalidArgument):
            await again("r:1", "other")
    assert again.executions == 0


async def test_a_record_that_left_the_cache_is_still_answered(
    mutate: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "CACHED_RECORDS", 2)
    for index in range(5):
        assert await mutate(f"r-{index}") == index + 1
    assert [await mutate(f"r-{index}") for index in range(5)] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("impatient")
async def test_an_answer_that_could_not_be_recorded_is_kept_and_recorded_by_the_repeat(
    nats_server: NatsServer,
) -> None:
    async with mutation(nats_server.url) as mutate:
        nats_server.kill()
        with pytest.raises(nats.errors.Error):
            await mutate("r-1")
        nats_server.start()
        await until(lambda: mutate.is_connected)
        assert await mutate("r-1") == 1
    async with mutation(nats_server.url) as afterwards:
        assert await afterwards("r-1") == 1
    assert (mutate.executions, afterwards.executions) == (1, 0)


@pytest.mark.usefixtures("impatient")
async def test_an_answer_that_need_not_wait_is_recorded_afterwards_and_by_a_repeat_where_that_failed(
    nats_server: NatsServer,
) -> None:
    """WHEN    records are saved later, and NATS is down for the second Result: both are answered;
    the first is there for the service's next life, the second once it was repeated"""
    later: list[Coroutine[Any, Any, None]] = []
    async with mutation(nats_server.url, later=later.append) as mutate:
        assert await mutate("r-1") == 1
        await later.pop()
        nats_server.kill()
        assert await mutate("r-2") == 2
        await later.pop()
        nats_server.start()
        await until(lambda: mutate.is_connected)
        assert await mutate("r-2") == 2
        assert not later
    async with mutation(nats_server.url) as again:
        assert [await again("r-1"), await again("r-2")] == [1, 2]
        assert again.executions == 0
