"""The sandbox's command line and the frames that cross its wall."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from treadle_tools.builtin import FROZEN_LAKE, PYTHON, TOOLS
from treadle_tools.sandbox.bubblewrap import (
    Bubblewrap,
    BubblewrapMissing,
    find_bubblewrap,
    find_code,
    locate_bubblewrap,
)
from treadle_tools.sandbox.inside import content, messages
from treadle_tools.sandbox.inside.content import Content
from treadle_tools.sandbox.sandboxes import NOBODY

SITE = Path(sysconfig.get_path("purelib"))


def binds(command: list[str]) -> set[str]:
    return {
        command[index + 1]
        for index, word in enumerate(command)
        if word in ("--ro-bind", "--bind", "--dev-bind")
    }


@pytest.mark.parametrize("drop_root", [False, True])
def test_the_sandbox_sees_python_and_nothing_else_of_the_host(drop_root: bool) -> None:
    for tool in TOOLS:
        command = list(
            Bubblewrap("/usr/bin/bwrap", "0.8.0", user=None, drop_root=drop_root)
            .recipe(tool)
            .command
        )
        package = Path(sys.modules["treadle_tools"].__path__[0])
        allowed = [Path("/usr"), Path("/lib"), Path("/lib64"), Path(sys.base_prefix), SITE, package]
        for bind in map(Path, binds(command)):
            assert any(bind.is_relative_to(folder) for folder in allowed), bind
        assert "--bind" not in command
        flags = {
            "--unshare-net",
            "--unshare-pid",
            "--unshare-ipc",
            "--die-with-parent",
            "--new-session",
            "--clearenv",
        }
        assert flags <= set(command)
        assert ("--unshare-user" in command) is not drop_root
        assert command[command.index("--cap-drop") + 1] == "ALL"


def test_a_tool_of_a_module_brings_its_package_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    tool = replace(PYTHON, name="mine", entry="my_package.code:run", preload=("my_module", "json"))
    readable, paths = find_code(tool)
    assert {tmp_path / "my_package", tmp_path / "my_module.py"} <= set(readable)
    assert tmp_path not in readable
    assert tmp_path in paths
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        find_code(replace(FROZEN_LAKE, entry="no_such_package:x"))


def test_the_same_tool_has_the_same_recipe_in_every_run_of_the_service() -> None:
    """The daemon ends sandboxes whose tool's recipe has changed; hashes, and so sets, differ
    between processes."""
    code = (
        "from treadle_tools.builtin import TOOLS; from treadle_tools.sandbox.bubblewrap import "
        "find_code; print([find_code(tool) for tool in TOOLS])"
    )
    told = set()
    for seed in ("1", "2", "3", "4"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        told.add(
            subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, check=True
            ).stdout
        )
    assert len(told) == 1


@pytest.mark.parametrize("name", ["/nowhere/bwrap", "no-such-bwrap", "/usr/bin/false"])
def test_a_missing_bubblewrap_names_the_command_that_installs_it(name: str) -> None:
    with pytest.raises(BubblewrapMissing, match="apt-get install bubblewrap"):
        find_bubblewrap(name)


def test_where_the_system_has_no_bubblewrap_the_wheels_is_found_and_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "")
        found = locate_bubblewrap()
        other = locate_bubblewrap("no-such-bwrap")
    assert other is None, "the wheel stands in for no program of another name"
    assert found is not None and found != locate_bubblewrap("/usr/bin/bwrap")
    answer = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("bubblewrap ")


def test_locks_of_multiprocessing_need_no_further_namespace() -> None:
    """The kernel allows none inside some bubblewraps."""
    found = find_bubblewrap()
    code = "import multiprocessing; print(multiprocessing.Lock().acquire())"
    command = found.command(
        readable=find_code(PYTHON)[0],
        work_bytes=1 << 20,
        argv=[str(Path(sys.executable).resolve()), "-I", "-S", "-c", code],
    )
    assert subprocess.run(command, capture_output=True, text=True).stdout == "True\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become nobody")
def test_a_bubblewrap_that_root_cannot_use_is_run_by_nobody() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        fake_bwrap = folder / "fake-bwrap"
        fake_bwrap.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 || [ "$(id -u)" = {NOBODY} ]\n'
        )
        fake_bwrap.chmod(0o755)
        found = find_bubblewrap(str(fake_bwrap))
    assert found == Bubblewrap(str(fake_bwrap), "1.0", user=NOBODY, drop_root=False)


def test_frames_pass_and_bad_ones_are_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        messages.send(ours, {"text": "\ud800 é", "number": 1})
        assert messages.receive(theirs) == ({"text": "\ud800 é", "number": 1}, [])
        ours.sendall(messages.HEADER.pack(3) + b"[1]")
        with pytest.raises(messages.FrameError, match="not a JSON object"):
            messages.receive(theirs)
        ours.sendall(messages.HEADER.pack(messages.MAX_FRAME_BYTES + 1))
        with pytest.raises(messages.FrameError, match="are the most"):
            messages.receive(theirs)
        ours.sendall(messages.HEADER.pack(9) + json.dumps({}).encode())
        ours.close()
        with pytest.raises(messages.FrameError, match="ended in a frame"):
            messages.receive(theirs)
        assert messages.receive(theirs) is None
    with pytest.raises(messages.FrameError, match="are the most"):
        messages.encode({"text": "x" * messages.MAX_FRAME_BYTES})


def said(
    answer: object, printed: bytes = b"", most: int = 5, **header: object
) -> dict[str, object]:
    """What a reader makes of an answer."""
    return messages.read_answer(
        {"id": "one", "most_output": most, **header}, printed, json.dumps(answer).encode()
    )


def test_output_is_cut_at_a_character_and_says_so() -> None:
    cut, whole = said({}, "abcé".encode(), truncated=True), said({}, b"ok \xff", 8)
    assert (cut["output"], cut["truncated"]) == ("abcé\n[output cut at 5 bytes]", True)
    assert (whole["output"], whole["truncated"]) == ("ok \\xff", False)
    assert said({"output": "ééé"}, b"a")["output"] == "aéé\n[output cut at 5 bytes]"


def test_an_answer_says_nothing_that_its_supervisor_says() -> None:
    """It may name any field. Result: those of the supervisor and of the service's side are not
    taken from it."""
    own = (
        "id",
        "alive",
        "again",
        "soiled",
        "truncated",
        "execution_s",
        "cpu_s",
        "oom_kills",
        "file",
    )
    answer = {"status": "ok", "reward": 1, **dict.fromkeys(own, "forged")}
    reply = said(answer, alive=True, again=False)
    assert reply == {
        "id": "one",
        "alive": True,
        "again": False,
        "status": "ok",
        "reward": 1,
        "output": "",
        "error": "",
        "truncated": False,
    }
    assert said(answer, status="timed_out", error="late") == {
        "id": "one",
        "status": "timed_out",
        "error": "late",
        "output": "",
        "truncated": False,
    }


@pytest.mark.parametrize(
    "answer", [[], "text", {"output": 1}, {"error": []}, {"output": "", "error": None}]
)
def test_an_answer_that_is_none_is_crashed(answer: object) -> None:
    assert (said(answer)["status"], said(answer)["error"]) == ("crashed", messages.NOT_VALID)


def test_content_leaves_nothing_in_memory() -> None:
    """Through a socket and a pipe, in pieces, cut at the end. Result: the file has it, and no
    object of the process."""
    secret = os.urandom(50_000).hex().encode()
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    content_, out = Content(150_000), Content(10)
    with ours, theirs:
        sender = threading.Thread(target=ours.sendall, args=(secret,))
        sender.start()
        content_.receive_exactly(theirs, len(secret))
        sender.join()
    os.write(write_end, secret[:50_000])
    while content_.size < 150_000:
        content_.read(read_end)
    assert os.pread(content_.file, 200_000, 0) == secret + secret[:50_000]
    os.write(write_end, secret[:20])
    assert out.read(read_end) == 20
    assert (out.size, out.cut, os.pread(out.file, 20, 0)) == (10, True, secret[:10])
    assert not any(content._buffer)
    for each in (read_end, write_end, content_.file, out.file):
        os.close(each)
