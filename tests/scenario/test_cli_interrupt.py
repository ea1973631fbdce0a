"""`treadle up` as a real process with real services: whatever ends it, no process is left, and it says why."""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cli import TreadleProcess
from support.command_lines import command_line

Start = Callable[..., TreadleProcess]
SERVICES = ("scheduler", "predictor", "placement", "migrator", "tools", "rollout")

# Stands in for the python of the engine's venv: converts no model, and is an engine that loads for ever, with a worker.
FAKE_ENGINE_PYTHON = """#!/bin/sh
case "$*" in
*sglang_cpu.model*) echo "$PWD" ;;
*) sleep 1000 & sleep 1000 ;;
esac
"""


@pytest.fixture
def treadle(tmp_path: Path) -> Iterator[Start]:
    started: list[TreadleProcess] = []

    def start(*arguments: str, **env: str) -> TreadleProcess:
        process = TreadleProcess(list(arguments), tmp_path, env)
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()


def services_up(process: TreadleProcess) -> None:
    process.until(lambda: "Ctrl-C stops everything" in process.text())


def test_ctrl_c_stops_nats_and_all_services(treadle: Start, tmp_path: Path) -> None:
    mesh = treadle("up", "--engines", "0", "--port", "0")
    services_up(mesh)
    running = {command_line(process) for process in mesh.look()}
    assert all(any(f"treadle_{name}" in command for command in running) for name in SERVICES)
    mesh.send(signal.SIGINT)
    assert mesh.wait() == 130
    assert mesh.left_over() == []
    (folder,) = (tmp_path / "runs").iterdir()
    assert [entry.name for entry in folder.iterdir()] == ["logs"]  # no store and no KV pages stay


def test_sigterm_does_the_same(treadle: Start) -> None:
    mesh = treadle("up", "--engines", "0", "--port", "0")
    services_up(mesh)
    mesh.send(signal.SIGTERM)
    assert mesh.wait() == 130
    assert mesh.left_over() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_while_engines_start_leaves_no_engine_and_no_worker(
    treadle: Start, tmp_path: Path, number: signal.Signals
) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE_ENGINE_PYTHON)
    fake.chmod(0o755)
    mesh = treadle("up", "--engines", "1", "--port", "0", TREADLE_ENGINE_PYTHON=str(fake))
    mesh.until(lambda: sum("sleep 1000" in command_line(p) for p in mesh.look()) >= 2)
    mesh.send(number)
    assert mesh.wait() == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert mesh.left_over() == []


def test_an_engine_that_dies_while_it_starts_is_shown_with_its_last_words(treadle: Start, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(
        FAKE_ENGINE_PYTHON.replace("sleep 1000 & sleep 1000", "echo no kernels for this machine >&2; exit 3")
    )
    fake.chmod(0o755)
    mesh = treadle("up", "--engines", "1", "--port", "0", TREADLE_ENGINE_PYTHON=str(fake))
    assert mesh.wait() == 1
    assert "engine-0 ended with exit code 3" in mesh.text() and "no kernels for this machine" in mesh.text()
    assert mesh.left_over() == []


def test_a_service_that_dies_ends_the_mesh_and_is_named(treadle: Start) -> None:
    mesh = treadle("up", "--engines", "0", "--port", "0")
    services_up(mesh)
    mesh.named("treadle_placement").kill()
    assert mesh.wait() == 1
    assert "placement was killed by SIGKILL" in mesh.text()
    assert mesh.left_over() == []


def test_without_bubblewrap_it_says_how_to_install_it_and_starts_nothing(treadle: Start, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    (empty / "apt-get").symlink_to(shutil.which("true") or sys.executable)
    mesh = treadle("up", "--engines", "0", PATH=str(empty))
    assert mesh.wait() == 2
    assert "bubblewrap is not installed" in mesh.text() and "apt-get install -y bubblewrap" in mesh.text()
    assert not (tmp_path / "runs").exists()


def test_without_the_engines_venv_it_names_make_setup(treadle: Start, tmp_path: Path) -> None:
    mesh = treadle("up", "--engines", "1", TREADLE_ENGINE_PYTHON=str(tmp_path / "nowhere"))
    assert mesh.wait() == 2
    assert "TREADLE_ENGINE_PYTHON" in mesh.text()
    assert not (tmp_path / "runs").exists()


def test_a_taken_port_is_named(treadle: Start) -> None:
    first = treadle("up", "--engines", "0", "--port", "17401")
    services_up(first)
    second = treadle("up", "--engines", "0", "--port", "17401")
    assert second.wait() == 2
    assert "port 17401" in second.text() and "is taken" in second.text()
