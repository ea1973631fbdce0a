"""Run the front door: `python -m treadle_gateway`."""

from treadle_runtime.server import run

from treadle_gateway.config import GatewaySettings
from treadle_gateway.wire import wire

if __name__ == "__main__":
    run(GatewaySettings, wire)
