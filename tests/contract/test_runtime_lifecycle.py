"""The life of a service as a real process: it starts, or says why not; SIGTERM drains it."""

import asyncio
import json
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.conditions import until
from support.facts import hear
from support.nats_server import NatsServer
from support.probe_service import PROBE, ProbeSettings, plan, wire
from support.processes import StartService, hold_still, start_process
from support.rpc import refusal_of
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.placement.v1 import placement_pb2_grpc
from treadle_runtime.bus import Bus
from treadle_runtime.server import Runtime, Wiring, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_sigterm_lets_a_call_in_flight_finish_and_turns_health_to_not_serving(
    start_service: StartService, bus: Bus
) -> None:
    """A call of 5 s is under way and a health watch is open when SIGTERM comes.

    Result: the watch sees NOT_SERVING, the call gets its answer, the fact it published at its very
    end is in the stream, new calls are refused, the exit code is 0.
    """
    process = await start_service(PROBE, {"TREADLE_PROBE_SLOW_S": "5"}, service="probe")
    async with grpc.aio.insecure_channel(process.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in (
            "",
            "treadle.placement.v1.PlacementService",
            "treadle.migrator.v1.MigratorService",
        ):
            check = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert check.status == SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert (await watch.read()).status == SERVING
        stub = placement_pb2_grpc.PlacementServiceStub(channel)
        slow = stub.PlanPlacement(plan("slow"), timeout=30)
        answer = asyncio.ensure_future(slow)
        await until(lambda: "slow call begins" in process.stderr_text())

        process.terminate()

        assert (await watch.read()).status == NOT_SERVING
        assert not answer.done()
        await answer
        assert await slow.code() is grpc.StatusCode.OK
        assert await process.wait() == 0
        refused = await refusal_of(stub.PlanPlacement(plan("slow"), timeout=5))
        assert refused.code is grpc.StatusCode.UNAVAILABLE

    heard = await hear(bus, "engine_lost", replay=True)
    await until(lambda: [fact.engine_id for fact in heard] == ["slow"])


async def test_thousands_of_calls_at_once_wait_and_are_answered(
    start_service: StartService,
) -> None:
    """They come while the process stands still. Result: no call is cancelled."""
    process = await start_service(PROBE, {}, service="probe")
    async with grpc.aio.insecure_channel(process.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        hold_still(process.pid)
        calls = [health.Check(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(4000)]
        await asyncio.sleep(0.5)
        os.kill(process.pid, signal.SIGCONT)
        answers = await asyncio.gather(*calls)
    assert {answer.status for answer in answers} == {SERVING}


async def test_a_call_that_outlasts_the_grace_is_cut_and_the_process_ends_all_the_same(
    start_service: StartService,
) -> None:
    env = {"TREADLE_PROBE_SLOW_S": "600", "TREADLE_PROBE_DRAIN_GRACE_S": "0.2"}
    process = await start_service(PROBE, env, service="probe")
    async with grpc.aio.insecure_channel(process.address) as channel:
        slow = placement_pb2_grpc.PlacementServiceStub(channel).PlanPlacement(
            plan("slow"), timeout=60
        )
        await until(lambda: "slow call begins" in process.stderr_text())
        process.terminate()
        assert await slow.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert await process.wait() == 0


async def test_a_second_signal_ends_the_process_at_once(start_service: StartService) -> None:
    env = {"TREADLE_PROBE_SLOW_S": "600", "TREADLE_PROBE_DRAIN_GRACE_S": "600"}
    process = await start_service(PROBE, env, service="probe")
    async with grpc.aio.insecure_channel(process.address) as channel:
        slow = placement_pb2_grpc.PlacementServiceStub(channel).PlanPlacement(
            plan("slow"), timeout=60
        )
        await until(lambda: "slow call begins" in process.stderr_text())
        os.kill(process.pid, signal.SIGINT)
        await until(lambda: "draining" in process.stderr_text())
        process.terminate()
        assert await process.wait() == 128 + signal.SIGTERM
        assert await slow.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_watch_is_sent_away_at_drain_rather_than_waited_for(nats_url: str) -> None:
    settings = ProbeSettings(nats_url=nats_url, drain_grace_s=600)
    async with serving(settings, wire) as server:
        channel = grpc.aio.insecure_channel(server.address)
        watch = migrator_pb2_grpc.MigratorServiceStub(channel).WatchMigration(
            migrator_pb2.WatchMigrationRequest(migration_id="endless")
        )
        await watch.read()
    assert (await refusal_of(watch.read()))[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    await channel.close()


async def test_reflection_names_the_services_and_the_ready_file_the_address(
    start_service: StartService, tmp_path: Path
) -> None:
    process = await start_service(PROBE, service="probe")
    ready = tmp_path / "probe-0" / "ready.json"
    assert json.loads(ready.read_text()) == {"address": process.address, "pid": process.pid}
    async with grpc.aio.insecure_channel(process.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        names = {service.name for service in (await call.read()).list_services_response.service}
    assert {"treadle.placement.v1.PlacementService", "grpc.health.v1.Health"} <= names
    process.terminate()
    assert await process.wait() == 0
    assert not ready.exists()


async def test_a_service_waits_for_nats_and_starts_when_it_comes(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    nats_server.kill()
    process = start_process(
        PROBE, "probe", {"TREADLE_NATS_URL": nats_server.url}, tmp_path / "probe"
    )
    try:
        await until(lambda: "NATS error" in process.stderr_text())
        nats_server.start()
        await process.ready(30)
    finally:
        await process.end()
    assert process.returncode == 0


async def test_sigterm_ends_a_service_that_still_waits_for_nats(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    nats_server.kill()
    process = start_process(
        PROBE, "probe", {"TREADLE_NATS_URL": nats_server.url}, tmp_path / "probe"
    )
    await until(lambda: "NATS error" in process.stderr_text())
    process.terminate()
    assert await process.wait() == 0
    assert "Traceback" not in process.stderr_text()


@pytest.mark.parametrize(
    ("variable", "value", "code", "said"),
    [
        (
            "TREADLE_NATS_URL",
            "nats://127.0.0.1:9",
            1,
            "NATS at {value} did not answer within 0.5 s",
        ),
        ("TREADLE_PROBE_LISTEN", "", 1, "cannot listen on {value}"),
        ("TREADLE_PROBE_SLOW_S", "soon", 2, "TREADLE_PROBE_SLOW_S='soon' is refused: "),
        ("TREADLE_PROBE_BROKEN", "start", 1, "the loom is missing: install a loom"),
    ],
)
async def test_a_service_that_cannot_start_says_why_in_one_line(
    nats_url: str, tmp_path: Path, variable: str, value: str, code: int, said: str
) -> None:
    """NATS is away, the port is taken, a setting is bad, `wire` raises."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        value = value or f"127.0.0.1:{taken.getsockname()[1]}"
        env = {"TREADLE_NATS_URL": nats_url, variable: value}
        if variable == "TREADLE_NATS_URL":
            env["TREADLE_PROBE_STARTUP_TIMEOUT_S"] = "0.5"
        process = start_process(PROBE, "probe", env, tmp_path / "probe")
        assert await process.wait() == code
    text = process.stderr_text()
    assert text.splitlines()[-1].startswith(f"treadle_probe: {said.format(value=value)}")
    assert "Traceback" not in text


async def test_a_background_task_that_fails_ends_the_process_with_its_traceback_in_the_log(
    nats_url: str, tmp_path: Path
) -> None:
    process = start_process(
        PROBE, "probe", {"TREADLE_NATS_URL": nats_url, "TREADLE_PROBE_BROKEN": "task"}, tmp_path
    )
    assert await process.wait() == 3
    logged = [
        json.loads(line) for line in process.stderr_text().splitlines() if line.startswith("{")
    ]
    assert [line["event"] for line in logged if line["level"] == "info"][-1] == "closed"
    assert "the disk is gone" in logged[-1]["exception"]


@pytest.mark.parametrize(
    ("broken", "code", "said"),
    [
        ("close", 0, "a step of the drain did not end in time"),
        ("loop", 4, "the drain takes too long: the process ends now"),
        ("task and loop", 3, "the drain takes too long: the process ends now"),
    ],
)
async def test_a_process_that_was_told_to_end_ends_whatever_hangs(
    nats_url: str, tmp_path: Path, broken: str, code: int, said: str
) -> None:
    """A step of the drain does not end, or the event loop stands still, after SIGTERM or after a
    background task has failed. Result: the process ends with its code, and the log says why."""
    env = {
        "TREADLE_NATS_URL": nats_url,
        "TREADLE_PROBE_BROKEN": broken,
        "TREADLE_PROBE_DRAIN_GRACE_S": "0.1",
    }
    process = start_process(PROBE, "probe", env, tmp_path / "probe")
    if not broken.startswith("task"):
        await process.ready(60)
        process.terminate()
    assert await process.wait() == code
    assert said in process.stderr_text()


async def test_facts_that_nats_never_took_are_named_as_lost_at_the_end(
    start_service: StartService, nats_server: NatsServer
) -> None:
    process = await start_service(
        PROBE, {"TREADLE_PROBE_DRAIN_GRACE_S": "0.3", "TREADLE_PROBE_SLOW_S": "0"}, service="probe"
    )
    nats_server.kill()
    async with grpc.aio.insecure_channel(process.address) as channel:
        await placement_pb2_grpc.PlacementServiceStub(channel).PlanPlacement(
            plan("slow"), timeout=10
        )
    process.terminate()
    assert await process.wait() == 0
    (line,) = [
        json.loads(line) for line in process.stderr_text().splitlines() if "facts are lost" in line
    ]
    assert (line["level"], line["facts"]) == ("error", 1)


async def test_background_tasks_run_until_the_drain(nats_url: str) -> None:
    happened: list[str] = []

    async def patient() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            happened.append("cancelled")

    async def close() -> None:
        happened.append("closed")

    async def wire_with_task(runtime: Runtime) -> Wiring:
        return replace(await wire(runtime), tasks=[patient], close=close)

    async with serving(ProbeSettings(nats_url=nats_url), wire_with_task):
        await asyncio.sleep(0)
    assert happened == ["cancelled", "closed"]


async def test_a_task_ends_where_its_answer_and_the_end_of_the_service_come_together() -> None:
    """nats-py waits for an answer like this; a task that lost its cancellation there ran on after
    the drain."""
    answer = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(asyncio.wait_for(answer, 10.0))
    await asyncio.sleep(0)
    answer.set_result("written")
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
