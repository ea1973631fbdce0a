"""The report of a run: figures that add up, faces that hold what they must, forecasts, honesty
about losses, and the run as a trace file."""

import io
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from rich.console import Console
from support.runs import small_run, span, trajectory
from treadle_cli.app import app
from treadle_cli.report.drawing import render_run
from treadle_cli.report.figures import (
    KINDS,
    ForecastFigures,
    PlayFigures,
    epoch_rows,
    forecast_figures,
    headline,
    losses,
    play_figures,
    rows,
    tail_queue_share,
    time_by_kind,
)
from treadle_cli.report.records import (
    ForecastRecord,
    RecordError,
    Run,
    TrajectoryRecord,
    read_run,
    write_run,
)
from treadle_cli.report.style import render
from treadle_sim.workloads.workload import Step, read_traces
from typer.testing import CliRunner

LEARNED = "20261122-101500"


def draw(run: Run, folder: Path) -> str:
    """Write a run and draw it; what the terminal shows."""
    write_run(folder, run)
    screen = io.StringIO()
    render_run(folder, Console(file=screen, width=200))
    return screen.getvalue()


def of_arm(run: Run, arm: str) -> list[TrajectoryRecord]:
    """The trajectories of an arm that played once."""
    (play,) = (play for play in run.record.plays if play.arm == arm)
    return run.of_play(play)


def figures_of(run: Run) -> Sequence[PlayFigures]:
    return [play_figures(play, run.of_play(play)) for play in run.compared]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the small run with its report, and what the terminal showed."""
    folder = tmp_path_factory.mktemp("run")
    return folder, draw(small_run(), folder)


def test_seconds_by_kind_add_up_to_the_wall_time_with_the_rest_as_other() -> None:
    moved = of_arm(small_run(), "treadle")[1]
    seconds = time_by_kind(moved)
    assert seconds == {
        "decode": 8.0,
        "prefill": 0.0,
        "queue": 1.0,
        "tool": 2.0,
        "migration": 0.0,
        "other": 1.0,
    }
    assert sum(seconds.values()) == moved.finished_s - moved.opened_s


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS[:-1]), st.floats(-5, 50), st.floats(0, 20)), max_size=12
    ),
    st.floats(0, 40),
)
def test_overlapping_spans_never_count_a_moment_twice(
    spans: list[tuple[str, float, float]], finished_s: float
) -> None:
    drawn = [span(kind, start_s, start_s + length_s) for kind, start_s, length_s in spans]
    seconds = time_by_kind(trajectory("treadle", "lake-0", 0, 5, finished_s, *drawn))
    assert sum(seconds.values()) == pytest.approx(finished_s)
    assert all(value >= 0 for value in seconds.values())


def test_figures_name_hidden_migrations_lost_engines_the_tails_queue_and_each_engines_last_work() -> (
    None
):
    run = small_run()
    treadle = figures_of(run)[1]
    assert (treadle.hidden_migration_s, treadle.migrations, treadle.lost_engines) == (1.0, 1, 1)
    assert treadle.engine_last_token_s == {"engine-0": 5.0, "engine-1": 12.0}
    # 6 of the 10 s of the one with 40 tokens
    assert tail_queue_share(of_arm(run, "pinned-fcfs")) == 0.6


def test_what_treadle_lost_is_said() -> None:
    run = small_run()
    assert "makespan: 12.0 s against 10.0 s (+20 %)" in losses(figures_of(run))
    assert headline(run) == "Treadle finished 20 % later than Pinned FCFS: 12.0 s against 10.0 s."


def epochs(*makespans_s: tuple[float, float]) -> Run:
    """Epoch 0 of the baseline in 20 s, and an epoch of each pair: Treadle's seconds, which plays
    first, and the baseline's."""
    pinned, treadle = small_run().record.plays
    plays = [replace(pinned, makespan_s=20.0)]
    for epoch, (treadle_s, pinned_s) in enumerate(makespans_s, start=1):
        plays += [
            replace(treadle, epoch=epoch, makespan_s=treadle_s),
            replace(pinned, epoch=epoch, makespan_s=pinned_s),
        ]
    record = replace(small_run().record, plays=tuple(plays))
    return Run(
        record,
        tuple(
            replace(t, epoch=play.epoch) for play in plays for t in of_arm(small_run(), play.arm)
        ),
    )


