"""`python -m treadle_runtime.start`: the command of the images. Starts the service that TREADLE_SERVICE names."""

import os
import runpy
import sys


def main() -> None:
    service = os.environ.get("TREADLE_SERVICE", "")
    if not service.isidentifier():
        sys.exit(f"TREADLE_SERVICE must name a service, e.g. scheduler, is {service!r}")
    runpy.run_module(f"treadle_{service}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
