"""Run as the init of a sandbox: take the service's requests, run the tool in processes of its own,
and answer how each ended.

The supervisor owns the sandbox's child processes and their deadlines. Invariants: foreign code
never runs in this process, so that nothing in the sandbox can answer the service in its place; this
process never has in its memory what an action receives or sends (content.py), as the processes of
foreign code are its forks; the kernel lets no process inside the sandbox kill or stop init. What a
call left is removed before another of the same trajectory runs; where that fails, none runs again.
What an agent's code left running in a session is killed before the session's next step.
"""

import contextlib
import gc
import importlib
import os
import resource
import shutil
import signal
import site
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from treadle_tools.sandbox.inside import isolation, messages
from treadle_tools.sandbox.inside.child import Budget, Child, Event, run_order, run_snippet
from treadle_tools.sandbox.inside.content import Content
from treadle_tools.tool import Limits, Status

# For an environment to answer after code that it ran has used up the time
ENVIRONMENT_GRACE_S = 1.0
WRITABLE = (Path("/tmp"), Path("/dev/shm"))  # all folders that a sandbox can write
WRITABLE_MODE = 0o700
ALL_CORES = range(1024)  # the widest mask that the standard library can set
HIGHEST_PID = 1 << 22  # of Linux
MOST_SWEEPS = 10  # over all processes, as those that are killed may have forked
MOST_WAITS, WAIT_S = 100, 0.001  # a process is reaped once its parent has ended
RESOURCE_LIMITS = tuple(
    getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")
)


@dataclass(frozen=True)
class Worker:
    """A tool that this process has imported.

    program: what the tool's `entry` names. hidden: foreign code runs beside it, and must not reach
    into it. baseline_bytes: address space.
    """

    program: Callable[..., Any]
    hidden: bool
    work_bytes: int
    processes: int
    baseline_bytes: int

    @classmethod
    def load(cls, config: Mapping[str, Any]) -> "Worker":
        """Import the tool and its preloaded modules.

        Any failure ends the process; its stderr has the reason.
        """
        for name in config["preload"]:
            importlib.import_module(name)
        module, _, attribute = str(config["entry"]).partition(":")
        for make in (site.setquit, site.setcopyright, site.sethelper):
            make()  # `exit`, `help` and the like, which Python has unless it is started with -S
        program: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        gc.collect()
        # So that a fork's garbage collector does not copy every page of the preloaded modules
        gc.freeze()
        baseline_bytes = pages * resource.getpagesize()
        return cls(
            program,
            bool(config["hidden"]),
            int(config["work_bytes"]),
            int(config["processes"]),
            baseline_bytes,
        )


def hide_standard_streams() -> tuple[int, int]:
    """Move standard input and output to other numbers, where nothing imported from now on finds
    them.
    """
    streams = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return streams


@dataclass(frozen=True)
class Request:
    """One request of the service, with its body.

    op, id, limits, again: as of `Sandbox.ask`.

    body: its arguments, which only the process that it is for reads.
    """

    header: Mapping[str, Any]
    body: Content

    def close(self) -> None:
        self.body.close()


class Requests(Protocol):
    """Source of requests, to which the answers go back."""

    def next_request(self) -> Request | None:
        """Return the next request, which the caller closes; None where there will be no more."""

    def answer(self, header: Mapping[str, Any], printed: Content, answer: Content) -> None:
        """Send an answer (`read_answer`), if anybody still reads it.

        The header has the lengths of both contents.
        """


