"""Run services: `python -m treadle_runtime.start scheduler predictor`, or without arguments, as the
images do, those that TREADLE_SERVICE names with commas between.

Several share one process and one event loop; each keeps its own port, settings
(TREADLE_<SERVICE>_<NAME>), certificate and health.
"""

import importlib
import os
import sys

from treadle_runtime.server import Service, run


def main() -> None:
    """Run the services; end the process with a line on stderr where one is not known here."""
    names = sys.argv[1:] or os.environ.get("TREADLE_SERVICE", "").split(",")
    run(*map(find_service, names))


def find_service(name: str) -> Service:
    """Return the service of this name. Raises SystemExit where none is installed."""
    if not name.isidentifier():
        sys.exit(
            f"TREADLE_SERVICE must name services, e.g. scheduler or scheduler,predictor: {name!r} "
            "is no name"
        )
    module = f"treadle_{name}"
    try:
        service = importlib.import_module(f"{module}.__main__").SERVICE
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        sys.exit(
            f"TREADLE_SERVICE names {name!r}, which is not installed here: pip install "
            f"'treadle[{name}]'"
        )
    assert isinstance(service, Service)
    return service


if __name__ == "__main__":
    main()
