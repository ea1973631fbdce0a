"""Run the service until SIGTERM: `python -m treadle_gateway`."""

from treadle_runtime.server import Service, run

from treadle_gateway.config import GatewaySettings
from treadle_gateway.wire import wire

SERVICE = Service(GatewaySettings, wire)

if __name__ == "__main__":
    run(SERVICE)
