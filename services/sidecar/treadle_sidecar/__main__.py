"""Run the sidecar: `python -m treadle_sidecar`."""

from treadle_runtime.server import run

from treadle_sidecar.config import SidecarSettings
from treadle_sidecar.wire import wire

if __name__ == "__main__":
    run(SidecarSettings, wire)
