"""Versions of the learned model over the small random backbone, with heads that say what a test
wants."""

from pathlib import Path
from typing import Any

import torch
from support.tiny_backbone import HIDDEN, tiny_backbone
from treadle_learned.backbone import Backbone
from treadle_learned.checkpoint import Checkpoint, ModelsFolder, save
from treadle_learned.head import QuantileHead
from treadle_learned.reading import Bounds

BOUNDS = Bounds(prompt_tokens=16, plan_tokens=12, step_tokens=8, obs_tokens=6, window_tokens=64)


def random_head(seed: int = 0) -> QuantileHead:
    """One whose answers depend on all that it is told."""
    torch.manual_seed(seed)
    head = QuantileHead(HIDDEN).eval()
    torch.nn.init.normal_(head.out.weight, std=0.5)
    return head


def saved_version(
    models: Path, version: str, *, backbone: str = "", chosen: str = "learned", seed: int = 0
) -> Path:
    """A checkpoint at models/version; with a `backbone` (folder) it reads text."""
    fingerprint = Backbone.load(backbone, device="cpu").fingerprint if backbone else ""
    notes: dict[str, Any] = {"chosen": chosen}
    checkpoint = Checkpoint(
        version,
        backbone,
        fingerprint,
        HIDDEN,
        BOUNDS,
        random_head(seed),
        notes,
        reads_text=bool(backbone),
    )
    return save(checkpoint, models / version)


def models_with(folder: Path, *versions: str, reads_text: bool = True) -> ModelsFolder:
    """Versions of different heads beside one backbone; the first is in use."""
    models = ModelsFolder(folder / "models")
    models.folder.mkdir(parents=True)
    backbone = str(tiny_backbone(folder / "backbone")) if reads_text else ""
    for seed, version in enumerate(versions):
        saved_version(models.folder, version, backbone=backbone, seed=seed)
    models.promote(versions[0])
    return models
