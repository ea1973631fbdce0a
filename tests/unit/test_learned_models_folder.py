"""The folder of versions: its pointer names a whole one or is refused, and is replaced whole."""

from pathlib import Path

import pytest
import torch
from support.tiny_backbone import HIDDEN
from treadle_learned.checkpoint import HEAD, Checkpoint, save
from treadle_learned.errors import CheckpointError
from treadle_learned.head import QuantileHead
from treadle_learned.models_folder import POINTER, ModelsFolder
from treadle_learned.reading import Bounds


def folder_with(path: Path, *versions: str) -> ModelsFolder:
    for version in versions:
        torch.manual_seed(0)
        save(Checkpoint(version, "nowhere", "f" * 16, HIDDEN, Bounds(), QuantileHead(HIDDEN).eval()), path / version)
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
        with pytest.raises(CheckpointError):
            models.promote(version)
    assert models.current() == tmp_path / "v1"


@pytest.mark.parametrize("said", ["v9", "", "..", "../v1", "/", "v1\nv2"])
def test_a_pointer_that_leads_nowhere_is_refused(tmp_path: Path, said: str) -> None:
    models = folder_with(tmp_path, "v1")
    (tmp_path / POINTER).write_text(said)
    with pytest.raises(CheckpointError, match=f"{POINTER}: names"):
        models.current()


def test_pruning_keeps_the_newest_and_the_one_in_use(tmp_path: Path) -> None:
    models = folder_with(tmp_path, "v1", "v2", "v3", "v4")
    models.promote("v1")
    models.prune(keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["v1", "v3", "v4"]
