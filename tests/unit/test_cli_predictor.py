"""`treadle predictor` from sources to the predictor that is in use, and what a user can get
wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import small_run
from support.tiny_backbone import tiny_backbone
from support.transcripts import told_by_the_plan
from tokenizers import Tokenizer
from treadle_cli.app import app
from treadle_cli.predictor.commands import DEFAULT_BACKBONE
from treadle_cli.predictor.transcripts import transcripts_of_run
from treadle_cli.report.records import Run, write_run
from treadle_learned.backbone import DEFAULT
from treadle_learned.checkpoint import ModelsFolder, load
from treadle_learned.examples import Part, part_of
from treadle_learned.moments import replay
from treadle_learned.transcript import Turn, read_transcripts, write_transcripts
from treadle_sim.workloads.workload import Step, TrajectoryWork, write_traces
from typer.testing import CliRunner

PATIENCE_S = 100.0
WORKS = (
    TrajectoryWork(
        "p", 0, 30, (Step(5, 2, 0.1, "look", "found"), Step(7, 0, 0.1)), prompt="Find it."
    ),
    TrajectoryWork("p", 1, 30, (Step(9, 0, 0.1),), censored=True),
    TrajectoryWork("q", 0, 40, (Step(3, 0, 0.1),)),
)


def said(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["predictor", *words])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output.replace("\n", " ")


def told(*words: str) -> dict[str, Any]:
    found = json.loads(said(*words, "--json"))
    assert isinstance(found, dict)
    return found


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    run = small_run()
    cut = replace(run.trajectories[0], outcome="truncated")
    nothing = replace(
        run.trajectories[1],
        token_ids=(),
        logprobs=(),
        loss_mask=(),
        version_spans=(),
        outcome="failed",
    )
    write_run(folder, Run(run.record, (cut, nothing, *run.trajectories[2:])))
    return folder


def test_traces_and_runs_become_one_file_with_what_was_cut_marked(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's tokenizer is not at hand."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_traces(tmp_path / "own.jsonl.gz", WORKS)
    out = tmp_path / "transcripts.jsonl"
    counts = told("harvest", str(tmp_path / "own.jsonl.gz"), str(run_folder), "--out", str(out))
    found = read_transcripts(out)
    assert counts == {"trajectories": 6, "prompts": 4, "tuples": 7, "censored": 2, "with_text": 1}
    assert counts["tuples"] == len(replay(found))
    assert [each.censored for each in found] == [False, True, False, True, False, False]
    assert found[0].turns == (Turn(5, 2, "look", "found"), Turn(7))
    assert (
        found[3].prompt_id == "0/lake-0"
        and found[3].prompt_tokens == 2
        and found[3].turns == (Turn(40),)
    )
    assert {each.rollout_id for each in found[3:]} == {
        "20260101-000000-abcd/pinned-fcfs-0",
        "20260101-000000-abcd/treadle-0",
    }
    again = tmp_path / "again.jsonl"
    assert (
        told("harvest", str(out), "--out", str(again)) == counts
        and read_transcripts(again) == found
    )


def test_a_runs_token_ids_are_texts_again_where_its_tokenizer_is_known(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_backbone(tmp_path) / "tokenizer.json"))
    pieces = [("Go", 0), ("left", 1), ("wall", 0), ("right", 1)]
    ids = [(token, mask) for text, mask in pieces for token in tokenizer.encode(text).ids]
    run = small_run()
    trajectory = replace(
        run.trajectories[0],
        token_ids=tuple(token for token, _ in ids),
        loss_mask=tuple(mask for _, mask in ids),
        logprobs=(0.0,) * len(ids),
    )
    (found,) = transcripts_of_run(replace(run, trajectories=(trajectory,)), tokenizer)
    assert found.prompt == "Go" and found.prompt_tokens == 2 and found.weight_version == "0"
    assert found.turns == (Turn(4, 4, "left", "wall"), Turn(5, 0, "right"))


def test_a_trajectory_that_is_in_two_sources_is_refused(tmp_path: Path) -> None:
    write_traces(tmp_path / "own.jsonl", WORKS)
    twice = said(
        "harvest", *[str(tmp_path / "own.jsonl")] * 2, "--out", str(tmp_path / "o"), code=2
    )
    assert (
        "trajectory 'own.jsonl/p#0' is in another source too" in twice
        and not (tmp_path / "o").exists()
    )


def test_from_transcripts_to_the_predictor_in_use(tmp_path: Path) -> None:
    transcripts, folder, models = tmp_path / "t.jsonl.gz", tmp_path / "v1", tmp_path / "models"
    write_transcripts(told_by_the_plan(), transcripts)
    backbone = str(tiny_backbone(tmp_path / "backbone"))
    trained = told(
        "train", str(transcripts), "--out", str(folder), "--backbone", backbone, "--epochs", "5"
    )
    assert (
        set(trained["validation"]) == {"learned", "numbers", "siblings"}
        and trained["version"] == "v1"
    )
    assert trained["parts"]["train"]["prompts"] == sum(
        part_of(each.prompt_id) is Part.TRAIN for each in told_by_the_plan()
    )

    report = told("evaluate", str(folder), str(transcripts))
    assert {(row["step"], row["estimator"]) for row in report["rows"]} == {
        (step, name) for step in (0, 1, 2) for name in ("learned", "siblings", "history")
    }
    assert report["test"]["prompts"] == sum(
        part_of(each.prompt_id) is Part.TEST for each in told_by_the_plan()
    )
    assert "95% intervals" in said("evaluate", str(folder), str(transcripts))

    said("export", str(folder), "--models", str(models), "--version", "first")
    said("export", str(folder), "--models", str(models))
    assert (
        ModelsFolder(models).current() == models / "v1"
        and load(models / "first").version == "first"
    )
    assert "is there already; choose another version" in said(
        "export", str(folder), "--models", str(models), code=2
    )


def test_numbers_alone_are_learned_from_traces_without_text(tmp_path: Path) -> None:
    works = [
        TrajectoryWork(
            f"p{number}", 0, 10 + number, (Step(1 + number % 7, 0, 0.1), Step(5, 0, 0.1))
        )
        for number in range(40)
    ]
    write_traces(tmp_path / "own.jsonl", works)
    words = said(
        "train", str(tmp_path / "own.jsonl"), "--out", str(tmp_path / "v1"), "--epochs", "2"
    )
    assert "reads numbers alone" in words and "siblings" in words and "learned " not in words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("harvest", "absent", "--out", "o"), "absent is not there: name trace files"),
        (("harvest", ".", "--out", "o"), "is not the folder of a finished run"),
        (("harvest", "t.jsonl", "--out", "no/o"), "No such file or directory"),
        (
            ("train", "bad.jsonl", "--out", "v1"),
            "bad.jsonl: line 1: turns: Tuple should have at least 1 item",
        ),
        (("train", "neither.jsonl", "--out", "v1"), "neither.jsonl: line 1: prompt_id: is missing"),
        (
            ("train", "t.jsonl", "--out", "v1", "--tune", "some"),
            "'some' is not one of 'frozen', 'lora', 'full'",
        ),
        (
            ("train", "t.jsonl", "--out", "v1", "--backbone", "SmolLM2-135M-Instruct"),
            "is not there yet: `treadle demo` makes it; or pass --backbone",
        ),
        (
            ("train", "t.jsonl", "--out", "v1", "--backbone", "/absent"),
            "'/absent' cannot be loaded",
        ),
        (
            ("train", "t.jsonl", "--out", ".", "--backbone", ""),
            "is there already, and a predictor is never written",
        ),
        (
            ("evaluate", "absent", "t.jsonl"),
            "predictor.json: No such file or directory; is this the folder of a",
        ),
        (("export", "absent", "--models", "models"), "predictor.json: No such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_transcripts(told_by_the_plan(), Path("t.jsonl"))
    Path("bad.jsonl").write_text(
        '{"trajectory_id":"a","rollout_id":"r","prompt_id":"p","prompt_tokens":1,"turns":[]}'
    )
    Path("neither.jsonl").write_text('{"hello": 1}')
    assert says in said(*words, code=2)


def test_without_the_extra_harvest_works_and_train_says_what_to_install(tmp_path: Path) -> None:
    write_traces(tmp_path / "own.jsonl", WORKS)
    bare = (
        "import sys; sys.modules['torch'] = None; from treadle_cli.app import app; "
        "app(['predictor', *sys.argv[1:]])"
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", bare, command, "own.jsonl", "--out", command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        for command in ("harvest", "train")
    ]
    assert done[0].returncode == 0 and (tmp_path / "harvest").exists(), done[0].stderr
    assert (
        done[1].returncode == 2
        and "torch is not installed: pip install 'treadle[learned]'" in done[1].stderr
    )


def test_ctrl_c_ends_a_training_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_transcripts(told_by_the_plan(text=False), tmp_path / "t.jsonl")
    words = ("train", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "v1"), "--epochs", "3")
    with monkeypatch.context() as patched:
        patched.setattr("treadle_learned.training.save", interrupted)
        assert "interrupted" in said(*words, code=130)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_backbone_by_default_is_the_packages_own() -> None:
    assert DEFAULT_BACKBONE == DEFAULT
