"""How the container of a tool is made: image, command, folders to read, limits. The same for Docker and Kubernetes.

Invariant: nothing in it says where it runs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from treadle_tools.sandbox.bubblewrap import ENVIRONMENT, NOBODY
from treadle_tools.sandbox.cell import WORKER_PROCESSES
from treadle_tools.tool import MIB, Tool

USER = NOBODY
CODE = "/opt/treadle-code"  # where the worker's code is shown, unless the image has it
START_BYTES = 512 * MIB  # for imports, until the worker has said what it holds
MOST_FILES = 16384  # inodes of /tmp, as in bubblewrap's cells
MOST_DESCRIPTORS = 1024
PACKAGE = "treadle_tools"
VARIABLES = MappingProxyType({name: value for name, value in ENVIRONMENT.items() if name != "PATH"})  # the image's own
BOOT = (
    "import sys, json; config = json.loads(sys.argv[1]); sys.path += config['paths']; "
    "from treadle_tools.inside.container import main; main(config)"
)
INTERPRETER = ("python3", "-I", "-B", "-X", "utf8")


@dataclass(frozen=True)
class Recipe:
    """See the module. code: path on this machine -> path inside, read-only; empty: the image has it. network: the name
    of one; empty: none.
    """

    tool: str
    image: str
    argv: tuple[str, ...]
    code: tuple[tuple[Path, str], ...]
    cpu_cores: int
    memory_bytes: int
    work_bytes: int
    processes: int
    network: str = ""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment, beside the image's own."""
        return VARIABLES


def recipe_of(tool: Tool, *, image: str, code_in_image: bool, silence_s: float) -> Recipe:
    """How a worker of `tool` is started. silence_s: after which it ends by itself.

    Raises ModuleNotFoundError where its code is to be shown from here and is not here.
    """
    config = {
        "paths": [] if code_in_image else [CODE],
        "tool": tool.name,
        "entry": tool.entry,
        "environment": tool.kind == "environment",
        "preload": list(tool.preload),
        "work_bytes": tool.work_bytes,
        "processes": tool.processes,
        "drop_root": False,
        "silence_s": silence_s,
    }
    return Recipe(
        tool=tool.name,
        image=tool.image or image,
        argv=(*INTERPRETER, "-c", BOOT, json.dumps(config)),
        code=() if code_in_image else _code_of(tool),
        cpu_cores=tool.limits.cpu_cores,
        memory_bytes=tool.limits.memory_bytes + START_BYTES,
        work_bytes=tool.work_bytes,
        processes=tool.processes + WORKER_PROCESSES,
        network=tool.network,
    )


def _code_of(tool: Tool) -> tuple[tuple[Path, str], ...]:
    """This package, and the package or module of the tool itself; what those import is the image's matter."""
    shown = {}
    for top in (PACKAGE, tool.entry.partition(":")[0].partition(".")[0]):
        spec = find_spec(top)
        if spec is None or (spec.origin is None and not spec.submodule_search_locations):
            raise ModuleNotFoundError(f"tool {tool.name!r}: no module named {top!r}", name=top)
        places = list(spec.submodule_search_locations or ())
        path = Path(places[0]) if places else Path(str(spec.origin))
        shown[path.resolve()] = f"{CODE}/{path.name}"
    return tuple(shown.items())
