"""Run the service until SIGTERM: `python -m treadle_console`."""

from treadle_runtime.server import Service, run

from treadle_console.config import ConsoleSettings
from treadle_console.wire import wire

SERVICE = Service(ConsoleSettings, wire)

if __name__ == "__main__":
    run(SERVICE)
