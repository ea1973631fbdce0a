"""`treadle doctor` on a real mesh, with and without certificates, and on servers that do not
answer."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import output_of
from support.fake_sglang import FakeSglang
from support.nats_server import NatsServer
from support.processes import StartService, free_port
from support.scheduler import SchedulerClient, scheduler_client
from support.secure_mesh import secure_mesh
from treadle.certificates import FOLDER_VARIABLE
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_cli.certs import make_certificates
from treadle_cli.doctor.findings import OK, PROBLEM, WARNING
from treadle_cli.doctor.mesh import check_mesh


async def doctor(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    command = (sys.executable, "-m", "treadle_cli", "doctor", *words, "--json")
    code, said, errors = await output_of(*command, cwd=folder)
    assert said, errors
    return code, json.loads(said)


def of(found: dict[str, Any], subject: str) -> dict[str, dict[str, str]]:
    return {each["check"]: each for each in found["findings"] if each["subject"] == subject}


async def test_a_machine_a_server_and_a_mesh_are_looked_at_in_one_go(
    tmp_path: Path, start_service: StartService, engine: FakeSglang, nats_server: NatsServer
) -> None:
    # nobody renews one of the engines
    settings = {"LISTEN": f"127.0.0.1:{free_port()}", "LEASE_TTL_S": "120"}
    scheduler = await start_service(
        "treadle_scheduler",
        {f"TREADLE_SCHEDULER_{name}": value for name, value in settings.items()},
    )
    code, found = await doctor(tmp_path, engine.url, "--scheduler", scheduler.address)
    mesh = of(found, f"mesh at {scheduler.address}")
    assert code == 1, "a mesh without an engine is a problem"
    assert (
        mesh["engines"]["level"] == PROBLEM and mesh["services"]["says"] == "1 of 1 processes serve"
    )
    assert mesh["tools"]["level"] == WARNING and "TREADLE_SCHEDULER_TOOLS" in mesh["tools"]["do"]
    assert of(found, "this machine")["NATS"]["level"] == OK
    assert of(found, engine.url)["radix cache"]["level"] == OK
    sidecar = {
        "TREADLE_SIDECAR_ENGINE_ID": "e0",
        "TREADLE_SIDECAR_ENGINE_URL": engine.url,
        "TREADLE_SIDECAR_SCHEDULER": scheduler.address,
        "TREADLE_SIDECAR_PROBE_S": "0",
    }
    await start_service("treadle_sidecar", sidecar)
    async with scheduler_client(scheduler.address) as calls:
        await calls.until_registered(1)
        code, found = await doctor(tmp_path, "--scheduler", scheduler.address)
        mesh = of(found, f"mesh at {scheduler.address}")
        assert code == 0, found
        assert mesh["services"]["says"] == "2 of 2 processes serve"
        assert mesh["weights"]["says"] == "all serve 'default'"
        assert mesh["NATS"]["level"] == OK
        await _register_one_that_nobody_serves(calls)
        await calls.call("DrainEngine", pb.DrainEngineRequest(request_id="d", engine_id="e0"))
        code, found = await doctor(tmp_path, "--scheduler", scheduler.address)
        drained = [each["do"] for each in found["findings"] if each["says"] == "is drained"]
        assert drained == ["Use it again: treadle drain e0 --undo."]
        assert (
            code == 1 and of(found, f"mesh at {scheduler.address}")["sidecar"]["level"] == PROBLEM
        )
    nats_server.kill()
    [away] = [each for each in await check_mesh(scheduler.address) if each.check == "NATS"]
    assert away.level == PROBLEM and "scheduler" in away.says and "restart nats-server" in away.do


async def _register_one_that_nobody_serves(calls: SchedulerClient) -> None:
    await calls.register("e1", model="another", address=f"127.0.0.1:{free_port()}")


async def test_nobody_at_an_address_is_a_problem_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, scheduler = f"http://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    code, found = await doctor(tmp_path, server, "--scheduler", scheduler)
    assert code == 1
    assert of(found, server)["answers"]["do"] == "Is the server up at this URL?"
    assert "treadle up" in of(found, f"mesh at {scheduler}")["scheduler"]["do"]
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "nowhere"))
    code, found = await doctor(tmp_path, "--scheduler", scheduler)
    certificate = of(found, f"mesh at {scheduler}")["certificate"]
    assert (
        code == 1
        and "operator's certificate" in certificate["do"]
        and "treadle up" not in certificate["do"]
    )
    monkeypatch.delenv(FOLDER_VARIABLE)
    code, said, errors = await output_of(
        sys.executable, "-m", "treadle_cli", "doctor", "ftp://h", cwd=tmp_path
    )
    assert (code, said) == (2, "") and "must be the URL" in errors


async def test_certificates_are_dated_and_a_stranger_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with secure_mesh(tmp_path / "mesh") as mesh:
        monkeypatch.setenv(FOLDER_VARIABLE, str(mesh.certificates / "operator"))
        found = {each.check: each for each in await check_mesh(mesh.where.scheduler)}
        assert found["certificates of services"].level == OK
        [own] = [each for name, each in found.items() if name.startswith("certificate ")]
        assert own.level == OK and own.says == "good for 90 days"
        assert found["engines"].says.startswith("2 with")
        stranger = make_certificates(tmp_path / "other") / "operator"
        monkeypatch.setenv(FOLDER_VARIABLE, str(stranger))
        [refused] = await check_mesh(mesh.where.scheduler)
        assert refused.level == PROBLEM and "certificate" in refused.says
