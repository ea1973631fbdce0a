"""Fork a process for foreign code, from the supervisor: a call, a piece of Python, or an
environment.

`Child` is the supervisor's side. It owns the fork, its pipes and its limits. `run_order` is what
the process does. Invariants: the parent never blocks on what the child writes or does not write,
and never has it in its memory; the child holds no descriptor but its own pipe and socket. The
process of an environment hides its memory, since the answer to a task may be in it; the agent's
code runs beside it, in a fork of a process that has never seen the answer.
"""

import ast
import atexit
import builtins
import contextlib
import gc
import io
import json
import linecache
import math
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from treadle_tools.sandbox.inside import isolation, messages
from treadle_tools.sandbox.inside.content import BUFFER_BYTES as READ_BYTES
from treadle_tools.sandbox.inside.content import Content, take
from treadle_tools.tool import Environment, InvalidArguments, Outcome, Status

MOST_DESCRIPTORS = 256
# Of CPU seconds above wall clock x cores, so that the wall clock ends the action first
CPU_GRACE_S = 1
LONG_BITS = 64  # of an exit code; Python ends with -1 where it has more


@dataclass(frozen=True)
class Budget:
    """Limits of what the child may use.

    baseline_bytes: address space of the preloaded worker. cpu_s: None: no limit.
    """

    memory_bytes: int
    baseline_bytes: int
    file_bytes: int
    processes: int
    cpu_s: float | None

    def enforce(self) -> None:
        """Set the limits of this process, which cannot raise them again."""
        pairs = [
            (resource.RLIMIT_AS, self.baseline_bytes + self.memory_bytes),
            (resource.RLIMIT_FSIZE, self.file_bytes),
            (resource.RLIMIT_NPROC, self.processes),
            (resource.RLIMIT_NOFILE, MOST_DESCRIPTORS),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
        ]
        for which, most in pairs:
            hard = resource.getrlimit(which)[1]
            value = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(which, (value, value))
        if self.cpu_s is not None:
            soft = math.ceil(self.cpu_s) + CPU_GRACE_S
            resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))


@dataclass(frozen=True)
class Event:
    """Event of a child process: what it did until its parent looked.

    kind: of the message that came (messages.py); 0: none came.

    late: whether the deadline has come. wait_status: set where the child has ended.
    """

    kind: int = 0
    late: bool = False
    wait_status: int | None = None


