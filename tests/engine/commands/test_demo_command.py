"""`treadle demo` itself, small, on two real engines: to its end, and interrupted in the middle of a
play."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import TreadleProcess
from support.real_engines import small_model_folder
from treadle_cli.report.figures import time_by_kind
from treadle_cli.report.records import read_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SMALL = (
    "demo",
    "--prompts",
    "2",
    "--samples",
    "2",
    "--slots",
    "1",
    "--tool-latency",
    "0.2",
    "--repeats",
    "1",
)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[TreadleProcess]:
    options = ["--model", small_model_folder(tmp_path), "--out", str(tmp_path / "runs")]
    process = TreadleProcess([*SMALL, *options], tmp_path, patience_s=600.0)
    yield process
    process.end()


def test_a_small_demo_writes_the_whole_report(demo: TreadleProcess, tmp_path: Path) -> None:
    demo.until(lambda: "Epoch 0, Pinned FCFS:" in demo.text())
    assert demo.wait() == 0, demo.text()
    assert demo.left_over() == []
    (folder,) = (tmp_path / "runs").iterdir()
    written = {entry.stat().st_mode & 0o777 for entry in folder.iterdir()}
    assert (folder.stat().st_mode & 0o777, written) == (0o700, {0o600}), "whole conversations"
    assert {entry.name for entry in folder.iterdir()} == {
        "trajectories.jsonl",
        "summary.json",
        "report.html",
        "report.png",
    }
    run = read_run(folder)
    assert [(play.arm, play.epoch) for play in run.record.plays] == [
        ("pinned-fcfs", 0),
        ("treadle", 1),
        ("pinned-fcfs", 1),
    ]
    assert len({trajectory.trajectory_id for trajectory in run.trajectories}) == 3 * 4
    for play in run.record.plays:
        trajectories = run.of_play(play)
        assert {(t.prompt_id, t.sample) for t in trajectories} == {
            (prompt, sample) for prompt in ("chain_sum-0", "lake-1") for sample in (0, 1)
        }
        for trajectory in trajectories:
            assert trajectory.outcome == "finished" and trajectory.turns >= 1
            assert sum(trajectory.loss_mask) == trajectory.gen_tokens > 0
            seconds = time_by_kind(trajectory)
            assert sum(seconds.values()) == pytest.approx(
                trajectory.finished_s - trajectory.opened_s
            )
            assert seconds["decode"] > 0 and seconds["tool"] > 0
            # nearly all of it has a name
            assert seconds["other"] < 0.2 * sum(seconds.values()) + 1.0
    versions = {
        forecast.model_version for t in run.of_play(run.record.plays[1]) for forecast in t.forecasts
    }
    assert versions and "prior-1" not in versions  # the predictor keeps what epoch 0 taught it
    figures = json.loads((folder / "summary.json").read_text())["figures"]
    assert all(arm["trajectories"] == 4 and arm["failed"] == 0 for arm in figures)


@pytest.mark.full
def test_ctrl_c_in_the_middle_of_a_play_leaves_no_process(
    demo: TreadleProcess, tmp_path: Path
) -> None:
    # a line of progress, or that of the end of the play
    demo.until(lambda: "Epoch 0, Pinned FCFS:" in demo.text())
    demo.send(signal.SIGINT)
    assert demo.wait() == 130
    assert demo.left_over() == []
    (folder,) = (tmp_path / "runs").iterdir()
    # that of finished plays
    assert {entry.name for entry in folder.iterdir()} - {"trajectories.jsonl"} == {"logs"}
