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
from support.pages import ROOT, find_commands

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands need curl"),
]

UP, ADDRESSES = ".venv/bin/treadle up ", ("scheduler", "gateway", "console")
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
    """What a page is told first, of all that the console knows."""
    with urllib.request.urlopen(f"{url}/api/events", timeout=COMMAND_S) as stream:
        line = next(line for line in stream if line.startswith(b"data: "))
    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return found


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
