"""Runs foreign code in a process that the supervisor forked for it: one call, a piece of Python, or an environment.

Invariant: the process of an environment hides its memory, since the answer to a task may be in it; the agent's code
runs beside it, in a fork of a process that has never seen the answer.
"""

import ast
import io
import json
import linecache
import os
import pickle
import socket
import sys
import tarfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from treadle_tools.sandbox.inside import answers, frames, isolation
from treadle_tools.sandbox.inside.child import Budget
from treadle_tools.sandbox.inside.content import take
from treadle_tools.tool import Environment, InvalidArguments, Outcome, Status

CORES = "TREADLE_CORES"  # environment variable: how many cores the program was granted
SNIPPET = "<code>"  # the file name of an agent's code in tracebacks
STATE, FILES = "state", "tmp"  # in the tar of a snapshot: the pickled environment, and what lies in /tmp

# The socket of this process, one at most: an environment that comes out of a snapshot finds its sandbox here.
_links: list[socket.socket] = []


def run_order(program: Callable[..., Any], link: socket.socket, *, hidden: bool, counted: bool) -> None:
    """Wait for this process's one order and carry it out, within the order's budget. program: of the tool. hidden: the
    program starts foreign code, which must not reach into its memory or take its link. counted: a control group counts
    its memory."""
    run_snippet({"code": "None"})  # the first touch of a page after a fork copies it: some 90 that no caller waits for
    if (received := frames.receive(link)) is None:
        return
    order, (body, *files) = received
    Budget(**order["budget"]).enforce()
    if not counted:
        isolation.refuse_unmapped_memory()
    op, arguments = order["op"], json.loads(take(body))
    os.environ[CORES] = str(order["cores"])
    if op in ("open", "restore"):
        _serve_environment(program, arguments, files, link)
    else:
        if not hidden:
            isolation.set_dumpable(True)  # some programs read their own /proc
        _answer(link, partial(run_snippet if op == "python" else program, arguments))


def _answer(link: socket.socket, program: Callable[[], Outcome], *, fatal: bool = False) -> bool:
    """Run foreign code and send its outcome. fatal: a failure is the last of it. False where it has failed."""
    failed = True
    try:
        message = _encode(program())
        failed = False
    except InvalidArguments as refusal:
        message = {"status": Status.TOOL_ERROR, "invalid": [refusal.name, refusal.description]}
    except MemoryError:
        message = {"status": Status.OUT_OF_MEMORY, "error": "MemoryError"}
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything; it is the answer
        message = _encode(_report_error(error))
    answers.send(link, answers.LAST if fatal and failed else answers.ANSWER, message)
    return not failed


def _encode(outcome: Outcome) -> dict[str, Any]:
    message = dict(vars(outcome))  # not asdict, which copies what is inside too
    data = message.pop("data")
    return {**message, "data_json": "" if data is None else json.dumps(data, allow_nan=False)}


def _report_error(error: BaseException) -> Outcome:
    """Print the traceback of foreign code to stderr, without our own frames; the outcome has its last line."""
    tracing = error.__traceback__
    while tracing is not None and tracing.tb_frame.f_code.co_filename != SNIPPET:
        tracing = tracing.tb_next
    traceback.print_exception(type(error), error, tracing)
    sys.stderr.flush()
    last = traceback.format_exception_only(error)[-1].strip()
    return Outcome(status=Status.TOOL_ERROR, error=last[: answers.MOST_ERROR_CHARS])


def run_snippet(arguments: Mapping[str, Any]) -> Outcome:
    """The `python` tool: runs arguments["code"] as an interactive prompt does, and shows a last expression."""
    code = str(arguments["code"])
    linecache.cache[SNIPPET] = (len(code), None, code.splitlines(keepends=True), SNIPPET)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        module = ast.parse(code, SNIPPET)
        last = module.body.pop() if module.body and isinstance(module.body[-1], ast.Expr) else None
        exec(compile(module, SNIPPET, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), SNIPPET, "eval"), namespace)
            if value is not None:
                print(repr(value))
    except MemoryError:
        namespace.clear()
        return Outcome(status=Status.OUT_OF_MEMORY, error="MemoryError")
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return Outcome()
        return Outcome(status=Status.TOOL_ERROR, error=f"SystemExit: {leaving.code}")
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything; it is the answer
        return _report_error(error)
    return Outcome()


