"""Trace files: what is written is read back, and what is wrong is named."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_sim.workloads.workload import Step, TraceFileError, TrajectoryWork, read_traces, write_traces

# JSON has no lone surrogates in UTF-8.
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
STEPS = st.builds(
    Step, st.integers(1, 70_000), st.integers(0, 700_000), st.floats(0, 1e6, allow_nan=False), TEXTS, TEXTS
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
LINE: dict[str, Any] = {
    "prompt_id": "p",
    "sample": 0,
    "prompt_tokens": 10,
    "reward": None,
    "steps": [{"gen_tokens": 5, "obs_tokens": 2, "tool_latency_s": 0.5}],
}


@given(
    works=st.lists(WORKS, min_size=1, max_size=8, unique_by=lambda work: (work.prompt_id, work.sample)),
    suffix=st.sampled_from([".jsonl", ".jsonl.gz"]),
)
def test_what_is_written_is_read_back(works: list[TrajectoryWork], suffix: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("traces") / f"rollout{suffix}"
    write_traces(path, works)
    assert read_traces(path) == tuple(works)
    first = path.read_bytes()
    write_traces(path, works)
    assert path.read_bytes() == first


def test_fields_of_others_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    step = {**LINE["steps"][0], "tool": "python"}
    path.write_text("\n" + json.dumps({**LINE, "model": "m", "steps": [step]}) + "\n\n")
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
        ({"steps": [LINE["steps"][0], {"gen_tokens": 1, "obs_tokens": 1}]}, "steps[1].tool_latency_s", "is missing"),
        ({"steps": [{**LINE["steps"][0], "gen_tokens": 0}]}, "steps[0].gen_tokens", "greater than or equal to 1"),
        (
            {"steps": [{**LINE["steps"][0], "obs_tokens": -4}]},
            "steps[0].obs_tokens",
            "greater than or equal to 0, is -4",
        ),
        (
            {"steps": [{**LINE["steps"][0], "tool_latency_s": -0.1}]},
            "steps[0].tool_latency_s",
            "greater than or equal to 0",
        ),
        ({"steps": [{**LINE["steps"][0], "tool_latency_s": float("inf")}]}, "steps[0].tool_latency_s", "finite"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, change: dict[str, Any], field: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({**LINE, "sample": 1}) + "\n\n" + json.dumps({**LINE, **change}) + "\n")
    with pytest.raises(TraceFileError) as caught:
        read_traces(path)
    assert (caught.value.line, caught.value.field) == (3, field)
    assert str(caught.value).startswith(f"{path}: line 3: {field}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("field", ["prompt_id", "sample", "prompt_tokens", "steps"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({name: value for name, value in LINE.items() if name != field}))
    with pytest.raises(TraceFileError, match=f"line 1: {field}: is missing"):
        read_traces(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt_id": ', "line 1: must be JSON"),
        (b"[" * 100_000, "line 1: must be JSON"),
        (b"[1]", "line 1: must be a JSON object"),
        (b"\xff\xfe", "line 1: must be UTF-8"),
        (b"\n \n", "holds no trajectory"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=says):
        read_traces(path)


def test_a_sample_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text((json.dumps(LINE) + "\n") * 2)
    with pytest.raises(TraceFileError, match="line 2: sample: 0 of prompt 'p' is already on line 1"):
        read_traces(path)


@pytest.mark.parametrize("keep", [10, -6])
def test_half_a_gzip_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "half.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(LINE).encode())[:keep])
    with pytest.raises(TraceFileError, match="no whole gzip file"):
        read_traces(path)
    path.write_bytes(b"plain text")
    with pytest.raises(TraceFileError, match="no whole gzip file"):
        read_traces(path)
