"""Run as the first program in a bubblewrap sandbox: import a tool once, then fork spawners, which
fork sandboxes.

A spawner is a fork of the fork server that the daemon has put into a control group once: its
sandboxes start in that group, because moving a process costs the kernel 10 ms. This module owns the
control sockets (the fork server's is descriptor 0 at start). Invariants: one thread; foreign code
never runs here; it gives up root before it imports anything of a tool.
"""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping
from typing import Any

from treadle_tools.sandbox.inside import isolation, messages
from treadle_tools.sandbox.inside.content import Content, send_with
from treadle_tools.sandbox.inside.supervisor import (
    Request,
    Supervisor,
    Worker,
    hide_standard_streams,
)

LONGEST_ORDER_BYTES = 4096
NOBODY = 65534
# Orders of the daemon. counted: by a control group, as to its memory.
SPAWNER, SANDBOX, UNCOUNTED_SANDBOX = b"spawner", b"sandbox", b"uncounted sandbox"


def main(config: Mapping[str, Any]) -> None:
    """Import the tool, then carry out the daemon's orders.

    config: {"entry": "module:callable", "preload": [module], "work_bytes": n, "processes": n,
    "drop_root": bool}.
    """
    requests, answers = hide_standard_streams()
    os.close(answers)
    control = socket.socket(fileno=requests)
    if config["drop_root"]:
        _give_up_root()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    worker = Worker.load(config)
    isolated = _can_isolate(worker.work_bytes)
    control.send(
        messages.encode({"ready": os.getpid(), "isolated": isolated})[messages.HEADER.size :]
    )
    _carry_out_orders(control, worker, isolated=isolated)


def _carry_out_orders(control: socket.socket, worker: Worker, *, isolated: bool) -> None:
    """Start spawners and sandboxes, each with its own control socket, until the daemon closes
    `control`.
    """
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, LONGEST_ORDER_BYTES, 1)
        if not order:
            return
        given = socket.socket(fileno=descriptors[0])
        if order in (SANDBOX, UNCOUNTED_SANDBOX):
            _start_sandbox(worker, control, given, isolated=isolated, counted=order == SANDBOX)
        elif os.fork() == 0:
            control.close()
            control = given
            isolation.die_with_parent(signal.SIGKILL)
            control.send(b"spawner")  # with it the kernel reports this process's id to the daemon
            continue
        given.close()


def _start_sandbox(
    worker: Worker, control: socket.socket, given: socket.socket, *, isolated: bool, counted: bool
) -> None:
    """Fork a sandbox that lives as long as the daemon holds the other end of `given`."""

    def run_init() -> None:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        supervisor = Supervisor(worker, counted=counted)
        messages.send(given, {"hello": os.getpid()})
        supervisor.serve(NewestConnection(given))

    def report(error: OSError) -> None:
        messages.send(given, {"failed": str(error)})

    if isolated:
        try:
            isolation.fork_isolated(worker.work_bytes, run_init, report)
        except OSError as error:
            report(error)
    elif os.fork() == 0:
        try:
            isolation.drop_privileges()
            run_init()
        except OSError as error:
            report(error)
        finally:
            os._exit(0)


def _give_up_root() -> None:
    """Become nobody, with no capability.

    Run by root, bubblewrap needs no user namespace, and starts this as root.
    """
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    isolation.drop_capabilities()
    if not isolation.has_no_new_privileges():
        raise SystemExit("the sandbox lets programs gain privileges")


def _can_isolate(work_bytes: int) -> bool:
    """Return whether the kernel allows namespaces inside bubblewrap.

    Without them, this fork server serves one action only.
    """
    read_end, write_end = os.pipe()
    with contextlib.suppress(OSError):
        isolation.fork_isolated(
            work_bytes, lambda: os._exit(os.write(write_end, b"1") - 1), lambda _: None
        )
    os.close(write_end)
    answer = os.read(read_end, 1)
    os.close(read_end)
    return answer == b"1"


class NewestConnection:
    """Requests of the service, over the newest connection that the daemon has sent through
    `control`.

    Invariants: a request that was not read whole never happened; an answer that could not be sent
    whole stays with the supervisor; the next connection starts at the border of a frame.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._connection: socket.socket | None = None

    def next_request(self) -> Request | None:
        """Return the next request (see Requests); None once the daemon has closed `control`."""
        while True:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            if self._connection is not None:
                poll.register(self._connection, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._control.fileno() in ready:
                if not self._replace():
                    return None
            elif self._connection is not None:
                with contextlib.suppress(OSError, messages.FrameError):
                    if (request := _receive_request(self._connection)) is not None:
                        return request
                self._drop()

    def answer(self, header: Mapping[str, Any], printed: Content, answer: Content) -> None:
        if self._connection is not None:
            try:
                send_with(self._connection, messages.encode(header), printed, answer)
            except OSError:
                self._drop()

    def _replace(self) -> bool:
        """Take the connection that the daemon sends; return False where the daemon has ended
        instead."""
        try:
            order, descriptors, _, _ = socket.recv_fds(self._control, LONGEST_ORDER_BYTES, 1)
        except OSError:
            return False
        if not order:
            return False
        self._drop()
        self._connection = socket.socket(fileno=descriptors[0])
        return True

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _receive_request(connection: socket.socket) -> Request | None:
    if (received := messages.receive(connection)) is None:
        return None
    header, _ = received
    body = Content(messages.MAX_FRAME_BYTES)
    request = Request(header, body)
    try:
        body.receive_exactly(connection, int(header["body"]))
    except BaseException:
        request.close()
        raise
    return request
