"""The first program in the sandbox: imports a tool once, then forks doors, which fork a cell for each action or
session.

A door is a fork of the zygote that the keeper has put into a control group once and for all: cells are born into it,
because moving a process costs the kernel 10 ms. Owns: the control sockets (the zygote's is descriptor 0 at start).
Invariants: one thread; no foreign action ever runs here; it gives up root for good before it imports anything of a
tool's.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treadle_tools.sandbox.inside import cell, frames, kernel
from treadle_tools.sandbox.inside.supervisor import Supervisor, Worker

LONGEST_ORDER_BYTES = 4096
NOBODY = 65534


def main(config: Mapping[str, Any]) -> None:
    """config: {"tool": name, "entry": "module:callable", "environment": bool, "preload": [module], "work_bytes": n,
    "processes": n, "drop_root": bool}."""
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    if config["drop_root"]:
        give_up_root()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    worker = load(config)
    isolated = can_make_cells(worker.work_bytes)
    gc.collect()
    gc.freeze()  # so that a fork's garbage collector does not copy every page of the preloaded modules
    control.send(frames.encode({"ready": os.getpid(), "cells": isolated})[frames.HEADER.size :])
    obey(control, worker, isolated=isolated)


def obey(control: socket.socket, worker: Worker, *, isolated: bool) -> None:
    """Carry out orders until the keeper closes `control`: `cell` and `door`, each with its control socket."""
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, LONGEST_ORDER_BYTES, 1)
        if not order:
            return
        given = socket.socket(fileno=descriptors[0])
        if order == b"cell":
            make_cell(worker, control, given, isolated=isolated)
        elif os.fork() == 0:
            control.close()
            control = given
            kernel.die_with_parent(signal.SIGKILL)
            control.send(b"door")  # the kernel tells the keeper who says so
            continue
        given.close()


def give_up_root() -> None:
    """Become nobody with no capability. bubblewrap started by root runs us as root, so that it needs no user
    namespace.
    """
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.drop_capabilities()
    if not kernel.no_new_privileges():
        raise SystemExit("the sandbox lets programs gain privileges")


def load(config: Mapping[str, Any]) -> Worker:
    """Import the tool and what it preloads. Any failure ends the worker; its stderr says why."""
    for name in config["preload"]:
        importlib.import_module(name)
    module, _, attribute = str(config["entry"]).partition(":")
    program: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return Worker(
        program=program,
        environment=bool(config["environment"]),
        work_bytes=int(config["work_bytes"]),
        processes=int(config["processes"]),
        baseline_bytes=pages * resource.getpagesize(),
    )


def can_make_cells(work_bytes: int) -> bool:
    """Whether the kernel allows namespaces inside the sandbox. Where not, this worker is good for one action only."""
    heard, said = os.pipe()
    with contextlib.suppress(OSError):
        cell.begin(work_bytes, lambda: os._exit(os.write(said, b"1") - 1), lambda _: None)
    os.close(said)
    answer = os.read(heard, 1)
    os.close(heard)
    return answer == b"1"


def make_cell(worker: Worker, control: socket.socket, given: socket.socket, *, isolated: bool) -> None:
    """Fork a cell that `given` holds. control: whose orders are not for it."""

    def first_process() -> None:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        Supervisor(worker).serve(given)

    def failed(error: OSError) -> None:
        frames.send(given, {"failed": str(error)})

    if isolated:
        try:
            cell.begin(worker.work_bytes, first_process, failed)
        except OSError as error:
            failed(error)
    elif os.fork() == 0:
        try:
            cell.close_doors()
            first_process()
        except OSError as error:
            failed(error)
        finally:
            os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
