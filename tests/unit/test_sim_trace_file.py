"""Trace files: what is written is read back, and what is wrong is named."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_sim.workloads.workload import (
    Step,
    TraceFileError,
    TrajectoryWork,
    read_traces,
    write_traces,
)

# JSON has no lone surrogates in UTF-8.
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
STEPS = st.builds(
    Step,
    st.integers(1, 70_000),
    st.integers(0, 700_000),
    st.floats(0, 1e6, allow_nan=False),
    TEXTS,
    TEXTS,
)
WORKS = st.builds(
    TrajectoryWork,
    prompt_id=st.text(min_size=1),
    sample=st.integers(0, 300),
    prompt_tokens=st.integers(1, 200_000),
    steps=st.lists(STEPS, min_size=1, max_size=5).map(tuple),
    reward=st.none() | st.floats(-1e3, 1e3),
    censored=st.booleans(),
    prompt=TEXTS,
)
STEP = {"gen_tokens": 5, "obs_tokens": 2, "tool_latency_s": 0.5}
LINE: dict[str, Any] = {
    "prompt_id": "p",
    "sample": 0,
    "prompt_tokens": 10,
    "reward": None,
    "steps": [STEP],
}
ZIPPED = gzip.compress(json.dumps(LINE).encode(), mtime=0)


@given(
    works=st.lists(
        WORKS, min_size=1, max_size=8, unique_by=lambda work: (work.prompt_id, work.sample)
    ),
    suffix=st.sampled_from([".jsonl", ".jsonl.gz"]),
)
def test_what_is_written_is_read_back(
    works: list[TrajectoryWork], suffix: str, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("traces") / f"rollout{suffix}"
    write_traces(path, works)
    assert read_traces(path) == tuple(works)
    first = path.read_bytes()
    write_traces(path, works)
    assert path.read_bytes() == first


def test_fields_of_others_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    line = {**LINE, "model": "m", "steps": [{**STEP, "tool": "python"}]}
    path.write_text("\n" + json.dumps(line) + "\n\n")
    assert read_traces(path) == (TrajectoryWork("p", 0, 10, (Step(5, 2, 0.5),)),)


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"prompt_id": ""}, "prompt_id", "at least 1 character"),
        ({"prompt_id": 7}, "prompt_id", "valid string"),
        ({"prompt": ["Do it."]}, "prompt", "must be a text"),
        ({"sample": -1}, "sample", "greater than or equal to 0, is -1"),
        ({"sample": True}, "sample", "valid integer"),
        ({"prompt_tokens": 0}, "prompt_tokens", "greater than or equal to 1"),
        ({"prompt_tokens": 1.5}, "prompt_tokens", "valid integer"),
        ({"reward": "good"}, "reward", "valid number"),
        ({"reward": float("nan")}, "reward", "finite number"),
        ({"censored": 1}, "censored", "valid boolean"),
        ({"steps": []}, "steps", "at least 1 item"),
        ({"steps": {}}, "steps", "must be"),
        ({"steps": [5]}, "steps[0]", "JSON object"),
        (
            {"steps": [STEP, {"gen_tokens": 1, "obs_tokens": 1}]},
            "steps[1].tool_latency_s",
            "is missing",
        ),
        (
            {"steps": [{**STEP, "gen_tokens": 0}]},
            "steps[0].gen_tokens",
            "greater than or equal to 1",
        ),
        (
            {"steps": [{**STEP, "obs_tokens": -4}]},
            "steps[0].obs_tokens",
            "greater than or equal to 0, is -4",
        ),
        (
            {"steps": [{**STEP, "tool_latency_s": -0.1}]},
            "steps[0].tool_latency_s",
            "greater than or equal to 0",
        ),
        (
            {"steps": [{**STEP, "tool_latency_s": float("inf")}]},
            "steps[0].tool_latency_s",
            "finite",
        ),
        ({"sample": 1}, "sample", "1 of prompt 'p' is already on line 1"),
        *(
            ({field: ...}, field, "is missing")
            for field in ("prompt_id", "sample", "prompt_tokens", "steps")
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_line(
    tmp_path: Path, change: dict[str, Any], field: str, says: str
) -> None:
    """`...` leaves a field out."""
    path = tmp_path / "bad.jsonl"
    bad = {name: value for name, value in {**LINE, **change}.items() if value is not ...}
    path.write_text(json.dumps({**LINE, "sample": 1}) + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(TraceFileError) as caught:
        read_traces(path)
    assert (caught.value.line, caught.value.field) == (3, field)
    assert str(caught.value).startswith(f"{path}: line 3: {field}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("own.jsonl", b'{"prompt_id": ', "line 1: must be JSON"),
        ("own.jsonl", b"[" * 100_000, "line 1: must be JSON"),
        ("own.jsonl", b"[1]", "line 1: must be a JSON object"),
        ("own.jsonl", b"\xff\xfe", "line 1: must be UTF-8"),
        ("own.jsonl", b"\n \n", "holds no trajectory"),
        ("own.jsonl.gz", ZIPPED[:10], "no whole gzip file"),
        ("own.jsonl.gz", ZIPPED[:-6], "no whole gzip file"),
        ("own.jsonl.gz", b"plain text", "no whole gzip file"),
    ],
)
def test_a_file_that_holds_no_lines_of_objects_is_refused(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceFileError, match=says):
        read_traces(tmp_path / name)
