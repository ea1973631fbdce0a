"""Other services that are slow, silent or gone never hold up a step."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.conditions import until
from support.fake_engine import leased_engines
from support.scheduler import scheduler
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_core.actions import ReleasePrefix
from treadle_runtime.bus import Bus
from treadle_scheduler.outbound import Waiting


@asynccontextmanager
async def silence() -> AsyncIterator[str]:
    """An address that accepts connections and never says a word."""
    gone = asyncio.Event()

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"
    finally:
        gone.set()
        server.close()


@pytest.mark.parametrize("where", ["silent", "gone"])
async def test_steps_go_on_without_predictor_placement_and_migrator(nats_url: str, where: str) -> None:
    async with silence() as silent:
        address = silent if where == "silent" else "127.0.0.1:1"
        async with scheduler(
            nats_url, predictor=address, placement=address, migrator=address, plan_every_events=1
        ) as client:
            await client.register("e0", address=address)
            await client.register("e1", address=address)
            for number in range(8):
                await client.open(f"t{number}")
            for turn in range(4):
                tickets = await asyncio.gather(*[client.step(f"t{number}", turn) for number in range(8)])
                assert {ticket.engine_id for ticket in tickets} == {"e0", "e1"}
            lost = await client.step("t0", 3, replaces_ticket_id=tickets[0].ticket_id)
            assert lost.engine_id != tickets[0].engine_id
            for number in range(8):
                await client.close(f"t{number}")


async def test_trajectories_are_listed_by_rollout_by_whether_they_are_open_and_by_pages(nats_url: str) -> None:
    async with scheduler(nats_url) as client:
        for number in range(6):
            await client.open(f"t{number}", rollout_id=f"r{number % 2}")
        await client.close("t2")

        async def listed(**fields: Any) -> list[str]:
            response = await client.call("ListTrajectories", pb.ListTrajectoriesRequest(rollout_id="r0", **fields))
            return [trajectory.trajectory_id for trajectory in response.trajectories]

        assert await listed() == ["t0", "t2", "t4"]
        assert await listed(open_only=True, page_size=2) == ["t0", "t4"]
        first = await client.call("ListTrajectories", pb.ListTrajectoriesRequest(page_size=4))
        rest = await client.call("ListTrajectories", pb.ListTrajectoriesRequest(page_token=first.next_page_token))
        assert [each.trajectory_id for each in (*first.trajectories, *rest.trajectories)] == [f"t{n}" for n in range(6)]


async def test_a_lost_stream_moves_the_step_and_stops_it_at_the_old_engine(nats_url: str, bus: Bus) -> None:
    async with scheduler(nats_url) as client, leased_engines(bus, client.address, ["e0", "e1"]) as engines:
        await until(lambda: all(engine.lease_id for engine in engines), what="both registered")
        await client.open("t")
        lost = await client.step("t", 0)
        again = await client.step("t", 0, replaces_ticket_id=lost.ticket_id, resumed_tokens=1)
        assert again.engine_id != lost.engine_id
        old = next(engine for engine in engines if engine.engine_id == lost.engine_id)
        await until(lambda: old.requests("Abort"), what="the old engine is told")
        assert old.requests("Abort")[0].ticket_id == lost.ticket_id


async def test_newer_work_takes_the_place_of_older_that_waits() -> None:
    waiting: Waiting[ReleasePrefix] = Waiting()
    waiting.put("a", ReleasePrefix("x", "1"))
    waiting.put("b", ReleasePrefix("x", "2"))
    waiting.put("a", ReleasePrefix("y", "1"))
    assert await waiting.take(1) == [ReleasePrefix("y", "1")]
    assert await waiting.take(10) == [ReleasePrefix("x", "2")]
    later = asyncio.create_task(waiting.take(10))
    await asyncio.sleep(0)
    assert not later.done()
    waiting.put("c", ReleasePrefix("x", "3"))
    assert await later == [ReleasePrefix("x", "3")]


async def test_the_directory_names_public_addresses_where_they_are_set(nats_url: str) -> None:
    async with scheduler(
        nats_url, predictor="p:1", tools="t:1", public_tools="mesh.example:7405", public_rollout="mesh.example:7406"
    ) as client:
        directory = await client.call("GetDirectory", pb.GetDirectoryRequest())
        assert directory == pb.GetDirectoryResponse(
            predictor_address="p:1", tools_address="mesh.example:7405", rollout_address="mesh.example:7406"
        )
