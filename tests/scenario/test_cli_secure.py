"""`treadle up --secure`, as an operator and a client use it; and no secret where one could read
it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import treadle
from support.cli import TreadleProcess
from support.processes import command_line

RUN_S = 120.0


@pytest.fixture
def up(tmp_path: Path) -> Iterator[TreadleProcess]:
    process = TreadleProcess(
        ["up", "--secure", "--engines", "0", "--port", "0"], tmp_path, patience_s=RUN_S
    )
    yield process
    process.end()


def texts_of(folder: Path, pattern: str) -> list[str]:
    return [path.read_text() for path in folder.rglob(pattern)]


async def test_a_secure_mesh_knows_its_operator_and_its_clients(
    up: TreadleProcess, tmp_path: Path
) -> None:
    up.until(lambda: "Ctrl-C stops everything" in up.text())
    [scheduler] = re.findall(r"^scheduler +(\S+)", up.text(), re.MULTILINE)
    [client] = [tmp_path / found for found in re.findall(r"TREADLE_TLS_FOLDER=(\S+)", up.text())]
    async with treadle.Client(scheduler, tls_folder=client) as known:
        trajectory = await known.open(prompt_id="p", sample=0, prompt=[1, 2, 3])
        assert trajectory.trajectory_id.startswith("default::")
    async with treadle.Client(scheduler, timeouts=treadle.Timeouts(control_s=1.0)) as nobody:
        with pytest.raises(treadle.TreadleError) as raised:
            await nobody.open(prompt_id="p", sample=0, prompt=[1, 2, 3])
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
    operator = client.parent / "operator"
    secrets = {line for key in texts_of(client.parent, "*.key") for line in key.splitlines()[1:-1]}
    assert len(secrets) >= 10
    for folder, code, says in (
        (operator, 0, "{}"),
        (client, 2, "this certificate is of a trainer"),
    ):
        asked = [sys.executable, "-m", "treadle_cli", "apply", "--scheduler", scheduler]
        variables = {**os.environ, "TREADLE_TLS_FOLDER": str(folder)}
        shown = await asyncio.to_thread(
            subprocess.run,
            asked,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_S,
        )
        assert (shown.returncode, says in shown.stdout + shown.stderr) == (code, True), shown
    arguments = [command_line(process) for process in up.look()]
    up.send(signal.SIGINT)
    up.wait()
    told = [*arguments, up.text(), *texts_of(tmp_path, "*.log")]
    assert not [
        secret for secret in secrets for text in told if secret in text or "PRIVATE KEY" in text
    ]
    assert not texts_of(tmp_path, "*.key"), "the keys went with the mesh"
