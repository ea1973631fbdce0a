"""Measure the predictor (docs/metrics.md): its answers, and how right its first predictions
were."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from treadle_core.ranking.estimator import Forecast, Progress
from treadle_runtime.telemetry import Metrics

MOST = 65_536  # predictions that wait for the end of their trajectory; about 20 MB
# The bands of predicted percentiles in which the truth lies. Of a calibrated predictor, 10, 40, 40
# and 10%.
BANDS = ("below_p10", "p10_to_p50", "p50_to_p90", "above_p90")


class Meters:
    """Instruments of the predictor.

    It owns the first prediction of each running trajectory, to compare it with what the trajectory
    generates.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._answer_s = metrics.seconds("answer", "What a call with questions took")
        self._answers = metrics.total("predictions", "prediction", "Answers by estimator")
        self._judged = metrics.total(
            "judged", "prediction", "First predictions, by where the truth lay"
        )
        for band in BANDS:
            self._judged(0, {"band": band})  # a share needs all of them
        self._first: OrderedDict[str, Forecast] = OrderedDict()

    def record_answers(
        self, took_s: float, asked: Sequence[Progress], forecasts: Sequence[Forecast]
    ) -> None:
        """Count the answers of one call, and keep the prediction before a trajectory's first
        step."""
        self._answer_s(took_s)
        for progress, forecast in zip(asked, forecasts, strict=True):
            if progress.turn == 0 and progress.trajectory_id not in self._first:
                self._first[progress.trajectory_id] = forecast
                if len(self._first) > MOST:
                    self._first.popitem(last=False)
        for source, count in Counter(forecast.source for forecast in forecasts).items():
            self._answers(count, {"estimator": source.name.lower()})

    def judge(self, trajectory_id: str, gen_tokens: int | None) -> None:
        """Compare the first prediction of an ended trajectory with its length.

        gen_tokens: None where a cap or a client ended it, which does not show whether the
        prediction was right.
        """
        forecast = self._first.pop(trajectory_id, None)
        if forecast is not None and gen_tokens is not None:
            tokens = forecast.remaining_tokens
            above = sum(gen_tokens > quantile for quantile in (tokens.p10, tokens.p50, tokens.p90))
            self._judged(1, {"band": BANDS[above]})
