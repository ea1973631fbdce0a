"""What a terminal gets of texts that somebody else wrote: their letters, and nothing that changes
it, forges a line of its own, or is read as markup."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.markdown import Markdown
from support.runs import small_run
from treadle import Distribution, ShapingReport
from treadle.resources.v1 import resources_pb2
from treadle_cli import exits
from treadle_cli.apply import describe
from treadle_cli.demo.rollout import LiveBoard
from treadle_cli.doctor.findings import PROBLEM, Finding, print_findings
from treadle_cli.exits import MOST_CHARS, Terminal, printable
from treadle_cli.explain import Explanation, Fate
from treadle_cli.mesh.mesh import Board, StartBoard
from treadle_cli.mesh.services import Access, Addresses
from treadle_cli.on_ray.command import _show
from treadle_cli.options import print_json
from treadle_cli.predictor.commands import COLUMNS, _table
from treadle_cli.report.drawing import render_run
from treadle_cli.report.records import write_run
from treadle_cli.report.style import render
from treadle_cli.shaping import print_shaping
from treadle_cli.top import EngineRow, MoveRow, RolloutRow, Screen, Snapshot, TrajectoryRow
from treadle_core.model import Ledger
from treadle_core.state import Decision
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.fitting import FitError

# An answer of a terminal's clipboard, a cleared screen, C1, bidi overrides and isolates, no width,
# DEL, a new line, markup, an emoji code, a formula of a picture, an element of a page
HOSTILE = (
    "a\x1b]52;c;ZXZpbA==\x07b\x1b[2Jc\x9b31md\x85e\u202ef\u2066g\u200bh\x7fi\x00\x08\r"
    "\nFORGED [/red][bold]:smile: $\\frac{$ <a href='https://example.org'>j</a>"
)
MARKUP = "[/red][bold]:smile:"
# Colours and moves of rich's own
OWN_CODES = re.compile(r"\x1b\[[0-9;]*[mKAGH]|\x1b\[\?25[lh]|\r(?=\x1b)")


def requires_letters_only(page: str) -> None:
    assert not {char for char in OWN_CODES.sub("", page) if not char.isprintable()} - {"\n"}
    assert not [line for line in page.splitlines() if line.startswith("FORGED")]


def explain(out: Terminal) -> None:
    fate = Fate(HOSTILE, HOSTILE, 1.0, 2.0)
    decision = Decision(0.0, HOSTILE, HOSTILE, "{}", (HOSTILE,))
    Explanation(
        HOSTILE, HOSTILE, Ledger(), 1.0, HOSTILE, [decision], 0.0, fate, [fate], [HOSTILE]
    ).print(out)


def top(out: Terminal) -> None:
    engine = EngineRow(HOSTILE, 1, 2, 3, 0.5, 1.0, 1, HOSTILE, "ok")
    trajectory = TrajectoryRow(HOSTILE, HOSTILE, 0, HOSTILE, 1, 2, 3.0, HOSTILE, 0, 1.0)
    rollout, move = (
        RolloutRow(HOSTILE, 1, 2, 3.0, 0.1),
        MoveRow(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1.0),
    )
    shot = Snapshot(HOSTILE, "", (engine,), (trajectory,), (rollout,), (move,), 1.0, 0.0)
    out.print(Screen(shot))


def doctor(out: Terminal) -> None:
    print_findings([Finding(HOSTILE, HOSTILE, PROBLEM, HOSTILE, HOSTILE)], out)


def shaping(out: Terminal) -> None:
    none = Distribution((), (), 0.0)
    counts = (2, 1, 20, 10, 0.5)
    report = ShapingReport(
        none, none, none, *counts, HOSTILE, {HOSTILE: 1}, {}, (HOSTILE,), 5, HOSTILE
    )
    print_shaping(report, HOSTILE, out)


def apply(out: Terminal) -> None:
    planned = resources_pb2.ApplyPlanResponse(keep_engine_ids=[HOSTILE], stop_engine_ids=[HOSTILE])
    out.print(describe(planned), highlight=False, markup=False)


def start(out: Terminal) -> None:
    Board(out).note(HOSTILE)
    with StartBoard(out) as board, board.part(printable(HOSTILE)):
        pass
    with out.status(HOSTILE):
        pass


def addresses(out: Terminal) -> None:
    where = Addresses({"scheduler": HOSTILE}, {HOSTILE: HOSTILE})
    out.print(where.table(Access(HOSTILE, HOSTILE, HOSTILE, HOSTILE), {HOSTILE: HOSTILE}))


def on_ray(out: Terminal) -> None:
    parts = dict.fromkeys(("scheduler", "gateway", "console", "nats"), HOSTILE)
    engines = {HOSTILE: {"actor": HOSTILE, "url": HOSTILE}}
    findings = [asdict(Finding(HOSTILE, HOSTILE, PROBLEM, HOSTILE, HOSTILE))]
    more = {"engines": engines, "findings": findings, "refused": {HOSTILE: HOSTILE}}
    _show({**parts, **more}, "auto", out)


def rollout(out: Terminal) -> None:
    board = LiveBoard(out, printable(HOSTILE), [], 1, {})
    board._loads = {HOSTILE: None}
    board._print_line()
    out.print(board._picture())


def evaluate(out: Terminal) -> None:
    scores = dict.fromkeys(COLUMNS, 0.5) | {f"{name}_interval": (0.1, 0.9) for name in COLUMNS}
    row = {"step": 1, "trajectories": 2, "estimator": HOSTILE, **scores}
    out.print(_table({"version": HOSTILE, "test": {"prompts": 1}, "rows": [row]}))


def fit(out: Terminal) -> None:
    curve = StepCurve((1.0, 2.0), (0.01, 0.011), 0.0, 0.0, 1e-4, 0.0)
    engine = EngineModel(f"[x](http://{HOSTILE})", HOSTILE, 1, 2, 1_000, 1, curve)
    fit = SimpleNamespace(
        engine=engine, decode_error=FitError(5, 0.1, 0.1, 0.1, 0.1), prefill_error=None
    )
    page = render("treadle_cli", "fit_profile.md.j2", fit=fit)
    out.print(Markdown(page, hyperlinks=False))


PRINTED: tuple[Callable[[Terminal], None], ...] = (
    *(explain, top, doctor, shaping, apply, start, addresses, on_ray, rollout, evaluate, fit),
)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("show", PRINTED)
def test_a_hostile_text_is_shown_as_its_letters(
    show: Callable[[Terminal], None], terminal: bool
) -> None:
    page = io.StringIO()
    show(Terminal(file=page, width=4_000, height=50, force_terminal=terminal))
    requires_letters_only(page.getvalue())
    # Of long names the table of `top` shows the end, and Markdown has emphasis of its own
    assert show in (top, fit) or MARKUP in OWN_CODES.sub("", page.getvalue())


def test_a_report_of_hostile_names_is_drawn(tmp_path: Path) -> None:
    """In the terminal as letters, in the picture without formulas, on the page without elements."""
    run = small_run()
    trajectories = [replace(each, prompt_id=HOSTILE) for each in run.trajectories]
    plays = [
        replace(play, title=f"{play.title} {HOSTILE}", policy=HOSTILE, engine_losses=(HOSTILE,))
        for play in run.record.plays
    ]
    record = replace(run.record, model=HOSTILE, machine=HOSTILE, plays=tuple(plays))
    write_run(tmp_path, replace(run, record=record, trajectories=tuple(trajectories)))
    page = io.StringIO()
    render_run(tmp_path, Terminal(file=page, width=4_000))
    requires_letters_only(page.getvalue())
    assert MARKUP in page.getvalue()
    assert (tmp_path / "report.png").stat().st_size > 0
    report = (tmp_path / "report.html").read_text()
    assert "href='https://example.org'" not in report
    assert "href=\\u0027https://example.org" not in report


def test_an_error_of_a_server_begins_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        exits.end(exits.Failure(HOSTILE))
    shown = capsys.readouterr().err
    assert shown.startswith("treadle: a") and MARKUP in shown
    requires_letters_only(shown)


def test_json_has_no_code_either(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({HOSTILE: f"{HOSTILE}\ud800"})
    line = capsys.readouterr().out
    assert line.rstrip("\n").isascii() and line.rstrip("\n").isprintable()
    assert json.loads(line) == {HOSTILE: f"{HOSTILE}\ud800"}


def test_a_text_without_end_is_cut_and_what_cannot_be_encoded_is_left_out() -> None:
    shown = printable("x" * 1_000_000)
    assert (len(shown), shown[-1]) == (MOST_CHARS + 1, "…")
    assert printable("a\ud800b") == "a b"
    page = io.StringIO()
    Terminal(file=page).print("a\ud800b")
    page.getvalue().encode()
