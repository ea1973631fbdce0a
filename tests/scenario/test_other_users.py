"""What another user of the machine can do with a mesh that root runs: what docs/security.md says,
and no more. `tests/engine/commands/test_tutorial.py` tries the port of a real engine, and
`test_cli_ray.py` a mesh on a Ray cluster."""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from support.cli import TreadleProcess
from support.other_user import (
    address_of,
    below,
    files_of,
    listeners_of,
    needs_root,
    require_closed_files,
    require_console,
    require_gateway,
    require_grpc,
    require_nats,
    require_quiet_processes,
)

pytestmark = needs_root
RUN_S = 120.0


class LocalMesh:
    """A mesh of `treadle up --engines 0`, in a folder that every user may enter. where: what --json
    prints. run: the folder of its files. processes: those of root."""

    def __init__(self, folder: Path, *options: str) -> None:
        temporary = folder / "tmp"
        temporary.mkdir()
        temporary.chmod(0o1777)
        before = set(Path("/dev/shm").glob("treadle-*"))
        self.process = TreadleProcess(
            ["up", "--engines", "0", "--port", "0", "--json", *options],
            folder,
            {"TMPDIR": str(temporary)},
            patience_s=RUN_S,
        )
        self.process.until(lambda: '{"scheduler"' in self.process.text())
        [line] = [each for each in self.process.text().splitlines() if each.startswith("{")]
        self.where: dict[str, Any] = json.loads(line)
        kv = set(Path("/dev/shm").glob("treadle-*")) - before
        [self.run] = (folder / "runs").iterdir()
        self.folders = [folder / "runs", *temporary.iterdir(), *kv]
        # a sandbox is another user, in namespaces of its own
        self.processes: list[psutil.Process] = [
            each for each in self.process.everyone() if each.uids().real == os.geteuid()
        ]

    @property
    def certificates(self) -> Path | None:
        """Of a secure mesh."""
        return self.run / "state/certificates" if "api_key" in self.where else None


@pytest.fixture(scope="module", params=[(), ("--secure",)], ids=["plaintext", "secure"])
def mesh(request: pytest.FixtureRequest) -> Iterator[LocalMesh]:
    folder = Path(tempfile.mkdtemp(prefix="tr-"))
    folder.chmod(0o755)
    made = None
    try:
        made = LocalMesh(folder, *request.param)
        yield made
        made.process.send(signal.SIGINT)
        made.process.wait()
    finally:
        if made is not None:
            made.process.end()
        shutil.rmtree(folder, ignore_errors=True)


def test_no_file_of_a_mesh_is_anybody_elses(mesh: LocalMesh) -> None:
    paths = files_of(mesh.processes, *mesh.folders) - {mesh.process.screen}
    names = {path.name for path in paths}
    assert {"nats.conf", "nats.log", "control-plane.log", "sglang.yaml"} <= names
    assert (mesh.certificates is not None) == ("ca.key" in names)
    require_closed_files(paths)


def test_command_lines_hold_no_secret_and_processes_are_closed(mesh: LocalMesh) -> None:
    nats, page = urlsplit(mesh.where["nats"]), urlsplit(mesh.where["console"])
    engine_key = json.loads((mesh.run / "state/sglang.yaml").read_text().partition("key: ")[2])
    secrets = [engine_key, page.query.removeprefix("token="), nats.password]
    secrets = [each for each in (*secrets, mesh.where.get("api_key")) if each]
    assert len(secrets) == 3
    lines = require_quiet_processes([process.pid for process in mesh.processes], secrets)
    assert len(lines) >= 5 and any("nats-server" in line for line in lines)
    logs = [path.read_text() for path in below(mesh.run) if path.suffix == ".log"]
    assert logs and not [secret for log in logs for secret in secrets if secret in log]


def test_grpc_ports_are_open_in_plaintext_and_need_a_certificate_else(mesh: LocalMesh) -> None:
    others = {address_of(mesh.where[name]) for name in ("nats", "gateway", "console")}
    servers = set(listeners_of(mesh.processes)) - others
    named = {address_of(f"//{mesh.where[name]}") for name in ("scheduler", "tools", "rollout")}
    assert named <= servers and len(servers) >= 8
    require_grpc(servers, mesh.certificates)


def test_nats_takes_nobody_without_its_password_or_a_certificate(mesh: LocalMesh) -> None:
    require_nats(mesh.where["nats"])


def test_the_console_lets_in_who_has_its_token(mesh: LocalMesh) -> None:
    require_console(mesh.where["console"])


def test_the_gateway_is_open_in_plaintext_and_needs_its_key_else(mesh: LocalMesh) -> None:
    require_gateway(mesh.where["gateway"], mesh.where.get("api_key", ""))
