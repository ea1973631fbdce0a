"""Run the service until SIGTERM: `python -m treadle_migrator`."""

from treadle_runtime.server import Service, run

from treadle_migrator.config import MigratorSettings
from treadle_migrator.wire import wire

SERVICE = Service(MigratorSettings, wire)

if __name__ == "__main__":
    run(SERVICE)
