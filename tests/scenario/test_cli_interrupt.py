"""`treadle up` as a real process with real services: whatever ends it, no process is left, and it
says why."""

import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cli import TreadleProcess
from support.processes import command_line, free_port
from support.sandbox import without_bubblewrap_wheel
from treadle_cli.mesh.services import TOGETHER

Start = Callable[..., TreadleProcess]
NO_ENGINE = ("up", "--engines", "0", "--port", "0")

# Stands in for the python of the engine's venv: converts no model, cannot import SGLang for a fork
# server, and is an engine that loads for ever, with a worker.
LOADS_FOR_EVER = "sleep 1000 & sleep 1000"
FAKE_ENGINE_PYTHON = """#!/bin/sh
case "$*" in
*sglang_cpu.model*) echo "$PWD" ;;
*fork_server.py*) exit 1 ;;
*) {engine} ;;
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


def start_with_engine(treadle: Start, folder: Path, engine: str) -> TreadleProcess:
    """A mesh whose one engine is this shell command."""
    fake = folder / "python"
    fake.write_text(FAKE_ENGINE_PYTHON.format(engine=engine))
    fake.chmod(0o755)
    return treadle("up", "--engines", "1", "--port", "0", TREADLE_ENGINE_PYTHON=str(fake))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_nats_and_all_services(
    treadle: Start, tmp_path: Path, number: signal.Signals
) -> None:
    mesh = treadle(*NO_ENGINE, "--kv-folder", str(tmp_path))
    mesh.until(lambda: "Ctrl-C stops everything" in mesh.text())
    (kv_folder,) = tmp_path.glob("treadle-*")
    running = {command_line(process) for process in mesh.look()}
    assert any(f"treadle_runtime.start {' '.join(TOGETHER)}" in command for command in running)
    assert all(
        any(f"treadle_{name}" in command for command in running)
        for name in ("tools", "gateway", "console")
    )
    mesh.send(number)
    assert mesh.wait() == 130
    assert mesh.left_over() == []
    (folder,) = (tmp_path / "runs").iterdir()
    assert [entry.name for entry in folder.iterdir()] == ["logs"]  # no store stays
    assert not kv_folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_while_engines_start_leaves_no_engine_and_no_worker(
    treadle: Start, tmp_path: Path, number: signal.Signals
) -> None:
    mesh = start_with_engine(treadle, tmp_path, LOADS_FOR_EVER)
    mesh.until(lambda: sum("sleep 1000" in command_line(p) for p in mesh.look()) >= 2)
    mesh.send(number)
    assert mesh.wait() == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert mesh.left_over() == []


def test_an_engine_that_dies_while_it_starts_is_shown_with_its_last_words(
    treadle: Start, tmp_path: Path
) -> None:
    mesh = start_with_engine(treadle, tmp_path, "echo no kernels for this machine >&2; exit 3")
    assert mesh.wait() == 1
    assert (
        "engine-0 ended with exit code 3" in mesh.text()
        and "no kernels for this machine" in mesh.text()
    )
    assert mesh.left_over() == []


def test_a_service_that_dies_ends_the_mesh_and_is_named(treadle: Start) -> None:
    mesh = treadle(*NO_ENGINE)
    mesh.until(lambda: "Ctrl-C stops everything" in mesh.text())
    mesh.named("treadle_gateway").kill()
    assert mesh.wait() == 1
    assert "gateway was killed by SIGKILL" in mesh.text()
    assert mesh.left_over() == []


def test_the_process_of_several_services_ends_the_mesh_when_it_dies(treadle: Start) -> None:
    mesh = treadle(*NO_ENGINE)
    mesh.until(lambda: "Ctrl-C stops everything" in mesh.text())
    mesh.named("treadle_runtime.start").kill()
    assert mesh.wait() == 1
    assert "control-plane was killed by SIGKILL" in mesh.text()
    assert mesh.left_over() == []


@pytest.mark.parametrize(
    ("engines", "variable", "says"),
    [
        ("0", "PATH", r"(?s)bubblewrap is not installed.*apt-get install bubblewrap"),
        ("1", "TREADLE_ENGINE_PYTHON", "TREADLE_ENGINE_PYTHON=.* cannot be run"),
    ],
)
def test_without_bubblewrap_or_the_engines_python_it_says_what_to_do_and_starts_nothing(
    treadle: Start, tmp_path: Path, engines: str, variable: str, says: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    environment = {
        "PYTHONPATH": without_bubblewrap_wheel(tmp_path / "modules"),
        variable: str(tools),
    }
    mesh = treadle("up", "--engines", engines, **environment)
    assert mesh.wait() == 2
    assert re.search(says, mesh.text())
    assert not (tmp_path / "runs").exists()


def test_a_taken_port_is_named(treadle: Start) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        mesh = treadle("up", "--engines", "0", "--port", str(port))
        assert mesh.wait() == 2
    assert f"port {port}" in mesh.text() and "is taken" in mesh.text()
