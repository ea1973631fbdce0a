"""The init of a sandbox: takes the service's requests, runs the tool in processes of its own, answers how each ended.

Owns: the sandbox's child processes and their deadlines. Invariants: foreign code never runs in this process, so that
nothing in the sandbox can answer the service in its place; the kernel lets no process inside the sandbox kill or stop
init. What a call left is removed before another of the same trajectory runs; where that fails, none runs again.
"""

import contextlib
import gc
import importlib
import os
import resource
import shutil
import signal
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from treadle_tools.sandbox.inside import frames, isolation
from treadle_tools.sandbox.inside.child import Budget, Captured, Child
from treadle_tools.sandbox.inside.program import run_order
from treadle_tools.tool import Limits, Status

ENVIRONMENT_GRACE_S = 1.0  # for an environment to answer after code that it ran has used up the time
WRITABLE = (Path("/tmp"), Path("/dev/shm"))  # all folders that a sandbox can write
WRITABLE_MODE = 0o700
ALL_CORES = range(1024)  # the widest mask that the standard library can set
RESOURCE_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True)
class Worker:
    """A tool that this process has imported. program: what the tool's `entry` names. baseline_bytes: address space."""

    program: Callable[..., Any]
    work_bytes: int
    processes: int
    baseline_bytes: int

    @classmethod
    def load(cls, config: Mapping[str, Any]) -> "Worker":
        """Import the tool and its preloaded modules. Any failure ends the process; its stderr has the reason."""
        for name in config["preload"]:
            importlib.import_module(name)
        module, _, attribute = str(config["entry"]).partition(":")
        program: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        gc.collect()
        gc.freeze()  # so that a fork's garbage collector does not copy every page of the preloaded modules
        return cls(program, int(config["work_bytes"]), int(config["processes"]), pages * resource.getpagesize())


def hide_standard_streams() -> tuple[int, int]:
    """Standard input and output under other numbers; nothing that is imported from now on finds them."""
    streams = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return streams


class Requests(Protocol):
    """Where requests come from and answers go."""

    def next_request(self) -> tuple[dict[str, Any], int | None] | None:
        """The next request, and the open file that came with it; None where there will be no more."""

    def answer(self, message: Mapping[str, Any]) -> None:
        """Send an answer, if anybody still listens."""


class Supervisor:
    """Answers requests, which `Sandbox.ask` of the service describes, one at a time.

    The last answer stays here, with its request's id: the next service can `recall` what a killed one did not pass on.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._environment: Child | None = None
        self._warm: Child | None = None
        self._finished: Child | None = None
        self._has_run_python = False
        self._last: dict[str, Any] = {"id": ""}
        self._before = _read_init_state()
        self._soiled = ""
        self._fork()

    def serve(self, requests: Requests) -> None:
        """Answer one request after the other until there are no more."""
        while (received := requests.next_request()) is not None:
            request, file = received
            if request["op"] == "snapshot":  # changes nothing, so that the last answer stays the last step's
                requests.answer(self._answer(request, file))
            else:
                if request["op"] != "recall":
                    self._last = self._answer(request, file)
                requests.answer(self._last)
            if self._finished is not None:  # after the answer, because it takes half a millisecond
                self._finished.kill()
                self._finished = None
                if self._last["again"]:
                    self._soiled = _clean(self._before)
                    self._fork()
            if file is not None:
                os.close(file)
            if self._has_run_python:
                self._fork()

    def _answer(self, request: Mapping[str, Any], file: int | None) -> dict[str, Any]:
        started = time.monotonic()
        reply = self._carry_out(request, Limits(**request["limits"]), file)
        reply["id"] = request["id"]
        reply["execution_s"] = time.monotonic() - started
        reply["alive"] = self._environment is not None
        # Only process 1 of namespaces of its own can remove what a call left: every other process is the call's.
        reply["again"] = bool(request.get("again")) and not self._soiled and os.getpid() == 1
        return reply

    def _fork(self) -> None:
        """Have a process ready for the next order: forking one of a worker with large libraries takes milliseconds."""
        if self._warm is None:
            self._warm = Child(lambda link: run_order(self._worker.program, link))

    def _start(self, op: str, arguments: Any, limits: Limits, file: int | None = None) -> Child:
        """Give a process its order. An environment's CPU seconds add up over its steps, so it has no limit there."""
        self._fork()
        child, self._warm = self._warm, None
        assert child is not None
        budget = Budget(
            memory_bytes=limits.memory_bytes,
            baseline_bytes=self._worker.baseline_bytes,
            file_bytes=self._worker.work_bytes,
            processes=self._worker.processes,
            cpu_s=None if op in ("open", "restore") else limits.wall_s * limits.cpu_cores,
        )
        child.send({"op": op, "arguments": arguments, "budget": asdict(budget), "cores": limits.cpu_cores}, file)
        return child

    def _carry_out(self, request: Mapping[str, Any], limits: Limits, file: int | None) -> dict[str, Any]:
        op, arguments = str(request["op"]), request["arguments"]
        if op == "call" and self._soiled:
            return _reply(Status.CRASHED, Captured(0), error=self._soiled) | {"soiled": True}
        if op == "call":
            self._finished = self._start(op, arguments, limits)
            return _receive_answer(self._finished, limits)
        if op in ("open", "restore"):
            self._environment = self._start(op, arguments, limits, file)
        elif self._environment is not None:
            self._environment.send({op: arguments, "cores": limits.cpu_cores}, file)
        return self._receive_environment_answer(limits)

    def _receive_environment_answer(self, limits: Limits) -> dict[str, Any]:
        """Wait for the environment's next answer, and run the Python that it asks for until then."""
        if (environment := self._environment) is None:
            return _reply(Status.CRASHED, Captured(0), error="the environment has ended")
        deadline = time.monotonic() + limits.wall_s
        unread = Captured(0)  # what an environment prints is no observation
        try:
            while True:
                event = environment.next_event(deadline, unread)
                if not isinstance(event, dict) or "python" not in event:
                    break
                self._has_run_python = True
                child = self._start("python", {"code": event["python"]}, limits)
                try:
                    answer = _receive_answer(child, limits)
                finally:
                    child.kill()
                environment.send(answer)
                deadline = max(deadline, time.monotonic() + ENVIRONMENT_GRACE_S)
        except (frames.FrameError, OSError) as error:
            event = {"status": Status.CRASHED, "error": str(error), "fatal": True}
        captured = Captured(limits.output_bytes)
        if not isinstance(event, dict) or event.pop("fatal", False):
            environment.kill()
            self._environment = None
        return _reply_to(event, captured, limits)


