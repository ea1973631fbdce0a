"""Convert trajectories to an Arrow table and back, to keep them on disk or to pass them to a data
library.

One row a trajectory. Needs pyarrow: `pip install 'treadle-client[arrow]'`. A table holds what a
trainer reads; the steps and spans of a TrajectoryResult are not in it.
"""

from collections.abc import Iterable

import pyarrow as pa

from treadle.types import TrainingTrajectory, TrajectoryResult, VersionSpan

_SPAN = pa.struct(
    [("weight_version", pa.string()), ("start_token", pa.int64()), ("end_token", pa.int64())]
)
SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        # as long as tokens; 1 where the policy sampled
        pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),
        # as long as tokens; natural logarithms
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("version_spans", pa.list_(_SPAN), nullable=False),  # over indexes of tokens
        pa.field("reward", pa.float64()),  # null where a TrajectoryResult has none
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("failed", pa.bool_(), nullable=False),
        pa.field("turns", pa.int32(), nullable=False),
        pa.field("elapsed_s", pa.float64(), nullable=False),
    ]
)


def to_arrow(trajectories: Iterable[TrainingTrajectory | TrajectoryResult]) -> pa.Table:
    """Make a table of SCHEMA from trajectories, in order. A cancelled trajectory counts as
    failed."""
    return pa.Table.from_pylist([_row(each) for each in trajectories], schema=SCHEMA)


def from_arrow(table: pa.Table) -> list[TrainingTrajectory]:
    """Return the trajectories of a table of SCHEMA; a reward that is null counts as 0, as it does
    for the rollout service. Raises ValueError that names a column which is missing or of another
    type."""
    for field in SCHEMA:
        found = table.schema.field(field.name).type if field.name in table.column_names else None
        if found != field.type:
            raise ValueError(f"column {field.name} must be {field.type}, is {found or 'missing'}")
    return [_trajectory(row) for row in table.select(SCHEMA.names).to_pylist()]


def _row(each: TrainingTrajectory | TrajectoryResult) -> dict[str, object]:
    if isinstance(each, TrajectoryResult):
        truncated, failed = each.outcome == "truncated", each.outcome in ("failed", "cancelled")
        turns = len(each.steps)
    else:
        truncated, failed, turns = each.truncated, each.failed, each.turns
    return {
        "trajectory_id": each.trajectory_id,
        "prompt_id": each.prompt_id,
        "sample": each.sample,
        "tokens": each.tokens,
        "loss_mask": each.loss_mask,
        "logprobs": each.logprobs,
        "version_spans": [
            {
                "weight_version": span.weight_version,
                "start_token": span.start_token,
                "end_token": span.end_token,
            }
            for span in each.version_spans
        ],
        "reward": each.reward,
        "truncated": truncated,
        "failed": failed,
        "turns": turns,
        "elapsed_s": each.elapsed_s,
    }


def _trajectory(row: dict[str, object]) -> TrainingTrajectory:
    spans = row.pop("version_spans")
    assert isinstance(spans, list)
    reward = row.pop("reward")
    return TrainingTrajectory(
        **row,  # type: ignore[arg-type]
        version_spans=tuple(VersionSpan(**span) for span in spans),
        reward=0.0 if reward is None else float(reward),  # type: ignore[arg-type]
    )
