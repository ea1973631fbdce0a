"""Metrics of the rollout service (docs/metrics.md)."""

from treadle_runtime.telemetry import Metrics

from treadle_rollout.rollouts import Rollout, Rollouts
from treadle_rollout.running import TokenRoom


class Meters:
    """Instruments of the rollout service."""

    def __init__(self, metrics: Metrics, rollouts: Rollouts, room: TokenRoom) -> None:
        self._submit_s = metrics.seconds("submit", "From a submission to its verdict")
        self._samples = metrics.total("samples", "sample", "Submitted samples by verdict")
        self._batches = metrics.total("batches", "batch", "Answers with a batch, repeats included")
        self._makespan_s = metrics.seconds(
            "makespan", "From a rollout's creation to its last sample"
        )
        what = "From nine tenths of a rollout's samples to its last one"
        self._tail_s = metrics.seconds("tail", what)
        self._kept_fraction = 1.0

        def count_open() -> int:
            return sum(not each.buffer.over for each in rollouts)

        def count_buffered() -> int:
            return sum(each.buffer.buffered for each in rollouts)

        metrics.gauge("open", "rollout", "Rollouts that are not over", count_open)
        metrics.gauge("buffered", "sample", "Kept samples that no batch has taken", count_buffered)
        what = (
            "Trained over sampled trajectories of the rollout that finished last; below 0.5 "
            "most are thrown away"
        )
        metrics.gauge("kept_fraction", "share", what, lambda: self._kept_fraction)
        what = "Memory that tokens of running trajectories take"
        metrics.gauge("streaming", "byte", what, lambda: room.taken_bytes)

    def record_submission(self, took_s: float, verdict: str) -> None:
        """Count a submitted sample. verdict: `kept`, or why the sample was dropped."""
        self._submit_s(took_s)
        self._samples(1, {"verdict": verdict})

    def record_last_sample(self, rollout: Rollout) -> None:
        """Record how long a rollout has taken until its last sample came."""
        self._makespan_s(rollout.arrivals_s[-1] - rollout.created_at_s)
        self._tail_s(rollout.tail_s)

    def record_kept_fraction(self, fraction: float) -> None:
        """Record the share of sampled trajectories that a finished rollout trains."""
        self._kept_fraction = fraction

    def record_batch(self) -> None:
        """Count an answer with a batch."""
        self._batches(1)