def _receive_answer(child: Child, limits: Limits) -> dict[str, Any]:
    """Wait for the one answer of a child, which the caller kills afterwards."""
    captured = Captured(limits.output_bytes)
    try:
        event = child.next_event(time.monotonic() + limits.wall_s, captured)
    except frames.FrameError as error:
        return _reply(Status.CRASHED, captured, error=str(error))
    return _reply_to(event, captured, limits)


def _reply_to(event: dict[str, Any] | int | None, captured: Captured, limits: Limits) -> dict[str, Any]:
    """The answer of an event of `Child.next_event`."""
    if event is None:
        return _reply(Status.TIMED_OUT, captured, error=f"stopped after {limits.wall_s:g} s")
    if isinstance(event, int) and os.WIFSIGNALED(event):
        number = os.WTERMSIG(event)
        if number == signal.SIGXCPU:
            cpu_s = limits.wall_s * limits.cpu_cores
            return _reply(Status.TIMED_OUT, captured, error=f"stopped after more than {cpu_s:g} CPU seconds")
        return _reply(Status.CRASHED, captured, error=f"killed by {signal.Signals(number).name}")
    if isinstance(event, int):
        code = os.waitstatus_to_exitcode(event)
        return _reply(Status.CRASHED, captured, error=f"ended without an answer, exit code {code}")
    captured.add(str(event.pop("output", "")).encode("utf-8", "backslashreplace"))
    reply = _reply(Status(str(event.pop("status", Status.CRASHED))), captured)
    return {**event, **reply, "error": str(event.get("error", ""))}


def _reply(status: Status, captured: Captured, *, error: str = "") -> dict[str, Any]:
    return {"status": status, "output": captured.text(), "truncated": captured.cut, "error": error}


def _read_init_state() -> tuple[object, ...]:
    """What processes of the same user may change of init, and its children inherit."""
    limits = [resource.getrlimit(which) for which in RESOURCE_LIMITS]
    return *limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


def _clean(before: tuple[object, ...]) -> str:
    """Remove what a call left in the sandbox, and kill every other process. before: the state of init at its start.

    Returns what could not be removed; empty where the sandbox is as it was.
    """
    with contextlib.suppress(ProcessLookupError):  # a process that forks meanwhile is killed before its fork is done
        while True:
            os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
    try:
        for folder in WRITABLE:
            _empty(folder)
        # A mask of cores that the call set here would hold for later children; the control group's still holds.
        os.sched_setaffinity(0, ALL_CORES)
    except (OSError, RecursionError) as error:
        return f"left behind: {error}"
    if isolation.count_ipc_objects():
        return "left behind: System V IPC objects"
    return "" if _read_init_state() == before else "init has other limits than before"


def _empty(folder: Path) -> None:
    if stat.S_IMODE(folder.stat().st_mode) != WRITABLE_MODE:
        folder.chmod(WRITABLE_MODE)
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()
    for name in os.listxattr(folder):
        os.removexattr(folder, name)
