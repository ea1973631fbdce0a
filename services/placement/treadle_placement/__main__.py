"""Run the placement service: `python -m treadle_placement`."""

from treadle_runtime.server import run

from treadle_placement.config import PlacementSettings
from treadle_placement.wire import wire

if __name__ == "__main__":
    run(PlacementSettings, wire)