class Child:
    """One forked process, which runs `main(link)` and ends, whatever that does."""

    def __init__(self, main: Callable[[socket.socket], None]) -> None:
        output, their_output = os.pipe()
        self.link, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _run(main, theirs, their_output)
        os.close(their_output)
        theirs.close()
        os.set_blocking(output, False)
        self.link.setblocking(False)
        self._output = output
        self._ended = os.pidfd_open(self.pid)
        self._poll = select.poll()
        for descriptor in (self._output, self.link.fileno(), self._ended):
            self._poll.register(descriptor, select.POLLIN)

    def send(self, message: Mapping[str, object], *files: int) -> None:
        """Send a message to the child, and open files with it.

        Raises OSError where the child is gone.
        """
        self.link.setblocking(True)
        try:
            messages.send(self.link, message, *files)
        finally:
            self.link.setblocking(False)

    def next_event(self, deadline: float, printed: Content, answer: Content) -> Event:
        """Return what the child does next, until the deadline (time.monotonic).

        Adds its output to `printed`, and what it sends to `answer`, which is cleared. Raises
        FrameError where it sends something else than messages.py describes.
        """
        answer.clear(messages.MOST_ANSWER_BYTES)
        head, size = b"", 0
        while True:
            if len(head) == messages.ANSWER_HEAD.size and answer.size == size:
                self._drain(printed)
                return Event(kind=head[0])
            left = deadline - time.monotonic()
            if left <= 0:
                self._drain(printed)
                return Event(late=True)
            ready = {descriptor for descriptor, _ in self._poll.poll(math.ceil(left * 1e3))}
            if self._output in ready:
                self._drain(printed, at_most=READ_BYTES)
            if self.link.fileno() in ready:
                with contextlib.suppress(BlockingIOError, ConnectionResetError):
                    came = 1
                    if len(head) < messages.ANSWER_HEAD.size:
                        piece = self.link.recv(messages.ANSWER_HEAD.size - len(head))
                        head += piece
                        size, came = _size_of(head), len(piece)
                    if came and answer.size < size:
                        came = answer.receive(self.link, size - answer.size)
                    if came:
                        continue
                    self._poll.unregister(self.link.fileno())
            if self._ended in ready:
                self._drain(printed)
                return Event(wait_status=os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """Kill the process and its process group, and reap it."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._ended)
        os.close(self._output)
        self.link.close()

    def _drain(self, printed: Content, at_most: int = 4 * READ_BYTES) -> None:
        while at_most > 0:
            try:
                came = printed.read(self._output)
            except BlockingIOError:
                return
            if not came:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(self._output)
                return
            at_most -= came


def _size_of(head: bytes) -> int:
    """Return the size of an answer; 0 while its head is incomplete. Raises FrameError."""
    if len(head) < messages.ANSWER_HEAD.size:
        return 0
    kind, size = messages.ANSWER_HEAD.unpack(head)
    if (
        kind not in (messages.ANSWER, messages.LAST, messages.ORDER)
        or size > messages.MOST_ANSWER_BYTES
    ):
        raise messages.FrameError(f"an answer of kind {kind} and {size} bytes")
    return int(size)


def _run(main: Callable[[socket.socket], None], link: socket.socket, output: int) -> None:
    """Run the child's side, and never return."""
    exit_code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        kept = link.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, MOST_DESCRIPTORS * 4)
        isolation.set_dumpable(False)
        # Line buffering: a killed snippet still shows what it printed. A lone surrogate must not
        # fail.
        sys.stdout, sys.stderr = _open_output(1, "<stdout>"), _open_output(2, "<stderr>")
        _reseed()
        main(link)
        exit_code = 0
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


def _open_output(descriptor: int, name: str) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    raw.name = name
    stream = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    stream.mode = "w"  # type: ignore[misc]
    return stream


def _reseed() -> None:
    """Seed the random generators anew: forks of one process must not share their random numbers."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        # With no number given it takes 7 ms
        numpy.random.seed(int.from_bytes(os.urandom(4), "big"))


CORES = "TREADLE_CORES"  # environment variable: how many cores the program was granted
SNIPPET = ".snippet.py"  # the file of an agent's code, in the folder where it runs


def run_order(
    program: Callable[..., Any], link: socket.socket, *, hidden: bool, counted: bool
) -> None:
    """Wait for this process's one order and carry it out, within the order's budget.

    program: of the tool. hidden: whether the program starts foreign code, which must not reach into
    its memory or take its link. counted: whether a control group counts its memory.
    """
    # The first touch of a page after a fork copies it: some 90 that no caller waits for
    _execute("None", SNIPPET, vars(Main(Source("None", Path.cwd() / SNIPPET))))
    if (received := messages.receive(link)) is None:
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
    """Run foreign code and send its outcome; return False where it has failed.

    fatal: whether a failure ends the environment.
    """
    failed = True
    try:
        message = _encode(program())
        failed = False
    except InvalidArguments as refusal:
        message = {"status": Status.TOOL_ERROR, "invalid": [refusal.name, refusal.description]}
    except MemoryError:
        message = {"status": Status.OUT_OF_MEMORY, "error": "MemoryError"}
    except BaseException as error:  # noqa: BLE001 - what foreign code raises is the answer
        message = _encode(_report_error(error))
    try:
        messages.send_answer(link, messages.LAST if fatal and failed else messages.ANSWER, message)
    except OSError:
        # Foreign code has closed the link. Where it is well, the exit code of this process says so
        if message["status"] != Status.OK:
            raise
    return not failed


def _encode(outcome: Outcome) -> dict[str, Any]:
    message = dict(vars(outcome))  # not asdict, which copies what is inside too
    data = message.pop("data")
    return {**message, "data_json": "" if data is None else json.dumps(data, allow_nan=False)}


def _report_error(error: BaseException, path: str = "") -> Outcome:
    """Print the traceback of foreign code to stderr, without our own frames; return an outcome with
    its last line.

    path: of the foreign code's file.
    """
    tracing = error.__traceback__
    while tracing is not None and tracing.tb_frame.f_code.co_filename != path:
        tracing = tracing.tb_next
    error.__traceback__ = tracing
    try:
        getattr(sys, "excepthook", sys.__excepthook__)(type(error), error, tracing)
    except BaseException:  # noqa: BLE001 - a hook of foreign code, or a stream that it closed
        with contextlib.suppress(Exception):
            sys.__excepthook__(type(error), error, tracing)
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    last = traceback.format_exception_only(error)[-1].strip()
    return Outcome(status=Status.TOOL_ERROR, error=last[: messages.MOST_ERROR_CHARS])


@dataclass(frozen=True)
class Source:
    """An agent's code, and its file, which is written when something needs it.

    So the agent finds its own files alone in its folder. Processes that `multiprocessing` starts
    anew import the file, and the interpreter itself shows its lines; tracebacks of the library,
    `inspect` and `warnings` find the code in `linecache`.
    """

    code: str
    path: Path

    def write(self) -> None:
        """Write the file, if it is not there yet."""
        with (
            contextlib.suppress(OSError),  # the agent has filled its disk
            self.path.open("x", encoding="utf-8", errors="backslashreplace", newline="") as file,
        ):
            file.write(self.code)

    def remove(self) -> None:
        """Remove the file, if it was written."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def write_before(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a hook of the interpreter's that finds the file when it shows an error."""

        def report(error: Any) -> None:
            self.write()
            hook(error)

        return report


