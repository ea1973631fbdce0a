"""A fitted predictor as a folder: `predictor.json` says what it is, `head.safetensors` has its weights; where the
backbone was trained too, `adapter/` (LoRA) or `backbone/` (all of it) has that.

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
from treadle_learned.backbone_tuned import ADAPTER, WHOLE, load_tuned
from treadle_learned.errors import CheckpointError
from treadle_learned.features import FEATURES
from treadle_learned.head import QuantileHead
from treadle_learned.reading import Bounds

FORMAT = 4  # another one too where what `reading` makes of a transcript changes: a head is fitted to that
ABOUT, HEAD = "predictor.json", "head.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """version: names it in predictions. backbone: folder or hub name, and its fingerprint; both empty for one that
    reads no text. notes: what was measured of it, e.g. by validation; any JSON. tuned: the folder of what was trained
    of the backbone, named `adapter` or `backbone`; None where the backbone is as it was."""

    version: str
    backbone: str
    fingerprint: str
    hidden_size: int
    bounds: Bounds
    head: QuantileHead
    notes: Mapping[str, Any] = field(default_factory=dict)
    reads_text: bool = True
    tuned: Path | None = None

    @property
    def leads(self) -> bool:
        """Whether it was better on its validation prompts than the estimators without a model."""
        return self.notes.get("chosen") != "siblings"


def save(checkpoint: Checkpoint, folder: Path) -> Path:
    """Writes it at `folder`, where nothing may be yet: a version is never written over. Raises OSError."""
    weights = save_tensors({name: tensor.contiguous() for name, tensor in checkpoint.head.state_dict().items()})
    about = {
        "format": FORMAT,
        "version": checkpoint.version,
        "backbone": checkpoint.backbone,
        "fingerprint": checkpoint.fingerprint,
        "reads_text": checkpoint.reads_text,
        "hidden_size": checkpoint.hidden_size,
        "members": checkpoint.head.members,
        "bounds": asdict(checkpoint.bounds),
        "features": list(FEATURES),
        "head_sha256": hashlib.sha256(weights).hexdigest(),
        "tuned": None,
        "notes": dict(checkpoint.notes),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        if checkpoint.tuned is not None:
            shutil.copytree(checkpoint.tuned, partial / checkpoint.tuned.name)
            about["tuned"] = {"folder": checkpoint.tuned.name, "sha256": _sums(partial / checkpoint.tuned.name)}
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
    head = QuantileHead(about["hidden_size"], about["members"])
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
        reads_text=about["reads_text"],
        tuned=_tuned(folder, about["tuned"]),
    )


def backbone_of(checkpoint: Checkpoint, *, device: str | None = None, dtype: torch.dtype | None = None) -> Backbone:
    """The backbone that a checkpoint was fitted with, trained as it was with it. Raises BackboneError, and
    CheckpointError for one that reads no text, and where another backbone or tokenizer stands in its place."""
    if not checkpoint.reads_text:
        raise CheckpointError(f"{checkpoint.version}: reads no text, so it has no backbone")
    if checkpoint.tuned is None:
        backbone = Backbone.load(checkpoint.backbone, device=device, dtype=dtype)
    else:
        backbone = load_tuned(checkpoint.backbone, checkpoint.tuned, device=device, dtype=dtype)
    if backbone.fingerprint != checkpoint.fingerprint:
        raise CheckpointError(
            f"backbone {checkpoint.backbone!r}: is not the model and tokenizer that {checkpoint.version} was fitted "
            "with; put those back, or fit again"
        )
    return backbone


def _tuned(folder: Path, about: Mapping[str, Any] | None) -> Path | None:
    if about is None:
        return None
    name, sums = about.get("folder"), about.get("sha256")
    if name not in (ADAPTER, WHOLE) or not isinstance(sums, dict):
        raise CheckpointError(f"{folder / ABOUT}: tuned: must name {ADAPTER} or {WHOLE}, and the sums of its files")
    try:
        found = _sums(folder / name)
    except OSError as error:
        raise CheckpointError(f"{folder / name}: {error.strerror}; export the predictor again") from error
    for file in sorted(found.keys() | sums.keys()):
        if found.get(file) != sums.get(file):
            raise CheckpointError(
                f"{folder / name / file}: is not the file that was saved (checksum); export the predictor again"
            )
    return folder / str(name)


def _sums(folder: Path) -> dict[str, str]:
    """Checksums of a folder's files by name. Raises OSError."""
    sums: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; is this the folder of a predictor?") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is no JSON ({error})") from error
    if isinstance(about, dict) and about.get("format") not in (None, FORMAT):  # before what another format may lack
        raise CheckpointError(f"{path}: format {about['format']}; this version reads {FORMAT}: train it again")
    kinds = {
        "format": int,
        "version": str,
        "backbone": str,
        "fingerprint": str,
        "reads_text": bool,
        "hidden_size": int,
        "members": int,
        "bounds": dict,
        "features": list,
        "head_sha256": str,
        "tuned": dict | None,
        "notes": dict,
    }
    for name, kind in kinds.items():
        if not isinstance(about, dict) or not isinstance(about.get(name), kind):
            raise CheckpointError(f"{path}: {name}: is missing, or no {getattr(kind, '__name__', 'object')}")
    found: dict[str, Any] = about
    return found
