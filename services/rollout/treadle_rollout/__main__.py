"""`python -m treadle_rollout`: serve until SIGTERM."""

from treadle_runtime.server import run

from treadle_rollout.config import RolloutSettings
from treadle_rollout.wire import wire

if __name__ == "__main__":
    run(RolloutSettings, wire)
