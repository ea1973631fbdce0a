"""Run the service until SIGTERM: `python -m treadle_predictor`."""

from treadle_runtime.server import Service, run

from treadle_predictor.config import PredictorSettings
from treadle_predictor.wire import wire

SERVICE = Service(PredictorSettings, wire)

if __name__ == "__main__":
    run(SERVICE)