class Supervisor:
    """Answers requests, which `Sandbox.ask` of the service describes, one at a time.

    The last answer stays here, with its request's id: the next service can `recall` what a killed
    one did not pass on.
    """

    def __init__(self, worker: Worker, *, counted: bool = True) -> None:
        """Fork the first process. counted: whether a control group counts the memory of this
        sandbox."""
        self._run_order = partial(run_order, worker.program, hidden=worker.hidden, counted=counted)
        self._worker = worker
        self._environment: Child | None = None
        self._warm: Child | None = None
        self._finished: Child | None = None
        self._has_run_python = False
        self._last: dict[str, Any] = {"id": ""}
        self._printed, self._answer = Content(0), Content(0)  # of the last answer
        self._unread = Content(0)  # of what an environment prints, which is no observation
        self._before = _read_init_state()
        self._soiled = ""
        self._newest = 0
        self._fork()

    def serve(self, requests: Requests) -> None:
        """Answer one request after the other until there are no more."""
        while (request := requests.next_request()) is not None:
            printed, answer = self._printed, self._answer
            if request.header["op"] != "recall":
                self._last = self._carry_out(request, printed, answer)
            header = self._last
            sizes = {"printed": printed.size, "answer": answer.size, "truncated": printed.cut}
            requests.answer({**header, **sizes}, printed, answer)
            if self._finished is not None:  # after the answer, because it takes half a millisecond
                self._finished.kill()
                self._finished = None
                if header["again"] and not (soiled := _clean(self._before)):
                    self._fork()
                elif header["again"]:
                    self._soiled = soiled
            request.close()
            if self._has_run_python:
                self._kill_leftovers()
                self._fork()
                self._has_run_python = False

    def _carry_out(self, request: Request, printed: Content, answer: Content) -> dict[str, Any]:
        started = time.monotonic()
        limits = Limits(**request.header["limits"])
        printed.clear(limits.output_bytes)
        answer.clear(messages.MOST_ANSWER_BYTES)
        status = self._start_and_wait(request, limits, printed, answer)
        return {
            **status,
            "id": request.header["id"],
            "most_output": limits.output_bytes,
            "execution_s": time.monotonic() - started,
            "alive": self._environment is not None,
            # Only process 1 of namespaces of its own can remove what a call left: every other
            # process is the call's.
            "again": bool(request.header.get("again")) and not self._soiled and os.getpid() == 1,
        }

    def _start_and_wait(
        self, request: Request, limits: Limits, printed: Content, answer: Content
    ) -> dict[str, Any]:
        """Have the request carried out; return how it ended, where the answer does not contain
        that."""
        op, body = request.header["op"], request.body
        if op == "call" and self._soiled:
            return {"status": Status.CRASHED, "error": self._soiled, "soiled": True}
        if op == "call":
            self._finished = self._start(op, limits, body)
            runs_code = self._worker.program is run_snippet
            return _wait(self._finished, limits, printed, answer, runs_code=runs_code)
        if op == "open":
            self._environment = self._start(op, limits, body)
        elif self._environment is not None:
            self._environment.send({"op": op, "cores": limits.cpu_cores}, body.file)
        return self._wait_for_environment(limits, printed, answer)

    def _fork(self) -> None:
        """Have a process ready for the next order: forking a worker with large libraries takes
        milliseconds."""
        if self._warm is None:
            self._warm = Child(self._run_order)

    def _start(self, op: str, limits: Limits, body: Content) -> Child:
        """Give a process its order.

        An environment's CPU seconds add up over its steps, so it has no limit on them.
        """
        self._fork()
        child, self._warm = self._warm, None
        assert child is not None
        budget = Budget(
            memory_bytes=limits.memory_bytes,
            baseline_bytes=self._worker.baseline_bytes,
            file_bytes=self._worker.work_bytes,
            processes=self._worker.processes,
            cpu_s=None if op == "open" else limits.wall_s * limits.cpu_cores,
        )
        child.send({"op": op, "budget": vars(budget), "cores": limits.cpu_cores}, body.file)
        return child

    def _wait_for_environment(
        self, limits: Limits, printed: Content, answer: Content
    ) -> dict[str, Any]:
        """Wait for the environment's next answer, and run the Python that it orders until then."""
        if (environment := self._environment) is None:
            return {"status": Status.CRASHED, "error": "the environment has ended"}
        deadline = time.monotonic() + limits.wall_s
        try:
            while (
                event := environment.next_event(deadline, self._unread, answer)
            ).kind == messages.ORDER:
                self._run_python(environment, limits, answer)
                deadline = max(deadline, time.monotonic() + ENVIRONMENT_GRACE_S)
        except (messages.FrameError, OSError) as error:
            event, ended = Event(late=True), {"status": Status.CRASHED, "error": str(error)}
        else:
            ended = _ending(event, limits)
        if event.kind != messages.ANSWER:
            environment.kill()
            self._environment = None
        return ended

    def _run_python(self, environment: Child, limits: Limits, order: Content) -> None:
        """Run a piece of Python that an environment has ordered, and send it the result."""
        if self._has_run_python:
            self._kill_leftovers()  # of the piece before
        self._has_run_python = True
        printed, answer = Content(limits.output_bytes), Content(messages.MOST_ANSWER_BYTES)
        try:
            child = self._start("python", limits, order)
            try:
                ended = _wait(child, limits, printed, answer, runs_code=True)
            finally:
                child.kill()
            header = {**ended, "truncated": printed.cut, "most_output": limits.output_bytes}
            environment.send(header, printed.file, answer.file)
        finally:
            printed.close()
            answer.close()

    def _kill_leftovers(self) -> None:
        """Kill and reap every process but this one, the environment with those that it started, and
        a warm one, which it forks."""
        # Without namespaces of its own a sandbox does not know which processes are its
        if os.getpid() != 1:
            return
        last = HIGHEST_PID
        with contextlib.suppress(OSError):  # foreign code has used up the processes
            self._fork()
        if self._warm is not None:
            # The kernel numbers processes upwards, and begins anew above the highest number.
            last = self._warm.pid if self._warm.pid > self._newest else HIGHEST_PID
            self._newest = self._warm.pid
        kept = [child.pid for child in (self._environment, self._warm) if child is not None]
        for _ in range(MOST_SWEEPS):
            others = [pid for pid in range(2, last) if _session_of(pid) not in (None, *kept)]
            if not others:
                return
            _end(others)


