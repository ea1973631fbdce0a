"""Which committed figures are older than the code that they measure."""

import json

from treadle_bench.command import BENCHES
from treadle_bench.staleness import RESULTS, ROOT, digest, newest_commit


def test_comments_docstrings_and_line_breaks_do_not_make_a_figure_old() -> None:
    before = {
        "a.py": b'"""Doc."""\nX = 1  # why\n\ndef f(a: int) -> int:\n    """Doc."""\n    return a\n'
    }
    same = {"a.py": b"X = 1\ndef f(\n    a: int,\n) -> int:\n    return a\n"}
    assert digest(before) == digest(same)
    assert digest(before) != digest({"a.py": before["a.py"].replace(b"X = 1", b"X = 2")})
    assert digest(before) != digest({"b.py": before["a.py"]})


def test_each_committed_figure_and_its_page_name_their_commit() -> None:
    for file in RESULTS.glob("*.json"):
        commit = json.loads(file.read_text())["measured_on"]
        assert commit.rstrip("+").isalnum(), file
        page = file.with_suffix(".md")
        assert not page.exists() or f"Measured on {commit}." in page.read_text(), page


def test_the_folders_that_decide_a_figure_exist() -> None:
    for bench in BENCHES.values():
        for folder in bench.decides:
            assert (ROOT / folder).is_dir(), (bench.name, folder)
            assert newest_commit([folder])