class Main(ModuleType):
    """The module `__main__` of an agent's code. Asking it for its file writes the file."""

    __slots__ = ("_source",)

    def __init__(self, source: Source) -> None:
        super().__init__("__main__")
        self._source, path = source, str(source.path)
        loader = SourceFileLoader("__main__", path)
        names = {"__builtins__": builtins, "__file__": path, "__cached__": None}
        vars(self).update(names, __loader__=loader)
        if sys.version_info < (3, 14):
            vars(self)["__annotations__"] = {}

    def __getattribute__(self, name: str) -> Any:
        if name == "__file__":
            self._source.write()
        return super().__getattribute__(name)


def run_snippet(arguments: Mapping[str, Any]) -> Outcome:
    """Run arguments["code"] as `python file.py` does, and show a last expression as an interactive
    prompt does; this is the `python` tool."""
    code = str(arguments["code"]).removeprefix("\ufeff")  # a mark of Windows' editors
    source, starter = Source(code, Path.cwd() / SNIPPET), os.getpid()
    exit_code = 1
    try:
        _prepare_interpreter(source)
        outcome, exit_code = _run_main(source)
        if outcome.status != Status.OUT_OF_MEMORY:
            _finish_main()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            # Foreign code may have closed it, or put anything in its place
            with contextlib.suppress(Exception):
                getattr(stream, "flush", int)()
        return outcome
    finally:
        if os.getpid() != starter:
            os._exit(exit_code)  # a fork of the agent's code, which has no answer to give
        source.remove()


def _prepare_interpreter(source: Source) -> None:
    """Make this process look like one that `python` has started with a file."""
    source.remove()  # of a snippet that was killed
    if "__file__" in source.code:
        source.write()
    path, code = str(source.path), source.code
    whole = code if code.endswith(("\n", "\r")) else f"{code}\n"
    lines = io.StringIO(whole, newline=None).readlines()
    linecache.cache[path] = (len(code), None, lines, path)
    sys.argv[:], sys.orig_argv[:] = [""], [sys.executable]
    sys.path.insert(0, "")  # the working folder
    vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)
    threading.excepthook = source.write_before(threading.excepthook)
    sys.unraisablehook = source.write_before(sys.unraisablehook)


