"""Process 1 of a cell: takes the service's requests, runs the tool in processes of its own, says how each ended.

Owns: the cell's children and their deadlines. Invariant: foreign code never runs in this process, so nothing in the
cell can speak to the service in its place; the kernel lets nobody inside the cell kill or stop process 1.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from treadle_tools.sandbox.inside import child as leftovers
from treadle_tools.sandbox.inside import environments, frames, kernel, snippet
from treadle_tools.sandbox.inside.child import Budget, Captured, Child, Exited, TimedOut
from treadle_tools.sandbox.inside.frames import Lines
from treadle_tools.tool import Status

ENVIRONMENT_GRACE_S = 1.0  # for an environment to answer after code that it ran has used up the time


@dataclass(frozen=True)
class Worker:
    """What a zygote knows of its tool. program: what the tool's `entry` names."""

    program: Callable[..., Any]
    environment: bool
    work_bytes: int
    processes: int
    baseline_bytes: int


@dataclass(frozen=True)
class Allowance:
    """The limits of one request, as they arrive."""

    memory_bytes: int
    wall_s: float
    output_bytes: int
    cpu_cores: int

    @property
    def cpu_s(self) -> float:
        """CPU seconds that fit in."""
        return self.wall_s * self.cpu_cores

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> "Allowance":
        """The `limits` of a request."""
        return cls(**request["limits"])


class Requests(Protocol):
    """Where requests come from, and answers go to."""

    def next_request(self) -> tuple[dict[str, Any], int | None] | None:
        """The next one, and the open file that came with it; None where there will be no more."""
        ...

    def answer(self, message: Mapping[str, Any]) -> None:
        """Say it to whoever asks, if anybody still does."""
        ...


class Supervisor:
    """Answers requests one at a time: `call` (stateless); `open`, `step`, `snapshot` and `restore` (environment, the
    last two with a file); `recall` (the last answer).

    After a call that says that there will be another (`again`, and so does its answer) what it left is removed. Where
    that cannot be done, the next call is refused (`soiled`) and has not run.

    The last answer stays here, with the id of its request: a service that was killed before it had passed it on can be
    followed by one that does.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._environment: Child | None = None
        self._spare: Child | None = None
        self._spent: Child | None = None
        self._has_run_python = False
        self._last: dict[str, Any] = {"id": ""}
        self._before = leftovers.Standing.now()
        self._soiled = ""

    def serve(self, control: socket.socket) -> None:
        """Answer whoever the keeper sends a line from, the newest alone, until the keeper lets go of `control`."""
        self._prepare()
        frames.send(control, {"hello": os.getpid()})
        self.converse(Lines(control))

    def converse(self, requests: Requests) -> None:
        """Answer one request after the other until there are no more."""
        self._prepare()
        while (received := requests.next_request()) is not None:
            request, file = received
            if request["op"] == "snapshot":  # changes nothing, so that the last answer stays the last step's
                requests.answer(self._timed_answer(request, file))
            else:
                if request["op"] != "recall":
                    self._last = self._timed_answer(request, file)
                requests.answer(self._last)
            if self._spent is not None:  # after the answer: it takes half a millisecond, and nobody needs it
                self._spent.kill()
                self._spent = None
                if self._last["again"]:
                    self._soiled = leftovers.remove(self._before)
                    self._prepare()
            if file is not None:
                os.close(file)
            if self._has_run_python:
                self._prepare()

    def _timed_answer(self, request: Mapping[str, Any], file: int | None) -> dict[str, Any]:
        started = time.monotonic()
        reply = self._answer(request, Allowance.of(request), file)
        reply["id"] = request["id"]
        reply["execution_s"] = time.monotonic() - started
        reply["alive"] = self._environment is not None
        reply["again"] = bool(request.get("again")) and not self._soiled and leftovers.removable()
        return reply

    def _prepare(self) -> None:
        """Have a process ready for the next order: forking one of a worker with large libraries takes milliseconds."""
        if self._spare is None:
            self._spare = Child(lambda link: labour(self._worker, link))

    def _ordered(self, op: str, arguments: Any, allowed: Allowance, file: int | None = None) -> Child:
        """A process that has been told what to do. An environment's CPU seconds add up over its steps: no limit
        there.
        """
        self._prepare()
        child, self._spare = self._spare, None
        assert child is not None
        budget = Budget(
            memory_bytes=allowed.memory_bytes,
            baseline_bytes=self._worker.baseline_bytes,
            file_bytes=self._worker.work_bytes,
            processes=self._worker.processes,
            cpu_s=None if op in ("open", "restore") else allowed.cpu_s,
        )
        child.send({"op": op, "arguments": arguments, "budget": asdict(budget), "cores": allowed.cpu_cores}, file)
        return child

    def _answer(self, request: Mapping[str, Any], allowed: Allowance, file: int | None) -> dict[str, Any]:
        op, arguments = str(request["op"]), request["arguments"]
        if op == "call" and self._soiled:
            return _reply(Status.CRASHED, Captured(0), error=self._soiled) | {"soiled": True}
        if op == "call":
            self._spent = self._ordered(op, arguments, allowed)
            return self._heard(self._spent, allowed)
        if op in ("open", "restore"):
            self._environment = self._ordered(op, arguments, allowed, file)
        elif self._environment is not None:
            self._environment.send({op: arguments, "cores": allowed.cpu_cores}, file)
        return self._environment_answer(allowed)

    def _heard(self, child: Child, allowed: Allowance) -> dict[str, Any]:
        """The one answer of a child, which is to be killed afterwards."""
        captured = Captured(allowed.output_bytes)
        try:
            event = child.next_event(time.monotonic() + allowed.wall_s, captured)
        except frames.FrameError as error:
            return _reply(Status.CRASHED, captured, error=str(error))
        return _told(event, captured, allowed)

    def _environment_answer(self, allowed: Allowance) -> dict[str, Any]:
        """The environment's next answer; on the way there it may ask for Python to be run."""
        environment = self._environment
        if environment is None:
            return _reply(Status.CRASHED, Captured(0), error="the environment has ended")
        deadline = time.monotonic() + allowed.wall_s
        unread = Captured(0)  # an environment's prints are nobody's observation
        try:
            while True:
                event = environment.next_event(deadline, unread)
                if not isinstance(event, dict) or "python" not in event:
                    break
                self._has_run_python = True
                child = self._ordered("python", {"code": event["python"]}, allowed)
                try:
                    answer = self._heard(child, allowed)
                finally:
                    child.kill()
                environment.send(answer)
                deadline = max(deadline, time.monotonic() + ENVIRONMENT_GRACE_S)
        except (frames.FrameError, OSError) as error:
            event = {"status": Status.CRASHED, "error": str(error), "fatal": True}
        captured = Captured(allowed.output_bytes)
        if not isinstance(event, dict) or event.pop("fatal", False):
            environment.kill()
            self._environment = None
        return _told(event, captured, allowed)


