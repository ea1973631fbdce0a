"""Convert between messages and the core: queries in, forecasts out, facts into evidence."""

from array import array

from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.predictor.v1 import predictor_pb2
from treadle.scheduler.v1 import scheduler_pb2
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle_core.model import Estimate
from treadle_core.ranking.estimator import Forecast, Progress
from treadle_core.ranking.evidence import Ended, Evidence
from treadle_runtime.fields import (
    at_most,
    identifier,
    non_empty,
    non_negative,
    number_of,
    require,
    require_duration,
    seconds,
)

LONGEST_PROMPT_ID_CHARS = 256
TOKEN_ID_BYTES = 4  # int32

FACT_KINDS = ("trajectory_opened", "step_finished", "trajectory_closed")
# for a model that reads text
LEARNED_FACT_KINDS = (*FACT_KINDS, "step_started", "engine_joined", "weights_updated")

# fields of a query and of Progress
COUNTS = ("turn", "gen_tokens", "context_tokens", "prompt_tokens", "max_total_tokens")


def progress_of(query: predictor_pb2.Query, at: str) -> Progress:
    """Check and convert a query; `at` is its path in the request. Raises InvalidArgument naming the
    field."""
    identifier(f"{at}.trajectory_id", query.trajectory_id)
    at_most(
        f"{at}.prompt_id", non_empty(f"{at}.prompt_id", query.prompt_id), LONGEST_PROMPT_ID_CHARS
    )
    non_negative(f"{at}.sample", query.sample)
    counts = {name: non_negative(f"{at}.{name}", getattr(query, name)) for name in COUNTS}
    require(
        len(query.context.int32_le) % TOKEN_ID_BYTES == 0,
        f"{at}.context.int32_le",
        f"must be whole int32 ids, {TOKEN_ID_BYTES} bytes each, is {len(query.context.int32_le)} "
        "bytes",
    )
    tool_s = require_duration(f"{at}.tool_time", query.tool_time)
    return Progress(query.trajectory_id, query.prompt_id, **counts, tool_s=tool_s)


def context_of(query: predictor_pb2.Query) -> list[int]:
    """Return the token ids in a query; none where it has none."""
    return array("i", query.context.int32_le).tolist()


def prediction_of(trajectory_id: str, forecast: Forecast) -> predictor_pb2.Prediction:
    """Return the answer to a query."""
    return predictor_pb2.Prediction(
        trajectory_id=trajectory_id,
        remaining_tokens=quantiles_of(forecast.remaining_tokens),
        remaining_turns=quantiles_of(forecast.remaining_turns),
        estimator=number_of(forecast.source, predictor_pb2.Estimator),
        model_version=forecast.model_version,
        remaining_tool_s=quantiles_of(forecast.remaining_tool_s),
        remaining_observed_tokens=quantiles_of(forecast.remaining_observed_tokens),
    )


def quantiles_of(estimate: Estimate) -> Quantiles:
    """Return percentiles as a message."""
    return Quantiles(p10=estimate.p10, p50=estimate.p50, p90=estimate.p90)


def learn(evidence: Evidence, fact: Fact, weight_version: int | None = None) -> Ended | None:
    """Add a fact to the evidence, once, and return the trajectory that it ended, if any.
    weight_version: the version that sampled that trajectory.

    Facts without a trajectory or a prompt, or with a negative count, are left out: they have no
    caller who could be refused.
    """
    match fact.WhichOneof("fact"):
        case "trajectory_opened":
            opened = fact.trajectory_opened
            if opened.trajectory_id and opened.prompt_id:
                evidence.open_trajectory(opened.trajectory_id, opened.rollout_id, opened.prompt_id)
        case "step_finished":
            step = fact.step_finished
            if step.step.turn >= 0 and step.output_tokens >= 0:
                evidence.add_step(step.step.trajectory_id, step.step.turn, step.output_tokens)
        case "trajectory_closed":
            closed = fact.trajectory_closed
            if (
                closed.trajectory_id
                and closed.prompt_id
                and closed.gen_tokens >= 0
                and closed.turns >= 0
            ):
                ended = Ended(
                    trajectory_id=closed.trajectory_id,
                    rollout_id=closed.rollout_id,
                    prompt_id=closed.prompt_id,
                    gen_tokens=closed.gen_tokens,
                    turns=closed.turns,
                    own_end=closed.outcome == scheduler_pb2.OUTCOME_FINISHED,
                    weight_version=weight_version,
                    observed_tokens=max(0, closed.observed_tokens),
                    tool_s=max(0.0, seconds(closed.tool_time)),
                )
                return ended if evidence.close_trajectory(ended) else None
    return None
