"""How a tool's worker is started inside a sandbox of any kind: its user, environment variables and command."""

import json
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from treadle_tools.tool import Kind, Tool

NOBODY = 65534
PACKAGE = "treadle_tools"
VARIABLES = MappingProxyType({
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",  # a fork server must have one thread; and one action, one core
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "MPLCONFIGDIR": "/tmp",
})  # fmt: skip
BOOT = (
    "import sys, json; config = json.loads(sys.argv[1]); sys.path += config['paths']; "
    "from treadle_tools.sandbox.inside.{module} import main; main(config)"
)


def worker_arguments(tool: Tool, module: str, paths: Sequence[str], **more: Any) -> list[str]:
    """Arguments of a Python that runs `main` of a module of `inside/`. paths: added to sys.path; more: for `main`."""
    config = {
        "paths": list(paths),
        "entry": tool.entry,
        "preload": list(tool.preload),
        "work_bytes": tool.work_bytes,
        "processes": tool.processes,
        "hidden": tool.kind is Kind.REWARD,
        **more,
    }
    return ["-c", BOOT.format(module=module), json.dumps(config)]


def find_top_level(tool: Tool, name: str) -> ModuleSpec:
    """The package or module at the top of a dotted name that `tool` needs. Raises ModuleNotFoundError without it."""
    top = name.partition(":")[0].partition(".")[0]
    if (spec := find_spec(top)) is None:
        raise ModuleNotFoundError(f"tool {tool.name!r}: no module named {top!r}", name=top)
    return spec
