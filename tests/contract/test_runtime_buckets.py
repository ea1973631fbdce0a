"""Reading a whole bucket against a real nats-server."""

import asyncio

from support.nats_server import NatsServer
from treadle_runtime.bus import BATCH, Bus, entries_of, open_bus

PART_BYTES = 512 * 1024  # large values arrive slower than the answers about them


async def test_an_empty_bucket_has_no_entries(bus: Bus) -> None:
    bucket = await bus.key_value("b")
    assert await entries_of(bucket) == []
    await bucket.put("k", b"v")
    await bucket.delete("k")
    assert await entries_of(bucket) == []


async def test_every_key_is_read_once_with_its_newest_value_in_order(bus: Bus) -> None:
    bucket = await bus.key_value("b")
    keys = [f"k.{index}" for index in range(2 * BATCH + 3)]
    for value in (b"old", b"new"):
        await asyncio.gather(*(bucket.put(key, value) for key in keys))
    await bucket.put("k.7", b"newest")
    await bucket.delete("k.9")
    await bucket.purge("k.11")
    entries = await entries_of(bucket)
    assert {entry.key for entry in entries} == set(keys) - {"k.9", "k.11"}
    assert len(entries) == len(keys) - 2
    assert entries[-1].key == "k.7"
    assert {entry.value for entry in entries[:-1]} == {b"new"}
    revisions = [entry.revision or 0 for entry in entries]
    assert revisions == sorted(revisions)
    assert (await bucket.get("k.7")).revision == revisions[-1]
    assert {entry.key for entry in await entries_of(bucket, keys_only=True)} == {entry.key for entry in entries}


async def test_what_is_there_is_read_whatever_is_written_meanwhile(nats_url: str) -> None:
    async with open_bus(nats_url, "reader") as bus, open_bus(nats_url, "writer") as other:
        bucket, theirs = await bus.key_value("b"), await other.key_value("b")
        for index in range(100):
            await bucket.put(f"there.{index}", b"x" * 10_000)

        async def write() -> None:
            for index in range(2000):
                await theirs.put(f"busy.{index % 7}", b"y")

        writing = asyncio.ensure_future(write())
        try:
            for _ in range(10):
                keys = [entry.key for entry in await entries_of(bucket)]
                assert len([key for key in keys if key.startswith("there.")]) == 100
                assert len(keys) == len(set(keys))
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


async def test_nothing_is_missed_just_after_a_restart_of_nats(nats_server: NatsServer) -> None:
    async with open_bus(nats_server.url, "test") as bus:
        bucket = await bus.key_value("b")
        for index in range(8):
            await bucket.put(str(index), b"x" * PART_BYTES)
    for _ in range(5):
        nats_server.kill()
        nats_server.start()
        async with open_bus(nats_server.url, "test") as bus:
            bucket = await bus.key_value("b")
            assert [entry.key for entry in await entries_of(bucket, keys_only=True)] == [str(i) for i in range(8)]
            assert sum(len(entry.value or b"") for entry in await entries_of(bucket)) == 8 * PART_BYTES