def _run_main(source: Source) -> tuple[Outcome, int]:
    """Run a snippet up to its last statement, and print what Python prints about how it ended;
    return the exit code too."""
    sys.modules["__main__"] = main = Main(source)
    try:
        _execute(source.code, str(source.path), vars(main))
    except MemoryError as error:
        vars(main).clear()
        traceback.clear_frames(error.__traceback__)
        with contextlib.suppress(MemoryError):
            source.write()
            _report_error(error, str(source.path))
        return Outcome(status=Status.OUT_OF_MEMORY, error="MemoryError"), 1
    except SystemExit as leaving:
        return _exit_with(leaving.code)
    except BaseException as error:  # noqa: BLE001 - what foreign code raises is the answer
        source.write()
        if isinstance(error, SyntaxError) and error.filename == str(source.path):
            # The compiler looks for the line in the file, which was not there
            error.text = error.text or linecache.getline(error.filename, error.lineno or 0)
        return _report_error(error, str(source.path)), 1
    return Outcome(), 0


def _exit_with(code: object) -> tuple[Outcome, int]:
    """Return the outcome and the exit code of a program that `sys.exit(code)` has ended; a code
    that is no number is printed."""
    if code is None:
        return Outcome(), 0
    if isinstance(code, int):
        exit_code = code & 0xFF if code.bit_length() < LONG_BITS else 0xFF
        why = str(exit_code)
    else:
        why, exit_code = "", 1
        with contextlib.suppress(Exception):
            why = str(code)
        with contextlib.suppress(Exception):  # foreign code may have closed the stream
            print(why, file=sys.stderr)
    if exit_code == 0:
        return Outcome(), 0
    error = f"SystemExit: {why}"[: messages.MOST_ERROR_CHARS]
    return Outcome(status=Status.TOOL_ERROR, error=error), exit_code


def _finish_main() -> None:
    """Do what the interpreter does at its end: wait for threads, call the functions of `atexit`,
    and destroy the objects of `__main__`, which may print, or hold files that are not yet
    written."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:  # noqa: BLE001 - of a signal's handler; Python goes on too
        _report_error(error)
    atexit._run_exitfuncs()
    main = sys.modules.pop("__main__", None)
    held = weakref.ref(main) if isinstance(main, Main) else lambda: None
    del main
    gc.collect()
    if (left := held()) is not None:
        names = vars(left)
        names.update(dict.fromkeys(name for name in names if name != "__builtins__"))


def _execute(code: str, path: str, namespace: dict[str, Any]) -> None:
    module = ast.parse(code, path)
    last = module.body.pop() if module.body and isinstance(module.body[-1], ast.Expr) else None
    shown = compile(ast.Expression(last.value), path, "eval") if isinstance(last, ast.Expr) else ""
    exec(compile(module, path, "exec"), namespace)
    if shown and (value := eval(shown, namespace)) is not None:
        print(repr(value))


class LinkedSandbox:
    """The `Sandbox` that an environment is given: its orders go to the supervisor, which forks a
    process without the answer."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    @property
    def cores(self) -> int:
        """Return how many cores the present step may use."""
        return int(os.environ[CORES])

    def python(self, code: str) -> Outcome:
        """Run Python beside the environment."""
        messages.send_answer(self._link, messages.ORDER, {"code": code})
        if (received := messages.receive(self._link)) is None:
            raise messages.FrameError("the supervisor has ended")
        header, files = received
        printed, answer = (take(file) for file in files)
        reply = messages.read_answer(header, printed, answer)
        status = reply["status"] if reply["status"] in tuple(Status) else Status.CRASHED
        return Outcome(output=reply["output"], status=Status(status), error=reply["error"])


def _serve_environment(
    program: Callable[..., Environment], arguments: Any, link: socket.socket
) -> None:
    """Answer with the first observation of an environment, then serve its steps."""
    made: list[Environment] = []

    def first() -> Outcome:
        made.append(program(arguments, LinkedSandbox(link)))
        return made[0].first()

    if not _answer(link, first, fatal=True):
        return
    (environment,) = made
    while (received := messages.receive(link)) is not None:
        request, (file,) = received
        os.environ[CORES] = str(request["cores"])
        _answer(link, partial(environment.step, json.loads(take(file))))
