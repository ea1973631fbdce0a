"""Run the console: `python -m treadle_console`."""

from treadle_runtime.server import run

from treadle_console.config import ConsoleSettings
from treadle_console.wire import wire

if __name__ == "__main__":
    run(ConsoleSettings, wire)