def _told(event: dict[str, Any] | Exited | TimedOut, captured: Captured, allowed: Allowance) -> dict[str, Any]:
    if isinstance(event, TimedOut):
        return _reply(Status.TIMED_OUT, captured, error=f"stopped after {allowed.wall_s:g} s")
    if isinstance(event, Exited):
        return _ended(event.wait_status, captured, allowed)
    captured.add(str(event.pop("output", "")).encode("utf-8", "backslashreplace"))
    reply = _reply(Status(str(event.pop("status", Status.CRASHED))), captured)
    return {**event, **reply, "error": str(event.get("error", ""))}


def _ended(wait_status: int, captured: Captured, allowed: Allowance) -> dict[str, Any]:
    """A process that ended without an answer."""
    if not os.WIFSIGNALED(wait_status):
        code = os.waitstatus_to_exitcode(wait_status)
        return _reply(Status.CRASHED, captured, error=f"ended without an answer, exit code {code}")
    number = os.WTERMSIG(wait_status)
    if number == signal.SIGXCPU:
        return _reply(Status.TIMED_OUT, captured, error=f"stopped after more than {allowed.cpu_s:g} CPU seconds")
    return _reply(Status.CRASHED, captured, error=f"killed by {signal.Signals(number).name}")


def _reply(status: Status, captured: Captured, *, error: str = "") -> dict[str, Any]:
    return {"status": status, "output": captured.text(), "truncated": captured.cut, "error": error}


def labour(worker: Worker, link: socket.socket) -> None:
    """The main of a child: waits for its one order and does it, within the order's budget."""
    received = frames.receive_with_file(link)
    if received is None:
        return
    order, file = received
    Budget(**order["budget"]).enforce()
    arguments = order["arguments"]
    environments.tell_cores(order)
    if order["op"] == "open":
        environments.begin(worker.program, arguments, link)
        return
    if order["op"] == "restore" and file is not None:
        environments.go_on(file, arguments, link)
        return
    kernel.set_dumpable(True)  # nothing to hide, and some programs read their own /proc
    program = snippet.run_tool if order["op"] == "python" else worker.program
    environments.answer(link, lambda: program(arguments))
