"""Checkpoints and their versions: what was saved is what is loaded, or it is refused and says
why."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.learned_models import random_head
from support.tiny_backbone import HIDDEN, tiny_backbone
from treadle_learned.backbone import Backbone
from treadle_learned.checkpoint import ABOUT, HEAD, POINTER, Checkpoint, ModelsFolder, load, save
from treadle_learned.moments import FEATURES
from treadle_learned.reading import Bounds
from treadle_learned.transcript import LearnedError


def made(version: str = "v1") -> Checkpoint:
    return Checkpoint(
        version,
        "nowhere",
        "f" * 16,
        HIDDEN,
        Bounds(step_tokens=20),
        random_head(),
        {"pinball": 0.2},
    )


def test_what_was_saved_is_loaded_and_predicts_the_same(tmp_path: Path) -> None:
    saved = made()
    loaded = load(save(saved, tmp_path / "predictor"))
    assert replace(loaded, head=saved.head) == saved
    told = torch.randn(4, HIDDEN), torch.rand(4, len(FEATURES)), torch.ones(4, dtype=torch.bool)
    assert torch.equal(loaded.head(*told), saved.head(*told))


def test_a_version_is_never_written_over_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    save(made("v1"), tmp_path / "predictor")
    with pytest.raises(OSError, match="not empty"):
        save(made("v2"), tmp_path / "predictor")
    assert load(tmp_path / "predictor").version == "v1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["predictor"]


def cut_short(folder: Path) -> None:
    (folder / HEAD).write_bytes((folder / HEAD).read_bytes()[:-5])


def about(name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        told = json.loads((folder / ABOUT).read_text())
        (folder / ABOUT).write_text(json.dumps({**told, name: value}))

    return change


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_short, r"head\.safetensors: is not the file that was saved \(checksum\)"),
        (lambda folder: (folder / HEAD).unlink(), r"head\.safetensors: No such file"),
        (lambda folder: (folder / ABOUT).unlink(), r"predictor\.json: No such file"),
        (lambda folder: (folder / ABOUT).write_text("{"), r"predictor\.json: .*Invalid JSON"),
        (about("version", 3), r"predictor\.json: version: Input should be a valid string"),
        (about("format", 4), r"format 4; this version reads 5: train it again"),
        (about("features", ["turn"]), r"features: was fitted with others"),
        (about("hidden_size", 64), r"head\.safetensors: does not hold this head"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_says_what_is_wrong(
    damage: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    folder = save(made(), tmp_path / "predictor")
    damage(folder)
    with pytest.raises(LearnedError, match=says):
        load(folder)


def test_another_tokenizer_in_the_backbones_place_is_refused(tmp_path: Path) -> None:
    place = tiny_backbone(tmp_path / "backbone")
    fitted = Backbone.load(str(place), device="cpu")
    checkpoint = replace(made(), backbone=str(place), fingerprint=fitted.fingerprint)
    assert checkpoint.load_backbone(device="cpu").fingerprint == fitted.fingerprint
    tokenizer = json.loads((place / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["r"], vocabulary["t"] = vocabulary["t"], vocabulary["r"]
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        LearnedError, match="is not the model and tokenizer that v1 was fitted with"
    ):
        checkpoint.load_backbone(device="cpu")


def folder_with(path: Path, *versions: str) -> ModelsFolder:
    for version in versions:
        save(made(version), path / version)
    return ModelsFolder(path)


def test_nothing_is_in_use_until_something_is_promoted(tmp_path: Path) -> None:
    assert ModelsFolder(tmp_path / "absent").current() is None
    models = folder_with(tmp_path, "v1", "v2")
    assert models.current() is None
    for version in ("v1", "v2", "v1"):
        models.promote(version)
        assert models.current() == tmp_path / version
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [POINTER, "v1", "v2"]


def test_what_does_not_load_is_not_promoted_and_the_old_one_stays(tmp_path: Path) -> None:
    models = folder_with(tmp_path, "v1", "v2")
    models.promote("v1")
    (tmp_path / "v2" / HEAD).write_bytes(b"")
    for version in ("v2", "absent"):
        with pytest.raises(LearnedError):
            models.promote(version)
    assert models.current() == tmp_path / "v1"


@pytest.mark.parametrize("said", ["v9", "", "..", "../v1", "/", "v1\nv2"])
def test_a_pointer_that_leads_nowhere_is_refused(tmp_path: Path, said: str) -> None:
    models = folder_with(tmp_path, "v1")
    (tmp_path / POINTER).write_text(said)
    with pytest.raises(LearnedError, match=f"{POINTER}: names"):
        models.current()
