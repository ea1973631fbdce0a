"""Check a machine: whether it can run the services, the tools' sandboxes and engines.

The checks that a mesh makes before it starts are `treadle_cli.mesh.checks`; here they become
findings.
"""

import os
import platform
import resource
from collections.abc import Callable, Iterator

import psutil

from treadle_cli.doctor.findings import OK, PROBLEM, WARNING, Finding
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh import checks
from treadle_cli.mesh.engines import LEAST_KV_GB
from treadle_cli.mesh.ports import is_free
from treadle_cli.mesh.services import IN_PORT_ORDER

SUBJECT = "this machine"
SERVICES_GB = 1.2  # what a mesh needs at rest without engines (docs/operations.md)
LEAST_FILES = 4096  # a trajectory has about two connections; many systems allow 1024 files
GB = 1e9


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
