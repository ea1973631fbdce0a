"""`python -m treadle_predictor`: serve until SIGTERM."""

from treadle_runtime.server import run

from treadle_predictor.config import PredictorSettings
from treadle_predictor.wire import wire

if __name__ == "__main__":
    run(PredictorSettings, wire)