def _wait(
    child: Child, limits: Limits, printed: Content, answer: Content, *, runs_code: bool
) -> dict[str, Any]:
    """Wait for the one answer of a child, which the caller kills afterwards.

    runs_code: the child runs an agent's program, which may end itself, or become another program.
    Returns how the child ended, where it sent none.
    """
    try:
        event = child.next_event(time.monotonic() + limits.wall_s, printed, answer)
        if runs_code and event.wait_status == 0:
            return {"status": Status.OK, "error": ""}
        return _ending(event, limits)
    except messages.FrameError as error:
        return {"status": Status.CRASHED, "error": f"{messages.NOT_VALID}: {error}"}


def _ending(event: Event, limits: Limits) -> dict[str, Any]:
    """Return the status and error of an event that is no answer."""
    if event.late:
        return {"status": Status.TIMED_OUT, "error": f"stopped after {limits.wall_s:g} s"}
    if event.wait_status is None:
        return {}
    if not os.WIFSIGNALED(event.wait_status):
        code = os.waitstatus_to_exitcode(event.wait_status)
        return {"status": Status.CRASHED, "error": f"ended without an answer, exit code {code}"}
    number = os.WTERMSIG(event.wait_status)
    if number == signal.SIGXCPU:
        cpu_s = limits.wall_s * limits.cpu_cores
        return {
            "status": Status.TIMED_OUT,
            "error": f"stopped after more than {cpu_s:g} CPU seconds",
        }
    # Of real-time signals only two have one
    names = {each.value: each.name for each in signal.Signals}
    return {"status": Status.CRASHED, "error": f"killed by {names.get(number, f'signal {number}')}"}


def _end(pids: Sequence[int]) -> None:
    """Kill processes, and reap those that no other process will."""
    left = set(pids)
    for _ in range(MOST_WAITS):
        for pid in sorted(left):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # its parent has not ended yet
                os.waitpid(pid, os.WNOHANG)
        left = {pid for pid in left if _session_of(pid) is not None}
        if not left:
            return
        time.sleep(WAIT_S)


def _session_of(pid: int) -> int | None:
    """Return the session of a process, which is that of the `Child` it descends from unless it made
    its own; None where there is no such process. Works without /proc, which a sandbox of root's has
    not."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _read_init_state() -> tuple[object, ...]:
    """Return what processes of the same user may change of init and of the folders, and what later
    calls would find."""
    limits = [resource.getrlimit(which) for which in RESOURCE_LIMITS]
    folders = [isolation.read_inode_flags(folder) for folder in WRITABLE]
    ranks = (
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        *isolation.read_io_and_timer_ranks(),
    )
    return *limits, *folders, *ranks


def _clean(before: tuple[object, ...]) -> str:
    """Remove what a call left in the sandbox, and kill every other process.

    before: the state of init at its start.

    Returns what could not be removed; empty where the sandbox is as it was.
    """
    # A process that forks meanwhile is killed before its fork is done
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
    try:
        for folder in WRITABLE:
            _empty(folder)
        # A mask of cores that the call set here would hold for later children; the control group's
        # still holds.
        os.sched_setaffinity(0, ALL_CORES)
    except (OSError, RecursionError) as error:
        return f"left behind: {error}"
    if isolation.count_ipc_objects():
        return "left behind: System V IPC objects"
    return "" if _read_init_state() == before else "init, or a folder, is not as it was"


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
    os.utime(folder, (0, 0))
