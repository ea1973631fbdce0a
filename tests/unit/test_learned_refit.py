"""Refitting: the better one is in use afterwards, whatever happens."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.tiny_backbone import tiny_backbone
from support.transcripts import told_by_the_plan
from treadle_learned import training
from treadle_learned.__main__ import REFUSED, main
from treadle_learned.backbone import Tune
from treadle_learned.checkpoint import POINTER, ModelsFolder, load
from treadle_learned.examples import FOLDS
from treadle_learned.training import Fitting, Training, Tuning, refit, train
from treadle_learned.transcript import LearnedError, write_transcripts

PATIENCE_S = 100.0
# Enough to tell the text from the numbers
QUICK = Fitting(epochs=40, patience=10, batch=64, learning_rate=5e-3)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelsFolder:
    """An empty folder of models, which are fitted for a shorter time than by default."""
    monkeypatch.setattr("treadle_learned.training.Training", partial(Training, fitting=QUICK))
    return ModelsFolder(tmp_path / "models")


def test_the_first_is_promoted_and_a_better_one_after_it(models: ModelsFolder) -> None:
    few, many = told_by_the_plan(24, text=False), told_by_the_plan(100, text=False, shift=3.0)
    first = refit(few, models, "v1")
    assert (
        first.promoted and first.current_loss is None and models.current() == models.folder / "v1"
    )
    second = refit(many, models, "v2")
    assert second.promoted and second.current_loss is not None and second.loss < second.current_loss
    assert models.current() == models.folder / "v2"


def test_a_worse_one_is_kept_and_not_promoted(
    models: ModelsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcripts = told_by_the_plan(100, text=False)
    refit(transcripts, models, "good")
    untaught = Training("bad", fitting=Fitting(epochs=0))
    monkeypatch.setattr("treadle_learned.training.Training", lambda *_, **__: untaught)
    found = refit(transcripts, models, "bad")
    assert not found.promoted and found.current_loss is not None and found.loss > found.current_loss
    assert (
        models.current() == models.folder / "good" and load(models.folder / "bad").version == "bad"
    )


def test_prompts_stay_in_their_parts_and_a_trained_backbone_stays_trained(
    models: ModelsFolder, tmp_path: Path
) -> None:
    backbone, transcripts = str(tiny_backbone(tmp_path / "backbone")), told_by_the_plan(200)
    how = Training(
        "v1",
        backbone,
        tune=Tune.LORA,
        seed=7,
        fitting=Fitting(epochs=3),
        tuning=Tuning(2, lora_rate=1e-3),
    )
    train(transcripts, how, models.folder / "v1")
    models.promote("v1")
    refit(transcripts, models, "v2", seed=3)
    old, new = load(models.folder / "v1"), load(models.folder / "v2")
    assert new.notes["seed"] == 7 and old.tuned is not None and new.tuned is not None
    assert new.tuned.parent == models.folder / "v2"
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (new.tuned / name).read_bytes() == (old.tuned / name).read_bytes()


def test_a_crash_leaves_the_one_in_use_and_nothing_by_the_new_name(
    models: ModelsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcripts = told_by_the_plan(text=False)
    refit(transcripts, models, "v1")
    for place in ("save", "_fit"):
        with monkeypatch.context() as patched:
            patched.setattr(training, place, crash)
            with pytest.raises(RuntimeError, match="the machine went away"):
                refit(transcripts, models, "v2")
        assert models.current() == models.folder / "v1"
        assert sorted(entry.name for entry in models.folder.iterdir()) == [POINTER, "v1"]


def crash(*_: object) -> None:
    raise RuntimeError("the machine went away")


def test_as_a_process_it_says_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_transcripts(told_by_the_plan(text=False), tmp_path / "t.jsonl")
    words = ["--models", str(tmp_path / "models"), "--version", "v1", "--transcripts"]
    done = subprocess.run(
        [sys.executable, "-m", "treadle_learned", *words, str(tmp_path / "t.jsonl")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout).keys() == {"version", "promoted", "loss", "current_loss"}
    write_transcripts(told_by_the_plan(3, text=False), tmp_path / "few.jsonl")
    words[3] = "v2"
    for name, says in (
        ("absent.jsonl", "absent.jsonl: No such file"),
        ("few.jsonl", "at least 8 are needed"),
    ):
        assert main([*words, str(tmp_path / name)]) == REFUSED
        told = capsys.readouterr()
        assert told.out == "" and told.err.count("\n") == 1 and says in told.err


@pytest.mark.parametrize("version", ["", "..", "a/b", ".hidden", POINTER, "v1"])
def test_a_name_that_no_version_can_have_is_refused_before_anything_is_trained(
    version: str, models: ModelsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models.folder / "v1").mkdir(parents=True)
    monkeypatch.setattr(training, "_fit", crash)
    with pytest.raises(
        LearnedError, match=r"version: .* cannot name a folder|v1: is there already"
    ):
        refit(told_by_the_plan(text=False), models, version)


def test_a_version_in_use_that_is_damaged_stops_it(models: ModelsFolder) -> None:
    transcripts = told_by_the_plan(text=False)
    refit(transcripts, models, "v1")
    head = models.folder / "v1" / "head.safetensors"
    head.write_bytes(head.read_bytes()[:-1])
    with pytest.raises(LearnedError, match="checksum"):
        refit(transcripts, models, "v2")
    assert not (models.folder / "v2").exists()


def test_who_is_in_use_is_judged_by_the_member_that_has_not_seen_the_validation_prompts(
    models: ModelsFolder,
) -> None:
    """The same transcripts again. Result: neither is better, though the one in use was fitted on
    the validation prompts by all its members but one."""
    transcripts = told_by_the_plan(100, text=False)
    refit(transcripts, models, "v1")
    current = load(models.folder / "v1")
    again = refit(transcripts, models, "v2", seed=5)
    assert current.head.members == FOLDS and again.current_loss == pytest.approx(again.loss)
    assert not again.promoted and load(models.folder / "v2").notes["seed"] == current.notes["seed"]
