"""One environment in its process: from its first observation, or from a snapshot, to its end.

Invariant: the process hides its memory, since the answer may be in there; an agent's code runs beside it, in a fork of
a process that knows nothing of it.

An environment on its way from one cell to another: itself, pickled, and the files of its /tmp, in one tar.

Written and read inside the sandbox only. What is not in the object is not in the snapshot: state of modules, threads,
open files. An environment that needs more says so in `__getstate__` and `__setstate__`."""

import io
import json
import os
import pickle
import socket
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from treadle_tools.sandbox.inside import frames, snippet
from treadle_tools.tool import Environment, InvalidArguments, Outcome, Status

STATE = "state"
FILES = "tmp"  # and below it, what lies in /tmp


def write_snapshot(environment: Any, file: int) -> None:
    """Raises whatever pickling raises, and OSError where it becomes larger than a file may."""
    body = pickle.dumps(environment, protocol=pickle.HIGHEST_PROTOCOL)
    with os.fdopen(os.dup(file), "wb") as output, tarfile.open(fileobj=output, mode="w|") as archive:
        state = tarfile.TarInfo(STATE)
        state.size = len(body)
        archive.addfile(state, io.BytesIO(body))
        archive.add(f"/{FILES}", FILES)


def read_snapshot(file: int) -> Any:
    """The environment, after its files are where they were."""
    body = b""
    with os.fdopen(os.dup(file), "rb") as source, tarfile.open(fileobj=source, mode="r|") as archive:
        # Nothing is to be kept out: what is written anywhere but below /tmp fails, here as for all code in a cell.
        archive.extraction_filter = lambda member, _: member
        for member in archive:
            if member.name == STATE:
                found = archive.extractfile(member)
                body = found.read() if found is not None else b""
            else:
                archive.extract(member, "/")
    return pickle.loads(body)


CORES = "TREADLE_CORES"  # how a program learns how many cores it was granted

_links: list[socket.socket] = []  # of this process, one at most: how an environment out of a snapshot finds its sandbox


def begin(program: Callable[..., Environment], arguments: Any, link: socket.socket) -> None:
    """A new environment."""
    made: list[Environment] = []

    def first() -> Outcome:
        made.append(program(arguments, LinkedSandbox(link)))
        return made[0].first()

    if _begun(link, first):
        _live(made[0], link)


def go_on(file: int, said: Mapping[str, Any], link: socket.socket) -> None:
    """One that was written to `file`. said: its last observation, which is the first of this session."""
    made: list[Environment] = []

    def read() -> Outcome:
        made.append(read_snapshot(file))
        os.close(file)
        data = json.loads(said["data_json"]) if said["data_json"] else None
        return Outcome(output=str(said["output"]), reward=said["reward"], data=data)

    if _begun(link, read):
        _live(made[0], link)


def _begun(link: socket.socket, program: Callable[[], Outcome]) -> bool:
    _links.append(link)
    return answer(link, program, fatal=True)


def _live(environment: Environment, link: socket.socket) -> None:
    while (received := frames.receive_with_file(link)) is not None:
        request, file = received
        if file is not None:
            _write(environment, file, link)
            os.close(file)
        else:
            arguments = request["step"]
            tell_cores(request)
            answer(link, partial(environment.step, arguments))


def _write(environment: Environment, file: int, link: socket.socket) -> None:
    """In a fork, so that the environment stays as it is, whatever its own pickling does."""
    child = os.fork()
    if child == 0:

        def write() -> Outcome:
            write_snapshot(environment, file)
            return Outcome()

        try:
            answer(link, write)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        frames.send(link, {"status": Status.CRASHED, "error": "what was to write the snapshot was killed"})


def answer(link: socket.socket, program: Callable[[], Outcome], *, fatal: bool = False) -> bool:
    """Run foreign code and send its outcome. fatal: a failure ends the environment. Whether it did not fail so."""
    try:
        message = _message(program())
    except InvalidArguments as refusal:
        message = {"status": Status.TOOL_ERROR, "invalid": [refusal.name, refusal.description], "fatal": fatal}
    except MemoryError:
        message = {"status": Status.OUT_OF_MEMORY, "error": "MemoryError", "fatal": fatal}
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything; it is the answer
        message = {**_message(snippet.failed(error)), "fatal": fatal}
    frames.send(link, message)
    return not message.get("fatal", False)


def _message(outcome: Outcome) -> dict[str, Any]:
    message = asdict(outcome)
    data = message.pop("data")
    return {**message, "data_json": "" if data is None else json.dumps(data)}


class LinkedSandbox:
    """The environment's side of `Sandbox`: asks the supervisor, which forks from a process that knows no answer."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def __reduce__(self) -> tuple[Callable[[], "LinkedSandbox"], tuple[()]]:
        """Out of a snapshot comes the sandbox of the process that reads it."""
        return _here, ()

    @property
    def cores(self) -> int:
        """How many cores the present step may use."""
        return int(os.environ[CORES])

    def python(self, code: str) -> Outcome:
        """Run Python beside the environment."""
        frames.send(self._link, {"python": code})
        reply = frames.receive(self._link)
        if reply is None:
            raise frames.FrameError("the supervisor is gone")
        return Outcome(output=str(reply["output"]), status=Status(reply["status"]), error=str(reply["error"]))


def _here() -> LinkedSandbox:
    return LinkedSandbox(_links[0])


def tell_cores(order: Mapping[str, Any]) -> None:
    """Tell the program of this process how many cores it was granted."""
    os.environ[CORES] = str(order["cores"])
