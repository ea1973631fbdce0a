"""Other services that are slow, silent or gone never hold up a step."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from support.conditions import until
from support.fake_engine import FakeEngine, engine_port, leased_engines
from support.fake_servicer import Gate
from support.scheduler import scheduler
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_core.actions import AbortStep, Action, Reprioritize
from treadle_runtime.bus import Bus
from treadle_runtime.calls import Channels
from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.outbound import Outbound, Queues


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
async def test_steps_go_on_without_predictor_placement_and_migrator(
    nats_url: str, where: str
) -> None:
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
                tickets = await asyncio.gather(
                    *[client.step(f"t{number}", turn) for number in range(8)]
                )
                assert {ticket.engine_id for ticket in tickets} == {"e0", "e1"}
            lost = await client.step("t0", 3, replaces_ticket_id=tickets[0].ticket_id)
            assert lost.engine_id != tickets[0].engine_id
            for number in range(8):
                await client.close(f"t{number}")


async def test_trajectories_are_listed_by_rollout_by_whether_they_are_open_and_by_pages(
    nats_url: str,
) -> None:
    async with scheduler(nats_url) as client:
        for number in range(6):
            await client.open(f"t{number}", rollout_id=f"r{number % 2}")
        await client.close("t2")

        async def listed(**fields: Any) -> list[str]:
            response = await client.call(
                "ListTrajectories", pb.ListTrajectoriesRequest(rollout_id="r0", **fields)
            )
            return [trajectory.trajectory_id for trajectory in response.trajectories]

        assert await listed() == ["t0", "t2", "t4"]
        assert await listed(open_only=True, page_size=2) == ["t0", "t4"]
        first = await client.call("ListTrajectories", pb.ListTrajectoriesRequest(page_size=4))
        rest = await client.call(
            "ListTrajectories", pb.ListTrajectoriesRequest(page_token=first.next_page_token)
        )
        assert [each.trajectory_id for each in (*first.trajectories, *rest.trajectories)] == [
            f"t{n}" for n in range(6)
        ]


async def test_a_lost_stream_moves_the_step_and_stops_it_at_the_old_engine(
    nats_url: str, bus: Bus
) -> None:
    async with (
        scheduler(nats_url) as client,
        leased_engines(bus, client.address, ["e0", "e1"]) as engines,
    ):
        await until(lambda: all(engine.lease_id for engine in engines), what="both registered")
        await client.open("t")
        lost = await client.step("t", 0)
        again = await client.step("t", 0, replaces_ticket_id=lost.ticket_id, resumed_tokens=1)
        assert again.engine_id != lost.engine_id
        old = next(engine for engine in engines if engine.engine_id == lost.engine_id)
        await until(lambda: old.requests("Abort"), what="the old engine is told")
        assert old.requests("Abort")[0].ticket_id == lost.ticket_id


class HungEngine(FakeEngine):
    """Takes commands and answers none while `hung` is closed."""

    hung: Gate

    async def Abort(self, request: Any, context: Any) -> Any:
        await self.hung.pass_through()

    Reprioritize = Abort


@pytest.mark.parametrize(
    ("rpc", "action"),
    [
        ("Abort", lambda address, number: AbortStep(address, f"k{number}")),
        (
            "Reprioritize",
            lambda address, number: Reprioritize("e", address, ((f"k{number}", 1.0),)),
        ),
    ],
)
async def test_a_sidecar_that_hangs_delays_the_commands_of_no_other(
    bus: Bus, rpc: str, action: Callable[[str, int], Action]
) -> None:
    """Result: the other sidecar has its command while the calls to the hung one still wait."""
    hung, other = HungEngine("hung"), FakeEngine("other")  # type: ignore[abstract]
    hung.hung = Gate()
    hung.hung.close()
    channels = Channels(2**20)
    outbound = Outbound(SchedulerSettings(), bus, channels.get)
    async with engine_port(hung), engine_port(other), AsyncExitStack() as stack:
        stack.push_async_callback(channels.close)
        for worker in [asyncio.create_task(work()) for work in outbound.tasks]:
            stack.callback(worker.cancel)
        for number in range(64):
            outbound.send(action(hung.address, number))
        await until(lambda: hung.hung.waiting)
        outbound.send(action(other.address, 0))
        await until(lambda: other.requests(rpc) or not hung.hung.waiting)
        assert hung.hung.waiting and len(other.requests(rpc)) == 1


async def test_newer_work_takes_the_place_of_older_that_waits() -> None:
    done: list[list[str]] = []
    gate = Gate()

    async def work(_: str, items: list[str]) -> None:
        done.append(items)
        await gate.pass_through()

    queues: Queues[str] = Queues(work, most=2)
    gate.close()
    running = asyncio.create_task(queues.run())
    queues.put("x", "a", "a1")
    await until(lambda: gate.waiting)
    for key, item in (("b", "b1"), ("c", "c1"), ("b", "b2"), ("d", "d1")):
        queues.put("x", key, item)
    gate.open()
    await until(lambda: len(done) == 3)
    assert done == [["a1"], ["b2", "c1"], ["d1"]]
    running.cancel()


async def test_the_directory_names_public_addresses_where_they_are_set(nats_url: str) -> None:
    async with scheduler(
        nats_url,
        predictor="p:1",
        tools="t:1",
        public_tools="mesh.example:7405",
        public_rollout="mesh.example:7406",
    ) as client:
        directory = await client.call("GetDirectory", pb.GetDirectoryRequest())
        assert directory == pb.GetDirectoryResponse(
            predictor_address="p:1",
            tools_address="mesh.example:7405",
            rollout_address="mesh.example:7406",
        )


async def test_an_action_that_fails_unexpectedly_ends_no_other() -> None:
    """Neither those of another address nor later ones of its own."""
    done = list[str]()

    async def work(address: str, items: list[str]) -> None:
        if "bad" in items:
            raise ZeroDivisionError
        done.append(address)

    queues = Queues[str](work)
    running = asyncio.create_task(queues.run())
    for key, address, item in (("1", "a", "bad"), ("2", "a", "good"), ("1", "b", "good")):
        queues.put(address, key, item)
    await until(lambda: sorted(done) == ["a", "b"])
    queues.put("a", "3", "bad")
    queues.put("b", "3", "good")
    await until(lambda: sorted(done) == ["a", "b", "b"])
    assert not running.done()
    running.cancel()
