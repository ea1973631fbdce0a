"""Compare the first prediction of each trajectory with what it generated in the end."""

from collections import OrderedDict

from treadle_core.ranking.estimator import Forecast, Progress
from treadle_runtime.telemetry import Metrics

MOST = 65_536  # predictions that wait for the end of their trajectory; about 20 MB
# Between which of the predicted percentiles the truth lies. Of a calibrated predictor, 10, 40, 40 and 10%.
BANDS = ("below_p10", "p10_to_p50", "p50_to_p90", "above_p90")


class Calibration:
    """Counts by band. A trajectory that a cap or a client ended says nothing about the prediction and is left out."""

    def __init__(self, metrics: Metrics) -> None:
        self._judged = metrics.total("judged", "prediction", "First predictions, by where the truth lay")
        for band in BANDS:
            self._judged(0, {"band": band})  # a share needs all of them
        self._first: OrderedDict[str, Forecast] = OrderedDict()

    def note(self, progress: Progress, forecast: Forecast) -> None:
        """A prediction was made; the one before the first step is kept."""
        if progress.turn == 0 and progress.trajectory_id not in self._first:
            self._first[progress.trajectory_id] = forecast
            if len(self._first) > MOST:
                self._first.popitem(last=False)

    def judge(self, trajectory_id: str, gen_tokens: int | None) -> None:
        """A trajectory has ended; with None, not by itself."""
        forecast = self._first.pop(trajectory_id, None)
        if forecast is not None and gen_tokens is not None:
            tokens = forecast.remaining_tokens
            above = sum(gen_tokens > quantile for quantile in (tokens.p10, tokens.p50, tokens.p90))
            self._judged(1, {"band": BANDS[above]})
