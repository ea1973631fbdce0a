"""`python -m treadle_runtime.start`: the command of the images. Starts the service that TREADLE_SERVICE names.

An image holds the kernels that its service compiles (TREADLE_KERNELS), so that no start waits for a compiler. Numba
only reads from a folder that it could also write to, and the image's root is read-only: they are copied to
NUMBA_CACHE_DIR first. With `--compile` it compiles them (`compile_kernels` of the service's wire module), and ends: for
the build of the image.
"""

import importlib
import os
import runpy
import shutil
import sys
from pathlib import Path


def main() -> None:
    service = os.environ.get("TREADLE_SERVICE", "")
    if not service.isidentifier():
        sys.exit(f"TREADLE_SERVICE must name a service, e.g. scheduler, is {service!r}")
    if sys.argv[1:] == ["--compile"]:
        wire = importlib.import_module(f"treadle_{service}.wire")
        getattr(wire, "compile_kernels", lambda: None)()
        return
    kernels, cache = (Path(os.environ.get(name, "")) for name in ("TREADLE_KERNELS", "NUMBA_CACHE_DIR"))
    if kernels.is_absolute() and kernels.is_dir() and cache.is_absolute() and not cache.exists():
        shutil.copytree(kernels, cache)
    runpy.run_module(f"treadle_{service}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
