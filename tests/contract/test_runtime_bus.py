"""The bus against a real nats-server: nothing accepted is lost, nothing is handled twice."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import nats.js.errors
import pytest
from structlog.testing import capture_logs
from support.conditions import until
from support.nats_server import NatsServer
from support.processes import hold_still
from support.sandbox import need_sandbox
from treadle.telemetry.v1.facts_pb2 import EngineLost, Fact, StepFinished, StepRef
from treadle_runtime import bus as bus_module
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import ANSWER_TIMEOUT_S, SILENT, Bus, open_bus
from treadle_runtime.errors import StartError
from treadle_runtime.facts import STREAM, make_fact

SMALL_DISK = 4 * 1024 * 1024


def lost(engine_id: str) -> Fact:
    """A small fact."""
    return make_fact("test", engine_lost=EngineLost(engine_id=engine_id))


class Ear:
    """A handler that remembers; it fails as often as told for an engine_id."""

    def __init__(self, failures: dict[str, int] | None = None) -> None:
        self.heard: list[str] = []
        self.tries: list[str] = []
        self._failures = dict(failures or {})

    async def __call__(self, fact: Fact) -> None:
        engine_id = fact.engine_lost.engine_id
        self.tries.append(engine_id)
        if self._failures.get(engine_id, 0) > 0:
            self._failures[engine_id] -= 1
            raise RuntimeError("not this time")
        self.heard.append(engine_id)


async def test_facts_arrive_in_order_at_who_asked_for_their_kind(bus: Bus) -> None:
    ear, others = Ear(), Ear()
    await bus.subscribe(["engine_lost"], ear)
    await bus.subscribe(["step_queued", "step_started"], others)
    for index in range(200):
        await bus.publish(lost(str(index)))
    step = StepFinished(step=StepRef(trajectory_id="t"))
    await bus.publish(make_fact("test", step_finished=step))
    await until(lambda: len(ear.heard) == 200)

    assert ear.heard == [str(index) for index in range(200)]
    assert others.heard == []


async def test_a_fact_published_twice_is_handled_once(nats_url: str) -> None:
    ear = Ear()
    fact = lost("once")
    async with open_bus(nats_url, "a") as bus, open_bus(nats_url, "b") as other:
        await bus.subscribe([], ear)
        await bus.publish(fact)
        await bus.publish(fact)
        await other.publish(fact)
        await bus.flush()
        await other.flush()
        await bus.publish(lost("last"))
        await until(lambda: "last" in ear.heard)
    assert ear.heard == ["once", "last"]


async def test_a_server_that_answers_late_does_not_end_a_service_at_its_start(
    tmp_path: Path,
) -> None:
    """nats-server stands still for longer than one request waits, as on a machine that has too much
    to do."""
    server, ear = NatsServer(tmp_path), Ear()
    server.start()
    try:
        async with open_bus(server.url, "a") as bus:
            hold_still(server.pid)
            async with asyncio.TaskGroup() as group:
                group.create_task(bus.subscribe([], ear, durable="a"))
                bucket = group.create_task(bus.key_value("late"))
                await asyncio.sleep(1.5 * ANSWER_TIMEOUT_S)
                os.kill(server.pid, signal.SIGCONT)
            await bus.publish(lost("0"))
            await bucket.result().put("key", b"value")
            await until(lambda: ear.heard == ["0"])
            assert [entry.value for entry in await entries_of(bucket.result())] == [b"value"]
    finally:
        server.kill()


async def test_without_replay_a_subscriber_hears_what_comes_with_it_what_came(bus: Bus) -> None:
    late, historian = Ear(), Ear()
    await bus.publish(lost("before"))
    await bus.flush()
    await bus.subscribe(["engine_lost"], late)
    await bus.subscribe(["engine_lost"], historian, replay=True)
    await bus.publish(lost("after"))
    await until(lambda: late.heard and len(historian.heard) == 2)

    assert late.heard == ["after"]
    assert historian.heard == ["before", "after"]


async def test_a_durable_subscriber_goes_on_where_it_left(nats_url: str) -> None:
    first, second = Ear(), Ear()
    async with open_bus(nats_url, "test") as bus:
        await bus.subscribe(["engine_lost"], first, durable="loom")
        await bus.publish(lost("heard"))
        await until(lambda: first.heard == ["heard"])
    async with open_bus(nats_url, "other") as bus:
        await bus.publish(lost("meanwhile"))
    async with open_bus(nats_url, "test") as bus:
        await bus.subscribe(["engine_lost", "engine_joined"], second, durable="loom")
        await bus.publish(lost("afterwards"))
        await until(lambda: len(second.heard) == 2)
    assert second.heard == ["meanwhile", "afterwards"]


async def test_facts_that_a_dead_subscriber_had_not_acknowledged_come_at_once_to_its_successor(
    nats_url: str,
) -> None:
    """The first life hangs in its first fact and ends; the others were sent to it and are not
    acknowledged.

    Result: the second life hears all of them long before the 30 s after which the server would send
    them again.
    """
    hanging = asyncio.Event()

    async def hang(fact: Fact) -> None:
        hanging.set()
        await asyncio.Event().wait()

    second = Ear()
    async with open_bus(nats_url, "test") as bus:
        await bus.subscribe(["engine_lost"], hang, durable="loom")
        for index in range(5):
            await bus.publish(lost(str(index)))
        await hanging.wait()
    async with open_bus(nats_url, "test") as bus:
        await bus.subscribe(["engine_lost"], second, durable="loom")
        await until(lambda: len(second.heard) == 5, within_s=10)
    assert second.heard == [str(index) for index in range(5)]


async def test_facts_come_at_once_to_the_successor_of_a_subscriber_that_hangs(
    nats_url: str,
) -> None:
    """The first one is connected all the time, receives everything and acknowledges nothing."""
    received: list[Fact] = []

    async def hang(fact: Fact) -> None:
        received.append(fact)
        await asyncio.Event().wait()

    second = Ear()
    async with open_bus(nats_url, "hangs") as hangs, open_bus(nats_url, "test") as bus:
        await hangs.subscribe(["engine_lost"], hang, durable="loom")
        for index in range(5):
            await bus.publish(lost(str(index)))
        await until(lambda: len(received) == 5)
        await bus.subscribe(["engine_lost"], second, durable="loom")
        await until(lambda: len(second.heard) == 5, within_s=10)
    assert second.heard == [str(index) for index in range(5)]


async def test_a_handler_that_fails_gets_the_fact_again_a_bounded_number_of_times(bus: Bus) -> None:
    ear = Ear(failures={"shaky": 2, "hopeless": 1000})
    await bus.subscribe(["engine_lost"], ear)
    for name in ("shaky", "hopeless", "fine"):
        await bus.publish(lost(name))
    await until(lambda: set(ear.heard) == {"shaky", "fine"} and ear.tries.count("hopeless") == 5)
    await bus.publish(lost("later"))
    await until(lambda: "later" in ear.heard)

    assert ear.tries.count("shaky") == 3
    assert ear.tries.count("hopeless") == 5
    assert ear.heard.count("fine") == 1


async def test_a_handler_that_has_not_returned_delays_no_later_fact(bus: Bus) -> None:
    """The handler of the first fact waits until the second is handled.

    Result: both are handled, and only then no fact is unacknowledged.
    """
    heard: list[str] = []
    second = asyncio.Event()

    async def handle(fact: Fact) -> None:
        heard.append(fact.engine_lost.engine_id)
        if len(heard) == 1:
            await second.wait()
        second.set()

    await bus.subscribe(["engine_lost"], handle, durable="loom")
    await bus.publish(lost("first"))
    await bus.publish(lost("second"))
    step = StepFinished(step=StepRef(trajectory_id="t"))  # the last fact is of another kind
    await bus.publish(make_fact("test", step_finished=step))
    async with asyncio.timeout(10):
        await bus.flush()
        await bus.catch_up()
    assert heard == ["first", "second"]


async def test_a_fact_under_the_subject_of_another_kind_is_dropped(bus: Bus) -> None:
    """NATS knows who may publish under a subject; what a message says of itself is not checked."""
    ear = Ear()
    await bus.subscribe([], ear)
    forged = lost("forged").SerializeToString()
    await bus.jetstream.publish("treadle.facts.tool-started.forged", forged)
    await bus.publish(lost("true"))
    await until(lambda: ear.tries)
    assert ear.heard == ["true"]


@pytest.mark.parametrize("durable", [None, "loom"])
async def test_a_killed_nats_server_that_comes_back_costs_no_fact(
    nats_server: NatsServer, durable: str | None
) -> None:
    """Facts are published before, during and after the server's death by SIGKILL.

    Result: each is handled exactly once, in order; publishing never waited for the server.
    """
    ear = Ear()
    async with open_bus(nats_server.url, "test") as bus:
        await bus.subscribe(["engine_lost"], ear, durable=durable)
        for index in range(50):
            await bus.publish(lost(str(index)))
        await until(lambda: ear.heard)
        nats_server.kill()
        for index in range(50, 100):
            async with asyncio.timeout(5):
                await bus.publish(lost(str(index)))
        nats_server.start()
        for index in range(100, 150):
            await bus.publish(lost(str(index)))
        await bus.flush()
        await until(lambda: len(ear.heard) >= 150)
    assert ear.heard == [str(index) for index in range(150)]


async def test_a_nats_server_that_lost_its_store_is_given_the_stream_again(
    nats_server: NatsServer,
) -> None:
    ear = Ear()
    async with open_bus(nats_server.url, "test") as bus:
        await bus.subscribe(["engine_lost"], ear)
        await bus.publish(lost("before"))
        await until(lambda: ear.heard == ["before"])
        nats_server.kill()
        nats_server.forget()
        await bus.publish(lost("after"))
        nats_server.start()
        await until(lambda: ear.heard == ["before", "after"])


async def test_leaving_the_bus_sends_what_was_accepted(nats_url: str) -> None:
    ear = Ear()
    async with open_bus(nats_url, "first") as bus:
        for index in range(500):
            await bus.publish(lost(str(index)))
    async with open_bus(nats_url, "second") as bus:
        await bus.subscribe([], ear, replay=True)
        await until(lambda: len(ear.heard) == 500)


async def test_a_fact_that_cannot_be_sent_is_refused_when_it_is_published(bus: Bus) -> None:
    with pytest.raises(ValueError, match="bytes"):
        await bus.publish(lost("x" * (bus.max_payload_bytes + 1)))
    with pytest.raises(ValueError, match="subject"):
        await bus.publish(lost("x" * 4096))
    with pytest.raises(ValueError, match="fact_id"):
        await bus.publish(Fact(engine_lost=EngineLost()))
    with pytest.raises(ValueError, match="no such kind"):
        await bus.subscribe(["engine_eaten"], Ear())


async def test_a_bucket_is_made_once_and_shared(nats_url: str) -> None:
    async def opened(bus: Bus) -> None:
        await bus.key_value("shared", ttl_s=60)

    async with open_bus(nats_url, "a") as a, open_bus(nats_url, "b") as b:
        await asyncio.gather(*(opened(bus) for bus in (a, b, a, b)))
        await (await a.key_value("shared", ttl_s=60)).put("k", b"v")
        entry = await (await b.key_value("shared", ttl_s=120)).get("k")
    assert entry.value == b"v"


async def test_keys_written_together_hold_their_values_and_say_what_failed(bus: Bus) -> None:
    bucket = await bus.key_value("b")
    await bucket.put("gone", b"v")
    assert await bus.write_entries("b", {"k": b"v", "gone": None, "empty": b""}) == {}
    assert {entry.key: entry.value for entry in await entries_of(bucket)} == {
        "k": b"v",
        "empty": b"",
    }
    failed = await bus.write_entries("b", {"k": b"w", "large": bytes(bus.max_payload_bytes + 1)})
    assert list(failed) == ["large"] and (await bucket.get("k")).value == b"w"


async def test_no_nats_is_a_start_error_that_says_where(nats_server: NatsServer) -> None:
    nats_server.kill()
    with pytest.raises(StartError, match=nats_server.url):
        async with open_bus(nats_server.url, "test", timeout_s=0.3):
            raise AssertionError("not reached")


async def test_the_oldest_facts_are_discarded_beyond_the_bound_of_the_stream(nats_url: str) -> None:
    """64 KiB hold some of 2,000 facts. A process that names no bound, such as a command, changes
    nothing."""
    ear, bound = Ear(), 64 * 1024
    async with (
        open_bus(nats_url, "service", facts_bytes=bound) as bus,
        open_bus(nats_url, "command") as other,
    ):
        for index in range(2000):
            await bus.publish(lost(str(index)))
        await bus.flush()
        await other.subscribe([], ear, replay=True)
        await other.catch_up()
        state = (await other.jetstream.stream_info(STREAM)).state
    assert ear.heard == [str(index) for index in range(2000 - state.messages, 2000)]
    assert 0 < state.messages < 2000 and state.bytes <= bound


async def test_a_bucket_with_a_bound_refuses_what_is_beyond_it_and_loses_nothing(bus: Bus) -> None:
    """A bucket without a bound gets one that its values exceed, and then one that has room
    again."""
    bucket = await bus.key_value("b")
    await bucket.put("old", b"x" * 10_000)
    bucket = await bus.key_value("b", max_bytes=5_000)
    with pytest.raises(nats.js.errors.ServiceUnavailableError):
        await bucket.put("new", b"y")
    assert (await bucket.get("old")).value == b"x" * 10_000
    bucket = await bus.key_value("b", max_bytes=20_000)
    await bucket.put("new", b"y")


async def test_bounds_that_jetstream_cannot_reserve_are_start_errors_that_say_what_to_do(
    tmp_path: Path,
) -> None:
    server = NatsServer(tmp_path / "small", max_file_store=1024 * 1024)
    server.start()
    try:
        with pytest.raises(StartError, match=r"TREADLE_FACTS_BYTES=9999999 .*max_file_store"):
            async with open_bus(server.url, "test", facts_bytes=9_999_999):
                raise AssertionError("not reached")
        async with open_bus(server.url, "test", facts_bytes=500_000) as bus:
            with pytest.raises(StartError, match=r"9999999 bytes for bucket b .*max_file_store"):
                await bus.key_value("b", max_bytes=9_999_999)
    finally:
        server.kill()


async def test_a_full_disk_is_named_once_until_nats_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NATS answers requests, and stores nothing in a stream that met the full disk, also once there
    is space. After its restart all facts arrive."""
    need_sandbox()
    monkeypatch.setattr(bus_module, "SILENT_S", 0.5)
    monkeypatch.setattr(bus_module, "ANSWER_TIMEOUT_S", 0.3)
    server, ear = NatsServer(tmp_path, store_bytes=SMALL_DISK), Ear()
    server.start()
    try:
        with capture_logs() as logs:
            async with open_bus(server.url, "test") as bus:
                await bus.subscribe([], ear)
                await bus.publish(lost("before"))
                await until(lambda: ear.heard == ["before"])
                fill = server.store / "fill"
                with suppress(OSError), fill.open("wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass
                facts = [str(number) for number in range(50)]
                for each in facts:  # more than the block that the stream has begun may still hold
                    fact = lost(each)
                    fact.source = "x" * 4096
                    await bus.publish(fact)
                await until(lambda: not bus.connected)
                fill.unlink()
                server.kill()
                server.start()
                await bus.flush()
                await until(lambda: set(ear.heard) >= set(facts))
                assert bus.connected
        named = [each for each in logs if each["event"] == SILENT]
        assert [each["asked"] for each in named] == [["treadle.facts"]]
    finally:
        server.kill()


async def test_a_server_that_dies_while_a_process_ends_raises_nothing(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process drains as the server stands still, dies, or has died. Each comes to its end in a
    bounded time, and what it could not send is in its log."""
    monkeypatch.setattr(bus_module, "CLOSE_TIMEOUT_S", 0.3)
    for how in ("stands still", "dies", "has died"):
        with capture_logs() as logs:
            async with asyncio.timeout(10), open_bus(nats_server.url, "test") as bus:
                await bus.subscribe([], Ear(), durable="loom")
                if how == "has died":
                    nats_server.kill()
                else:  # held, so that it does not store the fact before it dies
                    hold_still(nats_server.pid)
                await bus.publish(lost("late"))
                if how == "dies":
                    os.kill(nats_server.pid, signal.SIGKILL)
                await bus.drain(0.2)
        assert [each["facts"] for each in logs if each["log_level"] == "error"] == [1]
        nats_server.kill()
        nats_server.start()
