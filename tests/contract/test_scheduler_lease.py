"""Several schedulers on one bucket of a real nats-server: one leads, and the writes of all others
are refused."""

import asyncio
from collections.abc import Awaitable

import nats.errors
import pytest
from support.conditions import until
from support.nats_server import NatsServer
from treadle_core.model import Policy
from treadle_runtime.bus import Bus, open_bus
from treadle_scheduler.driver import MeshRecord, Store, trajectory_key
from treadle_scheduler.lease import BUCKET, LONGEST_GAP_S, Lease, NotLeader, Silence

TTL_S = 2.5  # longer than a busy machine takes for a renewal
WAIT_S = 20.0
NEVER_S = 3600.0  # a time to live that no test lives through


async def leader(bus: Bus, address: str, ttl_s: float = NEVER_S) -> Lease:
    """Returns once it leads."""
    lease = await Lease.open(bus, ttl_s)
    async with asyncio.timeout(WAIT_S):
        await lease.take(address)
    return lease


async def write(lease: Lease, **values: bytes) -> dict[str, Exception]:
    """Keys that failed."""
    async with lease.writing:
        return await lease.write(values)


async def value_of(bus: Bus, key: str) -> bytes | None:
    return (await (await bus.key_value(BUCKET)).get(key)).value


async def last_sequence(bus: Bus) -> int:
    return (await bus.jetstream.stream_info(f"KV_{BUCKET}")).state.last_seq


async def require_lost(work: Awaitable[object]) -> None:
    with pytest.raises(NotLeader, match=r"127\.0\.0\.1:2"):
        await work


async def test_a_leader_that_was_replaced_writes_nothing_and_knows_who_leads(nats_url: str) -> None:
    """Result: everything before the takeover is there, and nothing of many keys that it sends
    together after it."""
    async with open_bus(nats_url, "old") as old_bus, open_bus(nats_url, "new") as bus:
        old = await leader(old_bus, "127.0.0.1:1", ttl_s=TTL_S)
        assert not await write(old, **{f"k{number}": b"old" for number in range(200)})
        new = await leader(bus, "127.0.0.1:2")
        before = await last_sequence(bus)
        assert not old.is_held
        await require_lost(write(old, **{f"k{number}": b"late" for number in range(200)}))
        for refused in (write(old, k2=b"late"), old.keep(), old.release(), old.admit()):
            await require_lost(refused)
        assert await last_sequence(bus) == before
        assert [await value_of(bus, key) for key in ("k0", "k1", "k2")] == [b"old", b"old", b"old"]
        assert not await write(new, k1=b"new")


async def test_a_store_of_a_replaced_leader_raises_to_everybody_who_settles(nats_url: str) -> None:
    async with open_bus(nats_url, "old") as old_bus, open_bus(nats_url, "new") as bus:
        old = Store(await leader(old_bus, "127.0.0.1:1", ttl_s=TTL_S))
        new = Store(await leader(bus, "127.0.0.1:2"))
        for key in ("a", "b"):
            old.put(trajectory_key(key), MeshRecord(Policy(), 0.0))
        settled = await asyncio.gather(
            old.settle([trajectory_key("a")]),
            old.settle([trajectory_key("b")]),
            return_exceptions=True,
        )
        assert [type(each) for each in settled] == [NotLeader, NotLeader]
        await require_lost(old.settle_all())
        assert await new.load() == ([], [], [], None)


async def test_a_renewal_whose_acknowledgement_was_lost_is_known_as_its_own(bus: Bus) -> None:
    """Written again behind the leader's back. Result: it still leads, and its next writes are taken
    at once."""
    lease = await leader(bus, "127.0.0.1:1")
    own = await value_of(bus, "leader")
    assert own is not None
    for key in ("a", "b"):
        await (await bus.key_value(BUCKET)).put("leader", own)
        assert not await write(lease, **{key: b"1", f"{key}{key}": b"1"})
    assert [await value_of(bus, key) for key in ("a", "aa", "b", "bb")] == [b"1"] * 4
    assert lease.is_held


async def test_a_value_that_nats_does_not_take_fails_alone(bus: Bus) -> None:
    lease = await leader(bus, "127.0.0.1:1")
    failed = await write(lease, a=b"1", big=b"x" * (bus.max_payload_bytes + 1), c=b"1")
    assert [(key, type(error)) for key, error in failed.items()] == [
        ("big", nats.errors.MaxPayloadError)
    ]
    assert [await value_of(bus, key) for key in "ac"] == [b"1", b"1"]


async def test_of_many_that_stand_by_one_leads_and_after_its_death_another(
    nats_url: str, bus: Bus
) -> None:
    first = await leader(bus, "127.0.0.1:1", ttl_s=TTL_S)
    renewing = asyncio.create_task(first.keep())
    others = [await Lease.open(bus, TTL_S) for _ in range(5)]
    waiting = [asyncio.Event() for _ in others]
    takes = [
        asyncio.create_task(each.take(f"127.0.0.1:{2 + n}", waiting[n]))
        for n, each in enumerate(others)
    ]
    await asyncio.gather(*(each.wait() for each in waiting))
    await asyncio.sleep(2 * TTL_S)
    assert not any(take.done() for take in takes), "the leader lives"
    renewing.cancel()
    await until(lambda: any(take.done() for take in takes))
    await asyncio.sleep(TTL_S / 2)
    assert sum(take.done() for take in takes) == 1
    for take in takes:
        take.cancel()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:2"])
async def test_nobody_waits_for_a_leader_that_released_or_that_listened_where_this_one_does(
    bus: Bus, address: str
) -> None:
    first = await leader(bus, "127.0.0.1:1")
    if address == "127.0.0.1:2":
        await first.release()
        with pytest.raises(NotLeader):
            await write(first, a=b"1")
    second = await leader(bus, address)
    assert not await write(second, a=b"2")


async def test_after_an_outage_of_nats_the_leader_goes_on_and_nobody_takes_its_place(
    nats_server: NatsServer,
) -> None:
    async with (
        open_bus(nats_server.url, "leader") as bus,
        open_bus(nats_server.url, "other") as other_bus,
    ):
        lease = await leader(bus, "127.0.0.1:1", ttl_s=TTL_S)
        renewing = asyncio.create_task(lease.keep())
        other, stands_by = await Lease.open(other_bus, TTL_S), asyncio.Event()
        take = asyncio.create_task(other.take("127.0.0.1:2", stands_by))
        await stands_by.wait()
        for _ in range(2):
            nats_server.kill()
            await asyncio.sleep(2 * TTL_S)
            assert not lease.is_held, "it cannot know"
            nats_server.start()
            await asyncio.wait_for(lease.until_held(), WAIT_S)
            await asyncio.sleep(2 * TTL_S)
            await asyncio.wait_for(lease.until_held(), WAIT_S)
        assert not take.done() and not renewing.done() and lease.is_held
        assert not await write(lease, a=b"1")
        for task in (take, renewing):
            task.cancel()


def test_only_time_in_which_the_lease_was_looked_at_counts_as_silence() -> None:
    silence = Silence()
    assert silence.look(7, 0.0) == 0.0
    assert silence.look(7, 0.5) == 0.5
    assert silence.look(7, 60.0) == 0.5 + LONGEST_GAP_S, "this process stood still"
    assert silence.look(8, 60.5) == 0.0, "a renewal"
    assert silence.look(8, 61.0) == 0.5
    silence.forget()
    assert silence.look(8, 61.5) == 0.0, "NATS was away"