def test_several_epochs_are_summed_up_by_the_median_ratio_and_all_are_shown(tmp_path: Path) -> None:
    run = epochs((10.0, 12.0), (10.0, 15.0), (11.0, 11.0))
    assert [round(repeat.ratio, 2) for repeat in run.repeats] == [1.2, 1.5, 1.0]
    assert [(play.arm, play.epoch) for play in run.compared] == [("pinned-fcfs", 1), ("treadle", 1)]
    assert headline(run) == (
        "Treadle finished 17 % sooner than Pinned FCFS: 10.0 s against 12.0 s, the median of 3 "
        "epochs, whose ratios are 1.00 to 1.50."
    )
    assert epoch_rows(run) == [
        ("epoch 0, teaches the predictor", ["20.0 s", ""], ""),
        ("epoch 1, the median", ["12.0 s", "10.0 s"], "1.20"),
        ("epoch 2", ["15.0 s", "10.0 s"], "1.50"),
        ("epoch 3", ["11.0 s", "11.0 s"], "1.00"),
    ]
    assert "epoch 0, teaches the predictor" in draw(run, tmp_path)
    assert "<td>epoch 1, the median</td>" in (tmp_path / "report.html").read_text()
    written = json.loads((tmp_path / "summary.json").read_text())["figures"]
    assert [(play["arm"], play["epoch"]) for play in written][:3] == [
        ("pinned-fcfs", 0),
        ("treadle", 1),
        ("pinned-fcfs", 1),
    ]


def test_a_median_that_lost_is_said_to_have_lost() -> None:
    assert headline(epochs((12.0, 10.0), (12.0, 11.0), (10.0, 11.0))).startswith(
        "Treadle finished 9 % later than"
    )


def test_page_picture_summary_and_terminal_hold_both_arms_and_the_losses(
    drawn: tuple[Path, str],
) -> None:
    folder, screen = drawn
    page = (folder / "report.html").read_text()
    own = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page[: page.index("<script")] + own), (
        "it loads something"
    )
    assert "makespan: 12.0 s against 10.0 s" in own and "engine-0 was killed by SIGKILL" in own
    assert "Pinned FCFS" in page and "lake-0 #0" in page
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((folder / "summary.json").read_text())["figures"]
    assert [arm["makespan_s"] for arm in figures] == [10.0, 12.0]
    assert sum(figures[0]["time_s"].values()) == pytest.approx(14.0)
    assert str(folder / "report.html") in screen and "queue share of the longest 10 %" in screen
    assert "forecast" not in screen, "the run has none"


def test_a_run_of_one_arm_is_drawn_too_with_its_words_escaped(tmp_path: Path) -> None:
    run = small_run()
    record = replace(run.record, plays=run.record.plays[:1], model="<b>")
    assert "Pinned FCFS took 10.0 s." in draw(
        Run(record, tuple(of_arm(run, "pinned-fcfs"))), tmp_path
    )
    assert "&lt;b&gt;, seed 0" in (tmp_path / "report.html").read_text()


def test_a_page_without_one_of_its_values_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'run' is undefined"):
        render("treadle_cli.report", "report.html.j2")


