"""`python -m treadle_migrator`: serve until SIGTERM."""

from treadle_runtime.server import run

from treadle_migrator.config import MigratorSettings
from treadle_migrator.wire import wire

if __name__ == "__main__":
    run(MigratorSettings, wire)
