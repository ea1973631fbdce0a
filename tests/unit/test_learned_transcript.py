"""Transcript files: nothing is lost, and what is wrong is named with its line and field."""

import gzip
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_learned.transcript import (
    LearnedError,
    Transcript,
    Turn,
    read_transcripts,
    write_transcripts,
)

WHOLE = '{"trajectory_id":"a","rollout_id":"r","prompt_id":"p","prompt_tokens":3,"turns":[{"gen_tokens":5}]}\n'
TEXT = st.text(max_size=8)
COUNT = st.integers(0, 10**9)
TRANSCRIPTS = st.builds(
    Transcript,
    trajectory_id=st.text(min_size=1, max_size=8),
    rollout_id=TEXT,
    prompt_id=st.text(min_size=1, max_size=8),
    prompt_tokens=COUNT,
    turns=st.lists(st.builds(Turn, COUNT, COUNT, TEXT, TEXT), min_size=1, max_size=4).map(tuple),
    censored=st.booleans(),
    prompt=TEXT,
    max_total_tokens=COUNT,
    weight_version=TEXT,
)


@given(
    st.lists(TRANSCRIPTS, min_size=1, max_size=5, unique_by=lambda each: each.trajectory_id),
    st.booleans(),
)
def test_what_was_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, transcripts: list[Transcript], zipped: bool
) -> None:
    path = tmp_path_factory.mktemp("t") / ("t.jsonl.gz" if zipped else "t.jsonl")
    write_transcripts(transcripts, path)
    assert read_transcripts(path) == transcripts
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_every_field_is_drawn_above() -> None:
    """A field that is added must be written too, or this says so."""
    assert len(fields(Transcript)) == 9 and len(fields(Turn)) == 4


def test_it_takes_the_place_of_what_was_there_and_is_zipped_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    for name in ("old", "new"):
        write_transcripts([Transcript(name, "r", "p", 1, (Turn(2),))], path)
    assert [each.trajectory_id for each in read_transcripts(path)] == ["new"]
    assert gzip.decompress(path.read_bytes()).startswith(b'{"trajectory_id":"new"')
    assert path.stat().st_mode & 0o777 == 0o600, "conversations are for their user alone"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            WHOLE + WHOLE.replace('{"gen_tokens":5}', ""),
            r"line 2: turns: Tuple should have at least 1 item",
        ),
        (
            WHOLE.replace("5}", '5},{"gen_tokens":-4}'),
            r"line 1: turns\[1\]\.gen_tokens: .*greater than or equal to 0",
        ),
        (WHOLE.replace(":3", ':"3"'), r"line 1: prompt_tokens: .*valid integer"),
        (WHOLE.replace(":3", ":true"), r"line 1: prompt_tokens: .*valid integer"),
        (WHOLE.replace('"prompt_id":"p",', ""), r"line 1: prompt_id: Field required"),
        (WHOLE.replace('"prompt_id"', '"prompt"'), r"line 1: prompt_id: Field required"),
        (
            WHOLE.replace('"rollout_id"', '"rolout":1,"rollout_id"'),
            r"line 1: rolout: Unexpected keyword",
        ),
        (WHOLE + "\n" + WHOLE, r"line 3: trajectory_id: 'a' is already on line 1"),
        ("[1]\n", r"line 1: .*object"),
        ("{\n", r"line 1: Invalid JSON"),
        ("\n\n", r"t\.jsonl: holds no transcript"),
    ],
)
def test_what_is_wrong_is_named_with_line_and_field(
    content: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(LearnedError, match=says):
        read_transcripts(path)


def test_a_file_that_is_absent_or_no_whole_gzip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LearnedError, match="No such file"):
        read_transcripts(tmp_path / "absent.jsonl")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(WHOLE.encode())[:-9])
    with pytest.raises(LearnedError, match="is no whole gzip file"):
        read_transcripts(cut)
