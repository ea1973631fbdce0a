"""Reading a whole bucket against a real nats-server."""

import asyncio

import nats.errors
import pytest
from support.nats_server import NatsServer
from treadle_runtime.buckets import BATCH, entries_of, is_refusal, purge_markers
from treadle_runtime.bus import Bus, open_bus

# Writes that wait for their answers together: each has 2 s for it, also where the machine is busy.
AT_ONCE = 32
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
        for begin in range(0, len(keys), AT_ONCE):
            await asyncio.gather(*(bucket.put(key, value) for key in keys[begin : begin + AT_ONCE]))
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
    assert {entry.key for entry in await entries_of(bucket, keys_only=True)} == {
        entry.key for entry in entries
    }


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
            assert [entry.key for entry in await entries_of(bucket, keys_only=True)] == [
                str(i) for i in range(8)
            ]
            assert (
                sum(len(entry.value or b"") for entry in await entries_of(bucket)) == 8 * PART_BYTES
            )


async def test_markers_of_deleted_keys_are_removed_and_a_key_that_comes_back_meanwhile_keeps_its_value(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = await bus.key_value("b")
    for key in ("kept", "gone", "back"):
        await bucket.put(key, b"1")
    for key in ("gone", "back"):
        await bucket.delete(key)
    purge = bucket._js.purge_stream

    async def come_back(stream: str, *, subject: str, seq: int) -> bool:
        if subject.endswith("back"):
            await bucket.put("back", b"2")
        return await purge(stream, subject=subject, seq=seq)

    monkeypatch.setattr(bucket._js, "purge_stream", come_back)
    await purge_markers(bucket)
    assert {entry.key: entry.value for entry in await entries_of(bucket)} == {
        "kept": b"1",
        "back": b"2",
    }
    assert (await bucket.status()).stream_info.state.messages == 2


async def test_writes_behind_a_fence_are_refused_together_once_it_has_changed(bus: Bus) -> None:
    """Many are sent before the first is answered, and the fence is at a higher revision by one."""
    bucket = await bus.key_value("b")
    revision = await bus.update_entry("b", "fence", b"1", revision=0)
    values: dict[str, bytes | None] = {f"k{number}": b"1" for number in range(200)}
    assert not await bus.write_entries("b", {**values, "k7": None}, fence=("fence", revision))
    await bus.update_entry("b", "fence", b"2", revision=revision)
    refused = await bus.write_entries("b", dict.fromkeys(values), fence=("fence", revision))
    assert set(refused) == set(values)
    assert all(is_refusal(error) for error in refused.values())
    assert len(await entries_of(bucket)) == 200, "but for k7, with the fence"
    with pytest.raises(nats.errors.Error) as raised:
        await bus.update_entry("b", "fence", b"3", revision=revision)
    assert is_refusal(raised.value)
