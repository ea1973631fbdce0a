"""A fitted predictor as a folder: `predictor.json` says what it is, `head.safetensors` has its weights.

Invariants: a folder is whole or not there (written beside and renamed); what is loaded is what was saved, by checksum;
a head is never joined to another backbone, tokenizer or set of features than it was fitted with.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from treadle_learned.backbone import Backbone
from treadle_learned.errors import CheckpointError
from treadle_learned.features import FEATURES
from treadle_learned.head import QuantileHead
from treadle_learned.reading import Bounds

FORMAT = 1
ABOUT, HEAD = "predictor.json", "head.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """version: names it in predictions. backbone: folder or hub name, and its fingerprint. notes: what was measured of
    it, e.g. by validation; any JSON."""

    version: str
    backbone: str
    fingerprint: str
    hidden_size: int
    bounds: Bounds
    head: QuantileHead
    notes: Mapping[str, Any] = field(default_factory=dict)


def save(checkpoint: Checkpoint, folder: Path) -> Path:
    """Writes it at `folder`, where nothing may be yet: a version is never written over. Raises OSError."""
    weights = save_tensors({name: tensor.contiguous() for name, tensor in checkpoint.head.state_dict().items()})
    about = {
        "format": FORMAT,
        "version": checkpoint.version,
        "backbone": checkpoint.backbone,
        "fingerprint": checkpoint.fingerprint,
        "hidden_size": checkpoint.hidden_size,
        "bounds": asdict(checkpoint.bounds),
        "features": list(FEATURES),
        "head_sha256": hashlib.sha256(weights).hexdigest(),
        "notes": dict(checkpoint.notes),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (partial / HEAD).write_bytes(weights)
        (partial / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        partial.chmod(0o755)
        partial.rename(folder)  # fails where there is one with something in it
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load(folder: Path) -> Checkpoint:
    """What `save` wrote. Raises CheckpointError saying which file is wrong and how."""
    about = _about(folder)
    try:
        weights = (folder / HEAD).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder / HEAD}: {error.strerror}; export the predictor again") from error
    if hashlib.sha256(weights).hexdigest() != about["head_sha256"]:
        raise CheckpointError(f"{folder / HEAD}: is not the file that was saved (checksum); export the predictor again")
    if about["features"] != list(FEATURES):
        raise CheckpointError(f"{folder / ABOUT}: features: was fitted with others than are computed here; fit again")
    head = QuantileHead(about["hidden_size"])
    try:
        head.load_state_dict(load_tensors(weights))
    except (SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{folder / HEAD}: does not hold this head ({str(error).splitlines()[0]})") from error
    return Checkpoint(
        version=about["version"],
        backbone=about["backbone"],
        fingerprint=about["fingerprint"],
        hidden_size=about["hidden_size"],
        bounds=Bounds(**about["bounds"]),
        head=head.eval(),
        notes=about["notes"],
    )


def backbone_of(checkpoint: Checkpoint, *, device: str | None = None, dtype: torch.dtype | None = None) -> Backbone:
    """The backbone that a checkpoint was fitted with. Raises BackboneError, and CheckpointError where another one, or
    another tokenizer, stands in its place now."""
    backbone = Backbone.load(checkpoint.backbone, device=device, dtype=dtype)
    if backbone.fingerprint != checkpoint.fingerprint:
        raise CheckpointError(
            f"backbone {checkpoint.backbone!r}: is not the model and tokenizer that {checkpoint.version} was fitted "
            "with; put those back, or fit again"
        )
    return backbone


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; is this the folder of a predictor?") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is no JSON ({error})") from error
    kinds = {
        "format": int,
        "version": str,
        "backbone": str,
        "fingerprint": str,
        "hidden_size": int,
        "bounds": dict,
        "features": list,
        "head_sha256": str,
        "notes": dict,
    }
    for name, kind in kinds.items():
        if not isinstance(about, dict) or not isinstance(about.get(name), kind):
            raise CheckpointError(f"{path}: {name}: is missing, or no {kind.__name__}")
    if about["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {about['format']}; this version reads {FORMAT}")
    found: dict[str, Any] = about
    return found
