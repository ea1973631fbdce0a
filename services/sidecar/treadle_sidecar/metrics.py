"""Report the engine's load and the steps that have ended as metrics (docs/metrics.md)."""

from collections.abc import Callable

from treadle.engine.v1 import engine_pb2
from treadle.types import words_of
from treadle_runtime.fields import seconds
from treadle_runtime.telemetry import Metrics

REASONS = words_of(engine_pb2.FinishReason)


def watch_load(metrics: Metrics, load: Callable[[], engine_pb2.Load]) -> None:
    """Report the engine's state in the metrics from now on."""
    gauges = (
        ("running", "step", "Steps that run on the engine", "running_steps"),
        ("waiting", "step", "Steps in the queue in front of the engine", "waiting_steps"),
        ("slots", "step", "Steps that may run at once", "slot_limit"),
        ("oldest_wait", "s", "Wait of the step that waits longest", "oldest_wait_s"),
        ("kv.used", "token", "KV that running steps hold", "kv_tokens_used"),
        ("kv.capacity", "token", "KV that the engine has room for", "kv_tokens_capacity"),
        ("healthy", "engine", "1 while the engine generates, else 0", "engine_healthy"),
    )
    for noun, unit, what, field in gauges:
        metrics.gauge(noun, unit, what, lambda field=field: getattr(load(), field) * 1)


def counting(metrics: Metrics) -> Callable[[engine_pb2.StepFinished], None]:
    """Return a function that counts and times each step that has ended (docs/metrics.md)."""
    step_s = metrics.seconds("step", "Where the time of steps went, by part")
    steps = metrics.total(
        "steps", "step", "Steps by why they ended; one that ended with an error is not among them"
    )
    tokens = metrics.total("tokens", "token", "Sampled tokens")
    cached = metrics.total("cached", "token", "Prompt tokens of steps whose KV was there")
    preemptions = metrics.total("preemptions", "preemption", "Evictions of running steps")
    resumed = metrics.total(
        "resumed", "token", "Tokens that preempted steps sent again, by whether their KV was kept"
    )

    def count(finished: engine_pb2.StepFinished) -> None:
        timing = finished.timing
        waits_s = seconds(timing.preempted) + seconds(timing.weights)
        step_s(max(0.0, seconds(timing.queue) - waits_s), {"part": "queue"})
        for part in ("prefill", "decode", "preempted", "weights"):
            step_s(seconds(getattr(timing, part)), {"part": part})
        steps(1, {"reason": REASONS[finished.reason]})
        tokens(sum(span.end_token - span.start_token for span in finished.version_spans))
        cached(finished.cached_tokens)
        preemptions(finished.preemptions)
        resumed(finished.resumed_cached_tokens, {"kv": "kept"})
        resumed(finished.resumed_prompt_tokens - finished.resumed_cached_tokens, {"kv": "lost"})

    return count
