"""Run the scheduler: `python -m treadle_scheduler`."""

from treadle_runtime.server import run

from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.wire import wire

if __name__ == "__main__":
    run(SchedulerSettings, wire)
