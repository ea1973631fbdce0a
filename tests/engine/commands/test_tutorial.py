"""The tutorial as a newcomer follows it: its own commands, in its order, with a real engine."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import TreadleProcess
from support.other_user import as_other_user, ask, listeners_of, require_quiet_processes
from support.pages import ROOT, find_commands

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands need curl"),
]

UP, ADDRESSES = ".venv/bin/treadle up ", ("scheduler", "gateway", "Console:")
COMMAND_S = 400.0


@pytest.fixture
def commands() -> list[str]:
    """Of the page, without those that install something."""
    shown = find_commands((ROOT / "docs/tutorial.md").read_text())
    return [
        command for command in shown if not re.search(r"\bmake setup$|\bpip install\b", command)
    ]


@pytest.fixture
def mesh(commands: list[str], tmp_path: Path) -> Iterator[TreadleProcess]:
    """What the page starts first, on free ports."""
    [started] = [command.removeprefix(UP) for command in commands if command.startswith(UP)]
    process = TreadleProcess(
        ["up", *started.split(), "--port", "0"], tmp_path, patience_s=COMMAND_S
    )
    yield process
    process.end()


def read_console(url: str) -> dict[str, Any]:
    """What a page is told first, of all that the console knows. url: with the token."""
    with urllib.request.urlopen(url.replace("/?", "/api/events?"), timeout=COMMAND_S) as stream:
        line = next(line for line in stream if line.startswith(b"data: "))
    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return found


def require_closed_engine(mesh: TreadleProcess, gateway: str) -> None:
    """SGLang answers another user what a probe asks, and nothing else; its key is on no command
    line, and in no answer of the gateway."""
    processes = [each for each in mesh.everyone() if each.uids().real == os.geteuid()]
    (config,) = (mesh.folder / "runs").glob("*/state/sglang.yaml")
    (key,) = re.findall(r'api-key: "(\S+)"', config.read_text())
    lines = require_quiet_processes([process.pid for process in processes], [key])
    listening = listeners_of(processes)
    (at,) = [at for at, line in listening.items() if "sglang.launch_server" in line]
    (line,) = [line for line in lines if "sglang.launch_server" in line]
    (rendezvous,) = re.findall(r"--nccl-port (\d+)", line)
    assert int(rendezvous) not in [port for _, port in listening], "its processes meet at a file"
    asked = {"/health": "GET", "/server_info": "GET", "/generate": "POST", "/flush_cache": "POST"}
    found = as_other_user(lambda: [ask(at, path, method=how)[0] for path, how in asked.items()])
    assert found == [200, 401, 401, 401]
    with urllib.request.urlopen(f"{gateway}/server_info", timeout=COMMAND_S) as told:
        assert key not in told.read().decode()


def test_every_command_of_the_tutorial_does_what_the_page_says(
    mesh: TreadleProcess, commands: list[str], tmp_path: Path
) -> None:
    mesh.until(lambda: "Ctrl-C stops everything" in mesh.text())
    [scheduler, gateway, console] = [
        re.findall(rf"^{name} +((?:http://)?127\S+)", mesh.text(), re.MULTILINE)[0]
        for name in ADDRESSES
    ]
    told: dict[str, str] = {"TRAJECTORY_ID": "", "RUN_ID": ""}

    def play(command: str) -> str:
        """The output of a command of the page, on this mesh."""
        for name, value in told.items():
            command = command.replace(name, value)
        command = command.replace("http://127.0.0.1:7409", gateway).replace(
            "examples/", f"{ROOT}/examples/"
        )
        command = command.replace(".venv/bin/python", sys.executable)
        command = command.replace(".venv/bin/treadle", f"{sys.executable} -m treadle_cli")
        command += {"quickstart": f" {scheduler}", "chat": f" {gateway}"}.get(
            Path(command).stem, ""
        )
        command += (
            f" --scheduler {scheduler}"
            if re.search(r"treadle_cli (rollout|explain)", command)
            else ""
        )
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "160"},
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    before = {entry.name for entry in (tmp_path / "runs").iterdir()}
    health, generate, chat, quickstart, rollout, explain, trace = [
        c for c in commands if not c.startswith(UP)
    ]
    assert json.loads(play(health))["mesh"] == "there"
    answer = json.loads(play(generate))
    assert len(answer["output_ids"]) <= 16 and answer["text"]
    told["TRAJECTORY_ID"] = answer["meta_info"]["trajectory_id"]
    if os.geteuid() == 0:
        require_closed_engine(mesh, gateway)
    assert [line.split(" -> ")[0] for line in play(chat).splitlines() if " -> " in line] == [
        "Name a colour.",
        "Name another one.",
    ]
    assert len([line for line in play(quickstart).splitlines() if " finished: " in line]) == 4
    play(rollout)
    [told["RUN_ID"]] = {entry.name for entry in (tmp_path / "runs").iterdir()} - before
    assert (tmp_path / "runs" / told["RUN_ID"] / "report.html").is_file()
    shown = read_console(console)
    assert told["TRAJECTORY_ID"] in shown["rows"]["id"], (
        "what was sent before the page was opened is there"
    )
    assert len([rollout for rollout in shown["rollouts"] if rollout["trajectories"] == 4]) == 2
    ledger = play(explain)
    assert "decode" in ledger and "ticket" in ledger
    assert "slices" in play(trace) and json.loads((tmp_path / "trace.json").read_text())
    mesh.send(signal.SIGINT)
    assert mesh.wait() == 130
    assert mesh.left_over() == []
