"""Trajectories through an Arrow table."""

from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle import TrainingTrajectory, TrajectoryResult, VersionSpan
from treadle.training.arrow import SCHEMA, from_arrow, to_arrow

NAMES = st.text(min_size=1, max_size=8)


@st.composite
def trajectories(draw: st.DrawFn) -> TrainingTrajectory:
    length = draw(st.integers(0, 20))
    return TrainingTrajectory(
        trajectory_id=draw(NAMES),
        prompt_id=draw(NAMES),
        sample=draw(st.integers(0, 2**31 - 1)),
        tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
        loss_mask=draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
        logprobs=draw(st.lists(st.floats(-100, 0, width=32), min_size=length, max_size=length)),
        version_spans=tuple(
            VersionSpan(draw(NAMES), start, start + 1)
            for start in range(draw(st.integers(0, min(length, 3))))
        ),
        reward=draw(st.floats(allow_nan=False)),
        truncated=draw(st.booleans()),
        failed=draw(st.booleans()),
        turns=draw(st.integers(0, 100)),
        elapsed_s=draw(st.floats(0, 1e6)),
    )


@given(st.lists(trajectories(), max_size=5))
def test_a_batch_comes_back_from_a_table_as_it_was(batch: list[TrainingTrajectory]) -> None:
    assert from_arrow(to_arrow(batch)) == batch


def test_results_of_a_rollout_become_what_a_trainer_reads_also_through_a_file(
    tmp_path: Path,
) -> None:
    spans = (VersionSpan("3", 1, 2),)
    done = TrajectoryResult(
        "t0", "p0", 0, [7, 8], [0, 1], [0.0, -0.5], spans, reward=0.5, outcome="truncated"
    )
    cut = TrajectoryResult("", "p0", 1, outcome="cancelled")
    feather.write_feather(to_arrow([done, cut]), str(tmp_path / "rollout.arrow"))
    table = feather.read_table(str(tmp_path / "rollout.arrow"))
    assert table.column("reward").to_pylist() == [0.5, None]
    first, second = from_arrow(table)
    assert (first.tokens, first.loss_mask, first.logprobs) == (
        done.tokens,
        done.loss_mask,
        done.logprobs,
    )
    assert (first.version_spans, first.reward, first.truncated, first.failed) == (
        spans,
        0.5,
        True,
        False,
    )
    assert (second.tokens, second.reward, second.truncated, second.failed) == ([], 0.0, False, True)


def test_a_table_of_another_shape_is_refused_by_the_name_of_its_column() -> None:
    table = to_arrow([])
    with pytest.raises(ValueError, match="column reward must be double, is missing"):
        from_arrow(table.drop_columns(["reward"]))
    tokens = SCHEMA.get_field_index("tokens")
    with pytest.raises(ValueError, match=r"column tokens must be list<.*int32>, is string"):
        from_arrow(table.set_column(tokens, "tokens", pa.array([], pa.string())))
