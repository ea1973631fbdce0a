"""Request records against a real nats-server: a mutation happens once per request_id."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import nats.errors
import pytest
from support.conditions import until
from support.nats_server import NatsServer
from support.processes import StartService
from support.rpc import error_of
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.migrator.v1.migrator_pb2 import CancelMigrationRequest, CancelMigrationResponse, Migration
from treadle_runtime import idempotency
from treadle_runtime.bus import open_bus
from treadle_runtime.errors import FailedPrecondition, InvalidArgument
from treadle_runtime.idempotency import RequestRecords

PROBE = str(Path(__file__).parent.parent / "support" / "probe_service.py")


class Mutation:
    """Counts its executions and answers with the count; waits for `gate`, and fails `failures` times first."""

    def __init__(
        self,
        records: RequestRecords,
        failures: int = 0,
        answer_bytes: int = 0,
        later: Callable[[Coroutine[Any, Any, None]], None] | None = None,
    ) -> None:
        self._records = records
        self._later = later
        self._failures = failures
        self._answer_bytes = answer_bytes
        self.executions = 0
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def is_connected(self) -> bool:
        return self._records._bus._client.is_connected

    async def _execute(self) -> CancelMigrationResponse:
        await self.gate.wait()
        self.executions += 1
        if self.executions <= self._failures:
            raise FailedPrecondition("NOT_YET", "not yet")
        migration = Migration(revision=self.executions, failure_reason="x" * self._answer_bytes)
        return CancelMigrationResponse(migration=migration)

    async def __call__(self, request_id: str, migration_id: str = "m") -> int:
        request = CancelMigrationRequest(request_id=request_id, migration_id=migration_id)
        response = await self._records.once("Cancel", request, CancelMigrationResponse, self._execute, self._later)
        assert len(response.migration.failure_reason) == self._answer_bytes
        return response.migration.revision


@asynccontextmanager
async def mutation(nats_url: str, **how: Any) -> AsyncIterator[Mutation]:
    """One by the records of a process of its own."""
    async with open_bus(nats_url, "test") as bus:
        yield Mutation(await RequestRecords.open(bus, "probe"), **how)


async def test_a_repeat_gets_the_recorded_answer_and_another_id_its_own(nats_url: str) -> None:
    async with mutation(nats_url) as mutate:
        assert [await mutate("r-1"), await mutate("r-1"), await mutate("r-2"), await mutate("r-1")] == [1, 1, 2, 1]


async def test_an_id_with_another_request_and_a_bad_id_are_refused(nats_url: str) -> None:
    async with mutation(nats_url) as mutate:
        await mutate("r-1", "m")
        with pytest.raises(InvalidArgument, match="different request") as reused:
            await mutate("r-1", "n")
        assert (reused.value.field, reused.value.reason) == ("request_id", "REQUEST_ID_REUSED")
        for bad in ("", "a b", "x" * 129):
            with pytest.raises(InvalidArgument) as refused:
                await mutate(bad)
            assert refused.value.field == "request_id"
    assert mutate.executions == 1


async def test_the_same_id_under_two_methods_is_two_requests(nats_url: str) -> None:
    async with open_bus(nats_url, "test") as bus:
        records = await RequestRecords.open(bus, "probe")

        async def answer() -> CancelMigrationResponse:
            return CancelMigrationResponse()

        request = CancelMigrationRequest(request_id="r")
        await records.once("Cancel", request, CancelMigrationResponse, answer)
        await records.once(
            "Start", CancelMigrationRequest(request_id="r", migration_id="x"), CancelMigrationResponse, answer
        )


async def test_concurrent_repeats_wait_for_the_first(nats_url: str) -> None:
    async with mutation(nats_url) as mutate:
        mutate.gate.clear()
        repeats = [asyncio.ensure_future(mutate("r-1")) for _ in range(10)]
        await asyncio.sleep(0)
        with pytest.raises(InvalidArgument):
            await mutate("r-1", "other")
        mutate.gate.set()
        assert await asyncio.gather(*repeats) == [1] * 10


async def test_an_error_is_not_recorded_and_is_shared_by_concurrent_repeats(nats_url: str) -> None:
    async with mutation(nats_url, failures=1) as mutate:
        mutate.gate.clear()
        repeats = [asyncio.ensure_future(mutate("r-1")) for _ in range(3)]
        await asyncio.sleep(0)
        mutate.gate.set()
        outcomes = await asyncio.gather(*repeats, return_exceptions=True)
        assert all(isinstance(outcome, FailedPrecondition) for outcome in outcomes)
        assert await mutate("r-1") == 2


async def test_when_the_first_is_cancelled_a_waiting_repeat_takes_its_turn(nats_url: str) -> None:
    async with mutation(nats_url) as mutate:
        mutate.gate.clear()
        first, second = asyncio.ensure_future(mutate("r-1")), asyncio.ensure_future(mutate("r-1"))
        await asyncio.sleep(0)
        first.cancel()
        mutate.gate.set()
        assert await second == 1
        assert first.cancelled()


@pytest.mark.parametrize("answer_bytes", [0, 3 * idempotency.PART_BYTES + 17])
async def test_records_outlive_the_process_and_the_nats_server(nats_server: NatsServer, answer_bytes: int) -> None:
    async with mutation(nats_server.url, answer_bytes=answer_bytes) as mutate:
        assert [await mutate("r:1"), await mutate("r:2")] == [1, 2]
    nats_server.kill()
    nats_server.start()
    async with mutation(nats_server.url, answer_bytes=answer_bytes) as again:
        assert [await again("r:2"), await again("r:1")] == [2, 1]
        with pytest.raises(InvalidArgument):
            await again("r:1", "other")
    assert again.executions == 0


async def test_a_record_that_left_the_cache_is_still_answered(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "CACHED_RECORDS", 2)
    async with mutation(nats_url) as mutate:
        for index in range(5):
            assert await mutate(f"r-{index}") == index + 1
        assert [await mutate(f"r-{index}") for index in range(5)] == [1, 2, 3, 4, 5]


async def test_an_answer_that_could_not_be_recorded_is_kept_and_recorded_by_the_repeat(nats_server: NatsServer) -> None:
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


async def test_an_answer_that_need_not_wait_is_recorded_afterwards_and_by_a_repeat_where_that_failed(
    nats_server: NatsServer,
) -> None:
    """
    WHEN    records are saved later, and NATS is down for the second
    Result: both are answered; the first is there for the service's next life, the second once it was repeated
    """
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


async def test_a_service_killed_after_its_answer_answers_the_repeat_alike(start_service: StartService) -> None:
    """The client's first call is answered, the service is killed with SIGKILL and started again.

    Result: a repeat of the call gets the first answer, a new call is executed by the new process.
    """
    request = migrator_pb2.CancelMigrationRequest(request_id="r-1", migration_id="m")
    revisions: list[int] = []
    for _ in range(2):
        process = await start_service(PROBE, service="probe")
        async with grpc.aio.insecure_channel(process.address) as channel:
            stub = migrator_pb2_grpc.MigratorServiceStub(channel)
            for request_id in ("r-0", "r-1"):
                request.request_id = request_id if not revisions else "r-1"
                response = await stub.CancelMigration(request, timeout=10)
            revisions.append(response.migration.revision)
            request.migration_id = "another"
            request.request_id = "r-1"
            with pytest.raises(grpc.aio.AioRpcError) as conflict:
                await stub.CancelMigration(request, timeout=10)
            assert error_of(conflict.value)[:3] == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "REQUEST_ID_REUSED",
                ("request_id",),
            )
            request.migration_id = "m"
        process.kill()
    assert revisions == [2, 2]
