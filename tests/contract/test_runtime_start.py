"""`python -m treadle_runtime.start`: the command of the images."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.conditions import until
from support.processes import ServiceProcess, start_process


def start(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treadle_runtime.start"]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )


def test_it_starts_the_service_that_is_named() -> None:
    """A setting that is refused shows that the service read its settings."""
    ended = start(TREADLE_SERVICE="placement", TREADLE_PLACEMENT_LISTEN="nowhere")
    assert (ended.returncode, "TREADLE_PLACEMENT_LISTEN" in ended.stderr) == (2, True)


def test_a_missing_service_is_said() -> None:
    ended = start(TREADLE_SERVICE="")
    assert (ended.returncode, "TREADLE_SERVICE must name services" in ended.stderr) == (1, True)


HOSTED = ("placement", "predictor", "rollout")


def start_hosted(nats_url: str, folder: Path, **variables: str) -> ServiceProcess:
    """Several services in one process; each writes a ready file of its own, and the last one's says
    that all serve."""
    own = {f"TREADLE_{name.upper()}_LISTEN": "127.0.0.1:0" for name in HOSTED}
    files = {f"TREADLE_{name.upper()}_READY_FILE": str(folder / f"{name}.json") for name in HOSTED}
    env = {
        "TREADLE_SERVICE": ",".join(HOSTED),
        "TREADLE_NATS_URL": nats_url,
        **own,
        **files,
        **variables,
    }
    return start_process("treadle_runtime.start", "host", env, folder)


async def test_several_services_share_a_process_and_each_serves_at_its_own_port(
    nats_url: str, tmp_path: Path
) -> None:
    process = start_hosted(nats_url, tmp_path)
    try:
        ready = [tmp_path / f"{name}.json" for name in HOSTED]
        await until(lambda: all(file.exists() for file in ready), 60.0, process.stderr_text())
        found = [json.loads(file.read_text()) for file in ready]
        assert {each["pid"] for each in found} == {process.pid}
        for name, each in zip(HOSTED, found, strict=True):
            async with grpc.aio.insecure_channel(each["address"]) as channel:
                service = f"treadle.{name}.v1.{name.capitalize()}Service"
                request = health_pb2.HealthCheckRequest(service=service)
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.terminate()
        assert await process.wait() == 0
        for name in HOSTED:
            assert f'"event": "draining", "level": "info", "service": "{name}"' in _sorted_lines(
                process
            )
    finally:
        await process.end()


async def test_where_one_of_several_services_cannot_start_the_process_says_which_and_ends(
    nats_url: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start_hosted(nats_url, tmp_path, TREADLE_ROLLOUT_LISTEN=address)
        assert await process.wait() == 1
    assert f"treadle_rollout: cannot listen on {address}" in process.stderr_text()


def test_a_service_that_is_not_installed_is_named_with_how_to_install_it() -> None:
    ended = start(TREADLE_SERVICE="placement,nothing")
    assert (ended.returncode, "pip install 'treadle[nothing]'" in ended.stderr) == (1, True)


def _sorted_lines(process: ServiceProcess) -> str:
    """The process's log with the keys of each line in order."""
    lines = filter(lambda line: line.startswith("{"), process.stderr_text().splitlines())
    chosen = (
        {key: json.loads(line).get(key) for key in ("event", "level", "service")} for line in lines
    )
    return "\n".join(json.dumps(each, sort_keys=True) for each in chosen)
