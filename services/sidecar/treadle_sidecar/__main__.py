"""Run the service until SIGTERM: `python -m treadle_sidecar`."""

from treadle_runtime.server import Service, run

from treadle_sidecar.config import SidecarSettings
from treadle_sidecar.wire import wire

SERVICE = Service(SidecarSettings, wire)

if __name__ == "__main__":
    run(SERVICE)
