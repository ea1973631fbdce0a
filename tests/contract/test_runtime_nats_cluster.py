"""Streams and buckets on several NATS servers: nothing is lost with one of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import nats.errors
import pytest
from support.nats_server import NatsCluster, NatsServer
from treadle.telemetry.v1.facts_pb2 import EngineLost
from treadle_runtime import buckets
from treadle_runtime.bus import Bus, open_bus
from treadle_runtime.errors import StartError
from treadle_runtime.facts import STREAM, make_fact

R = TypeVar("R")
BUCKET = "KV_b"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    servers = NatsCluster(tmp_path_factory.mktemp("cluster"))
    servers.start()
    yield servers
    servers.kill()


async def until_it_leads(ask: Callable[[], Awaitable[R]]) -> R:
    """The answer, asked for again while the servers choose a new leader."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask()
            except nats.errors.Error:
                await asyncio.sleep(0.1)


async def leader_of(bus: Bus, stream: str) -> str:
    about = (await until_it_leads(lambda: bus.jetstream.stream_info(stream))).cluster
    assert about is not None and about.leader
    return about.leader


async def put(bus: Bus, key: str, value: bytes) -> None:
    async def write() -> None:
        await (await bus.key_value("b")).put(key, value)

    await until_it_leads(write)


async def test_the_loss_of_the_server_that_leads_loses_nothing(cluster: NatsCluster) -> None:
    """Each server leads something. One is killed; values and facts of before and after are there,
    and it comes back."""
    async with open_bus(cluster.url, "service", replicas=3) as bus:
        await put(bus, "before", b"1")
        await bus.publish(make_fact("test", engine_lost=EngineLost(engine_id="e1")))
        await bus.flush()
        for stream in (BUCKET, STREAM):
            name = await leader_of(bus, stream)
            cluster.servers[name].kill()
            await put(bus, f"without.{name}", b"2")
            await bus.publish(make_fact("test", engine_lost=EngineLost(engine_id="e2")))
            await bus.flush()
            cluster.servers[name].start()
        bucket = await until_it_leads(lambda: bus.key_value("b"))
        assert (await bucket.get("before")).value == b"1"
        assert {
            (await bucket.get(key)).value for key in await bucket.keys() if key != "before"
        } == {b"2"}
        assert (await bus.jetstream.stream_info(STREAM)).state.messages == 3


async def test_a_mesh_that_is_there_gets_replicas_and_keeps_what_it_has(
    cluster: NatsCluster,
) -> None:
    """Also back. A command that names no number changes nothing."""
    async with open_bus(cluster.url, "service", replicas=1) as bus:
        await (await bus.key_value("grows")).put("key", b"value")
    for replicas in (3, None, 1):
        async with open_bus(cluster.url, "service", replicas=replicas) as bus:
            bucket = await bus.key_value("grows")
            config = (await bus.jetstream.stream_info("KV_grows")).config
            assert (config.num_replicas, config.allow_direct) == (
                (3, False) if replicas != 1 else (1, True)
            )
            assert (await bucket.get("key")).value == b"value"


async def test_more_replicas_than_servers_is_a_start_error_that_names_the_setting(
    cluster: NatsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "PEERS_TIMEOUT_S", 1.0)
    alone = NatsServer(tmp_path / "alone")
    alone.start()
    try:
        for url, count in ((alone.url, 3), (cluster.url, 5)):
            with pytest.raises(StartError, match=f"TREADLE_NATS_REPLICAS={count} .*cluster"):
                async with open_bus(url, "test", replicas=count) as bus:
                    await bus.key_value("many")
    finally:
        alone.kill()
