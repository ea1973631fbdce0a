"""Run the service until SIGTERM: `python -m treadle_rollout`."""

from treadle_runtime.server import Service, run

from treadle_rollout.config import RolloutSettings
from treadle_rollout.wire import wire

SERVICE = Service(RolloutSettings, wire)

if __name__ == "__main__":
    run(SERVICE)
