"""Runs foreign code in a process that the supervisor forked for it: one call, a piece of Python, or an environment.

Invariant: the process of an environment hides its memory, since the answer to a task may be in it; the agent's code
runs beside it, in a fork of a process that has never seen the answer.
"""

import ast
import json
import linecache
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from treadle_tools.sandbox.inside import answers, frames, isolation
from treadle_tools.sandbox.inside.child import Budget
from treadle_tools.sandbox.inside.content import take
from treadle_tools.tool import Environment, InvalidArguments, Outcome, Status

CORES = "TREADLE_CORES"  # environment variable: how many cores the program was granted
SNIPPET = "<code>"  # the file name of an agent's code in tracebacks


def run_order(program: Callable[..., Any], link: socket.socket, *, hidden: bool, counted: bool) -> None:
    """Wait for this process's one order and carry it out, within the order's budget. program: of the tool. hidden: the
    program starts foreign code, which must not reach into its memory or take its link. counted: a control group counts
    its memory."""
    run_snippet({"code": "None"})  # the first touch of a page after a fork copies it: some 90 that no caller waits for
    if (received := frames.receive(link)) is None:
        return
    order, (body,) = received
    Budget(**order["budget"]).enforce()
    if not counted:
        isolation.refuse_unmapped_memory()
    op, arguments = order["op"], json.loads(take(body))
    os.environ[CORES] = str(order["cores"])
    if op == "open":
        _serve_environment(program, arguments, link)
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


def _serve_environment(program: Callable[..., Environment], arguments: Any, link: socket.socket) -> None:
    """Answer with the first observation of an environment, then serve its steps."""
    made: list[Environment] = []

    def first() -> Outcome:
        made.append(program(arguments, LinkedSandbox(link)))
        return made[0].first()

    if not _answer(link, first, fatal=True):
        return
    (environment,) = made
    while (received := frames.receive(link)) is not None:
        request, (file,) = received
        os.environ[CORES] = str(request["cores"])
        _answer(link, partial(environment.step, json.loads(take(file))))