class LinkedSandbox:
    """The `Sandbox` that an environment is given: asks the supervisor, which forks a process without the answer."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def __reduce__(self) -> tuple[Callable[[], "LinkedSandbox"], tuple[()]]:
        return _find_sandbox, ()

    @property
    def cores(self) -> int:
        """How many cores the present step may use."""
        return int(os.environ[CORES])

    def python(self, code: str) -> Outcome:
        """Run Python beside the environment."""
        answers.send(self._link, answers.ORDER, {"code": code})
        if (received := frames.receive(self._link)) is None:
            raise frames.FrameError("the supervisor has ended")
        header, files = received
        printed, answer = (take(file) for file in files)
        reply = answers.read(header, printed, answer)
        status = reply["status"] if reply["status"] in tuple(Status) else Status.CRASHED
        return Outcome(output=reply["output"], status=Status(status), error=reply["error"])


def _find_sandbox() -> LinkedSandbox:
    """The sandbox of the process that reads a snapshot."""
    return LinkedSandbox(_links[0])


def _serve_environment(
    program: Callable[..., Environment], arguments: Any, files: Sequence[int], link: socket.socket
) -> None:
    """Answer with the first observation of an environment, then serve its steps and snapshots.

    files: a snapshot that it continues from, if any; `arguments` are then its last observation, the first of this
    session.
    """
    made: list[Environment] = []
    _links.append(link)

    def first() -> Outcome:
        if not files:
            made.append(program(arguments, LinkedSandbox(link)))
            return made[0].first()
        made.append(read_snapshot(files[0]))
        os.close(files[0])
        data = json.loads(arguments["data_json"]) if arguments["data_json"] else None
        return Outcome(output=str(arguments["output"]), reward=arguments["reward"], data=data)

    if not _answer(link, first, fatal=True):
        return
    (environment,) = made
    while (received := frames.receive(link)) is not None:
        request, (file,) = received
        os.environ[CORES] = str(request["cores"])
        if request["op"] == "snapshot":
            _write_in_fork(environment, file, link)
            os.close(file)
        else:
            _answer(link, partial(environment.step, json.loads(take(file))))


def _write_in_fork(environment: Environment, file: int, link: socket.socket) -> None:
    """Write a snapshot in a fork, so that the environment stays as it is, whatever its own pickling does."""
    child = os.fork()
    if child == 0:
        try:
            _answer(link, partial(write_snapshot, environment, file))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        error = "the process that wrote the snapshot was killed"
        answers.send(link, answers.ANSWER, {"status": Status.CRASHED, "error": error})


def write_snapshot(environment: Any, file: int) -> Outcome:
    """Write a pickled environment and the files of its /tmp as one tar. What is not in the object is not in the
    snapshot: state of modules, threads, open files.

    Raises whatever pickling raises, and OSError where the tar becomes larger than a file may.
    """
    body = pickle.dumps(environment, protocol=pickle.HIGHEST_PROTOCOL)
    with os.fdopen(os.dup(file), "wb") as output, tarfile.open(fileobj=output, mode="w|") as archive:
        state = tarfile.TarInfo(STATE)
        state.size = len(body)
        archive.addfile(state, io.BytesIO(body))
        archive.add(f"/{FILES}", FILES)
    return Outcome()


def read_snapshot(file: int) -> Any:
    """Put the files of a snapshot back in their places and unpickle its environment."""
    body = b""
    with os.fdopen(os.dup(file), "rb") as source, tarfile.open(fileobj=source, mode="r|") as archive:
        # No filter is needed: writing anywhere but below /tmp fails, as for all code in a sandbox.
        archive.extraction_filter = lambda member, _: member
        for member in archive:
            if member.name == STATE:
                found = archive.extractfile(member)
                body = found.read() if found is not None else b""
            else:
                archive.extract(member, "/")
    return pickle.loads(body)
