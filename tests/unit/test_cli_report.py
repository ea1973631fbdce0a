"""The report of a run: figures that add up, faces that hold what they must, and honesty about losses."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.runs import small_run, span, trajectory
from treadle_cli.report.accounting import KINDS, arm_figures, tail_queue_share, time_by_kind
from treadle_cli.report.comparison import headline, losses
from treadle_cli.report.records import RecordError, Run, read_run, write_summary, write_trajectories
from treadle_cli.report.render import render


def written(run: Run, folder: Path) -> Path:
    write_trajectories(folder, run.trajectories)
    write_summary(folder, run.record, [])
    return folder


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    run = small_run()
    assert read_run(written(run, tmp_path)) == run


def test_seconds_by_kind_add_up_to_the_wall_time_with_the_rest_as_other() -> None:
    moved = small_run().of_arm("treadle")[1]
    seconds = time_by_kind(moved)
    assert seconds == {"decode": 8.0, "prefill": 0.0, "queue": 1.0, "tool": 2.0, "migration": 0.0, "other": 1.0}
    assert sum(seconds.values()) == moved.finished_s - moved.opened_s


@given(
    st.lists(st.tuples(st.sampled_from(KINDS[:-1]), st.floats(-5, 50), st.floats(0, 20)), max_size=12),
    st.floats(0, 40),
)
def test_overlapping_spans_never_count_a_moment_twice(spans: list[tuple[str, float, float]], finished_s: float) -> None:
    drawn = [span(kind, start_s, start_s + length_s) for kind, start_s, length_s in spans]
    seconds = time_by_kind(trajectory("treadle", "lake-0", 0, 5, finished_s, *drawn))
    assert sum(seconds.values()) == pytest.approx(finished_s)
    assert all(value >= 0 for value in seconds.values())


def test_migration_time_behind_a_tool_call_is_given_apart() -> None:
    run = small_run()
    figures = arm_figures(run.record.arms[1], run.of_arm("treadle"))
    assert figures.hidden_migration_s == 1.0
    assert figures.migrations == 1
    assert figures.lost_engines == 1


def test_the_tail_is_the_tenth_with_the_most_tokens() -> None:
    run = small_run()
    assert tail_queue_share(run.of_arm("pinned-fcfs")) == 0.6  # 6 of the 10 s of the one with 40 tokens


def test_each_engines_last_work_is_known() -> None:
    run = small_run()
    figures = arm_figures(run.record.arms[1], run.of_arm("treadle"))
    assert figures.engine_last_token_s == {"engine-0": 5.0, "engine-1": 12.0}


def test_what_treadle_lost_is_said() -> None:
    run = small_run()
    figures = [arm_figures(arm, run.of_arm(arm.arm)) for arm in run.record.arms]
    assert "makespan: 12.0 s against 10.0 s (+20 %)" in losses(figures)
    assert headline(figures, ["Pinned FCFS", "Treadle"]).startswith("Treadle finished 20 % later than Pinned FCFS")


def test_the_page_loads_nothing_and_holds_both_arms_and_the_losses(tmp_path: Path) -> None:
    render(written(small_run(), tmp_path), Console(file=io.StringIO(), width=120))
    page = (tmp_path / "report.html").read_text()
    own = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page[: page.index("<script")] + own)
    assert "Where Treadle lost" in own and "makespan: 12.0 s against 10.0 s" in own
    assert "engine-0 was killed by SIGKILL" in own
    assert "anecdote" in own
    assert "Pinned FCFS" in page and "lake-0 #0" in page


def test_the_picture_is_a_png_of_readable_size(tmp_path: Path) -> None:
    render(written(small_run(), tmp_path), Console(file=io.StringIO(), width=120))
    picture = (tmp_path / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") >= 1500  # pixels wide


def test_the_summary_carries_the_figures_for_programs(tmp_path: Path) -> None:
    render(written(small_run(), tmp_path), Console(file=io.StringIO(), width=120))
    figures = json.loads((tmp_path / "summary.json").read_text())["figures"]
    assert [arm["makespan_s"] for arm in figures] == [10.0, 12.0]
    assert sum(figures[0]["time_s"].values()) == pytest.approx(14.0)


def test_the_terminal_names_the_report(tmp_path: Path) -> None:
    screen = io.StringIO()
    render(written(small_run(), tmp_path), Console(file=screen, width=200))
    assert str(tmp_path / "report.html") in screen.getvalue()
    assert "queue share of the longest 10 %" in screen.getvalue()


def test_a_run_of_one_arm_is_drawn_too(tmp_path: Path) -> None:
    run = small_run()
    single = Run(replace(run.record, arms=run.record.arms[:1]), tuple(run.of_arm("pinned-fcfs")))
    screen = io.StringIO()
    render(written(single, tmp_path), Console(file=screen, width=120))
    assert "Pinned FCFS took 10.0 s." in screen.getvalue()


def test_a_folder_without_a_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"summary\.json does not exist"):
        read_run(tmp_path)


def test_a_broken_line_is_refused_with_its_number(tmp_path: Path) -> None:
    written(small_run(), tmp_path)
    with (tmp_path / "trajectories.jsonl").open("a") as lines:
        lines.write('{"arm": "treadle"}\n')
    with pytest.raises(RecordError, match=r"trajectories\.jsonl, line 5, is not a trajectory"):
        read_run(tmp_path)
