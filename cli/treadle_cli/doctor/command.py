"""Run `treadle doctor`: check this machine, SGLang servers and a mesh, and print what to change.

A machine is checked for whether it can run the services, the tools' sandboxes and engines. The
checks that a mesh makes before it starts are `treadle_cli.mesh.checks`; here they become findings.
Servers and a mesh are checked by `servers.py` and `mesh.py`.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Annotated

import psutil
import typer
from rich.console import Console

from treadle_cli import exits
from treadle_cli.doctor.findings import OK, PROBLEM, WARNING, Finding, report
from treadle_cli.exits import Terminal, UsageProblem
from treadle_cli.mesh import checks
from treadle_cli.mesh.engines import LEAST_KV_GB
from treadle_cli.mesh.processes import is_free
from treadle_cli.mesh.services import IN_PORT_ORDER
from treadle_cli.options import DEFAULT_PORT, MOST_PORT, AsJson

Urls = Annotated[
    list[str] | None, typer.Argument(help="SGLang servers to look at, e.g. http://127.0.0.1:30000.")
]
SUBJECT = "this machine"
SERVICES_GB = 1.2  # what a mesh needs at rest without engines (docs/operations.md)
LEAST_FILES = 4096  # a trajectory has about two connections; many systems allow 1024 files
GB = 1e9


def doctor(
    urls: Urls = None,
    scheduler: Annotated[
        str, typer.Option(help="host:port of a mesh's scheduler, to look at the mesh too.")
    ] = "",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_PORT, help="Port that a mesh's scheduler would get on this machine."
        ),
    ] = DEFAULT_PORT,
    json_only: AsJson = False,
) -> None:
    """Check this machine, SGLang servers and a mesh, and say what to change. Exit code 1 where
    there is a problem."""
    exits.run(lambda _: run_doctor(urls or [], scheduler, port, json_only, Terminal()))


async def run_doctor(
    urls: list[str], scheduler: str, port: int, json_only: bool, out: Console
) -> int:
    """Check, print, and return the exit code. Raises UsageProblem for a bad URL."""
    from treadle_cli.doctor.servers import check_servers, clean_urls, read_servers

    cleaned = clean_urls(urls)
    with nullcontext() if json_only else exits.err.status("looking"):
        findings = await asyncio.to_thread(lambda: list(check_machine(port)))
        findings += check_servers(await read_servers(cleaned))
        if scheduler:
            from treadle_cli.doctor.mesh import check_mesh

            findings += await check_mesh(scheduler)
    return report(findings, json_only, out)


def check_machine(base_port: int) -> Iterator[Finding]:
    """Yield the findings of this machine; nothing is started. base_port: where the scheduler of a
    mesh would listen."""
    yield Finding(SUBJECT, "python", OK, f"{platform.python_version()} on {platform.machine()}")
    cores = len(os.sched_getaffinity(0))
    gpus = len(checks.list_units()) if checks.has_gpu() else 0
    engines = (
        f"{gpus} accelerators" if gpus else "no accelerator: engines run on the CPU, a core each"
    )
    yield Finding(SUBJECT, "cores", OK, f"{cores} that this process may use; {engines}")
    yield _memory()
    yield _shared_memory()
    yield _files()
    yield _required("sandbox", checks.require_bubblewrap, "bubblewrap makes a sandbox")
    yield _required("NATS", checks.nats_server, "{}")
    engine = _required("SGLang", checks.engine_python, "{}")
    if engine.level == PROBLEM:  # a mesh in front of engines of others needs none
        engine = Finding(
            SUBJECT, engine.check, WARNING, engine.says, f"{engine.do} `treadle attach` needs none."
        )
    yield engine
    yield _ports(base_port)


def _required(check: str, require: Callable[[], object], says: str) -> Finding:
    """Return the finding of a check that raises UsageProblem, whose first line names what is wrong
    and the rest what to do."""
    try:
        return Finding(SUBJECT, check, OK, says.format(require()))
    except UsageProblem as problem:
        wrong, _, do = str(problem).partition("\n")
        return Finding(SUBJECT, check, PROBLEM, wrong, do)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    says = f"{memory.available / GB:.1f} of {memory.total / GB:.1f} GB free"
    if memory.available < SERVICES_GB * GB:
        return Finding(
            SUBJECT,
            "memory",
            PROBLEM,
            says,
            f"The services take {SERVICES_GB} GB: end other programs.",
        )
    return Finding(SUBJECT, "memory", OK, says)


def _shared_memory() -> Finding:
    free_gb = checks.free_gb(checks.MEMORY) if os.access(checks.MEMORY, os.W_OK) else 0.0
    says = f"{free_gb:.1f} GB free"
    if free_gb >= LEAST_KV_GB:
        return Finding(SUBJECT, str(checks.MEMORY), OK, says)
    do = (
        f"KV that moves between engines is kept here if there are {LEAST_KV_GB:g} GB, else on a "
        "disk. "
        "In a container give --shm-size 8g, or name another folder with treadle up --kv-folder."
    )
    return Finding(SUBJECT, str(checks.MEMORY), WARNING, says, do)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= LEAST_FILES or soft == resource.RLIM_INFINITY:
        return Finding(SUBJECT, "open files", OK, f"a process may open {soft}")
    raised = min(hard, 16 * LEAST_FILES) if hard != resource.RLIM_INFINITY else 16 * LEAST_FILES
    do = f"run ulimit -n {raised} before."
    if raised < LEAST_FILES:
        do = (
            "raise nofile in /etc/security/limits.conf, or start the container with --ulimit "
            "nofile=65536."
        )
    why = f"Thousands of trajectories need more connections than that: {do}"
    return Finding(SUBJECT, "open files", WARNING, f"a process may open {soft}", why)


def _ports(base_port: int) -> Finding:
    if base_port == 0:
        return Finding(SUBJECT, "ports", OK, "--port 0 takes free ones")
    names = dict(enumerate(IN_PORT_ORDER, start=base_port))
    taken = [f"{port} ({name})" for port, name in names.items() if not is_free(port)]
    if not taken:
        return Finding(
            SUBJECT, "ports", OK, f"{base_port} to {base_port + len(names) - 1} are free"
        )
    do = "Another mesh runs here, or another program has them: treadle up --port 0 takes free ones."
    return Finding(SUBJECT, "ports", WARNING, f"taken: {', '.join(taken)}", do)