def test_a_folder_without_a_run_and_a_broken_line_are_refused_by_name(tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert missing.exit_code == 2 and "summary.json does not exist" in missing.output
    write_run(tmp_path, small_run())
    unwritable = CliRunner().invoke(
        app, ["trace", str(tmp_path), "--traces", str(tmp_path / "no" / "t")]
    )
    assert unwritable.exit_code == 2 and "No such file" in unwritable.output
    with (tmp_path / "trajectories.jsonl").open("a") as lines:
        lines.write('{"arm": "treadle"}\n')
    with pytest.raises(RecordError, match=r"trajectories\.jsonl, line 5, is not a trajectory"):
        read_run(tmp_path)


def test_the_figures_say_who_forecast_and_whether_anything_waited() -> None:
    forecasts = (
        ForecastRecord(0, "siblings-3", 0.0, 0.1, 0.5),
        ForecastRecord(1, LEARNED, 3.0, 3.4, 3.2, learned=True),
        ForecastRecord(2, LEARNED, 5.0, 5.2, None, learned=True),
    )
    spans = (span("decode", 1, 3), span("tool", 3, 3.1, ""), span("queue", 3.15, 4, turn=1))
    forecast = replace(trajectory("treadle", "p", 0, 5, 6.0, *spans), forecasts=forecasts)
    figures = forecast_figures([forecast])
    assert (figures.forecasts, figures.learned, figures.overtaken) == (3, 2, 1)
    assert figures.forecast_s == pytest.approx(0.2)
    assert figures.queued_s == pytest.approx(0.05)
    assert forecast_figures([replace(forecast, forecasts=())]) == ForecastFigures()


def test_a_run_with_forecasts_reads_back_as_it_was_written_and_shows_them(tmp_path: Path) -> None:
    run = small_run()
    last = replace(
        run.trajectories[-1], forecasts=(ForecastRecord(1, LEARNED, 3.0, 3.4, 3.2, learned=True),)
    )
    run = replace(run, trajectories=(*run.trajectories[:-1], last))
    draw(run, tmp_path)
    assert read_run(tmp_path) == run
    shown = {row.label: row.values for row in rows(figures_of(run))}
    assert shown["forecasts by a learned model"] == (0.0, 1.0)
    assert shown["step's end to its forecast (median)"] == pytest.approx((0.0, 400.0))
    assert (
        "the next step was queued 0.200 s before it came" in (tmp_path / "report.html").read_text()
    )


def test_a_run_becomes_trajectories_with_their_tools_seconds_and_what_was_cut_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of 3 and 2 tokens, 4 tokens of an answer between them; the run's tokenizer is not
    at hand."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mask = (0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1)
    two_steps = replace(
        trajectory(
            "treadle",
            "lake-0",
            0,
            5,
            9.0,
            span("tool", 3.0, 4.5, "", turn=0),
            span("tool", 8, 9, "", turn=1),
        ),
        token_ids=tuple(range(len(mask))),
        logprobs=(0.0,) * len(mask),
        loss_mask=mask,
    )
    cut = replace(two_steps, trajectory_id="t-cut", sample=1, outcome="truncated", reward=None)
    nothing = replace(
        cut, trajectory_id="t-nothing", token_ids=(), logprobs=(), loss_mask=(), outcome="failed"
    )
    other_arm = trajectory("pinned-fcfs", "lake-0", 0, 7, 4.0)
    write_run(tmp_path, Run(small_run().record, (two_steps, cut, nothing, other_arm)))

    result = CliRunner().invoke(
        app, ["trace", str(tmp_path), "--traces", str(tmp_path / "own.jsonl")]
    )
    assert result.exit_code == 0, result.output
    first, second, third = read_traces(tmp_path / "own.jsonl")
    assert first.prompt_tokens == 2
    assert first.steps == (Step(3, 4, 1.5), Step(2, 0, 1.0))
    assert (first.reward, first.censored, second.reward, second.censored) == (
        1.0,
        False,
        None,
        True,
    )
    assert [work.sample for work in (first, second, third)] == [0, 1, 2]
    assert third.gen_tokens == 7


def test_a_run_as_trace_events_has_each_step_on_a_track_of_its_engine_and_an_arrow_for_each_move(
    tmp_path: Path,
) -> None:
    run = small_run()
    write_run(tmp_path, run)

    result = CliRunner().invoke(
        app, ["trace", str(tmp_path), "--perfetto", str(tmp_path / "trace.json")]
    )

    assert result.exit_code == 0, result.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    spans = [span for t in run.trajectories for span in t.spans if span.kind != "migration"]
    assert sorted(event["dur"] / 1e6 for event in slices) == sorted(
        span.end_s - span.start_s for span in spans
    )
    for first, second in itertools.combinations(slices, 2):
        if (first["pid"], first["tid"]) == (second["pid"], second["tid"]):
            assert (
                first["ts"] + first["dur"] <= second["ts"]
                or second["ts"] + second["dur"] <= first["ts"]
            )
    left, arrived = (
        next(event for event in events if event["ph"] == phase) for phase in ("s", "f")
    )
    assert tracks[left["pid"], left["tid"]].startswith("engine-0")
    assert tracks[arrived["pid"], arrived["tid"]].startswith("engine-1")
    assert left["id"] == arrived["id"] and (left["ts"], arrived["ts"]) == (1e6, 8e6)
