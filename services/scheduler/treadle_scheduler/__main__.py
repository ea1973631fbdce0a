"""Run the service until SIGTERM: `python -m treadle_scheduler`."""

from treadle_runtime.server import Service, run

from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.wire import wire

SERVICE = Service(SchedulerSettings, wire)

if __name__ == "__main__":
    run(SERVICE)
