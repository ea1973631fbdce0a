"""Run the service until SIGTERM: `python -m treadle_placement`."""

from treadle_runtime.server import Service, run

from treadle_placement.config import PlacementSettings
from treadle_placement.wire import wire

SERVICE = Service(PlacementSettings, wire)

if __name__ == "__main__":
    run(SERVICE)
