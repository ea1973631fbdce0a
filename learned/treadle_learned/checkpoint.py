"""Save and load fitted predictors, and keep versions of them in a folder.

A checkpoint is a folder: `predictor.json` describes it, `head.safetensors` has the head's weights;
where the backbone was trained too, `adapter/` (LoRA) or `backbone/` (all weights) has that. A
models folder has one checkpoint a version, and a file `current` that names the version in use.

Invariants: a checkpoint is whole or not there (written beside and renamed); a loaded checkpoint
equals the saved one, by checksum; a head is never joined to another backbone, tokenizer or set of
features than it was fitted with. A reader of `current` finds the old version or the new one, and
only a version that is there and loads. The version in use is never removed.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from treadle_learned.backbone import Backbone, load_tuned
from treadle_learned.examples import Examples, States, Track, without_text
from treadle_learned.head import QuantileHead
from treadle_learned.moments import FEATURES, Moment
from treadle_learned.reading import Bounds
from treadle_learned.transcript import LearnedError, Transcript, replace_file

ABOUT, HEAD, POINTER = "predictor.json", "head.safetensors", "current"
# as in a Checkpoint
DESCRIBED = ("version", "backbone", "fingerprint", "reads_text", "hidden_size", "bounds", "notes")


class _Tuned(BaseModel):
    folder: Literal["adapter", "backbone"]
    sha256: dict[str, str]


class _About(BaseModel):
    """Content of `predictor.json`. `format` also changes when `reading` changes its result for a
    transcript, since a head is fitted to that."""

    model_config = ConfigDict(strict=True)

    format: Literal[5]
    version: str
    backbone: str
    fingerprint: str
    reads_text: bool
    hidden_size: int
    members: int
    bounds: Bounds
    features: list[str]
    head_sha256: str
    tuned: _Tuned | None
    notes: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """Fitted predictor. version: its name in predictions. backbone: folder or hub name, and its
    fingerprint; both empty for one that reads no text. notes: how it was made and measured; any
    JSON. tuned: the folder of the trained part of the backbone, named `adapter` or `backbone`; None
    where the backbone is unchanged."""

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
        """Return whether the predictor was better on its validation prompts than the estimators
        without a model."""
        return self.notes.get("chosen") != "siblings"

    def load_backbone(
        self, *, device: str | None = None, dtype: torch.dtype | None = None
    ) -> Backbone:
        """Return the backbone that the head was fitted with. Raises LearnedError, also for a
        checkpoint that reads no text, and where another backbone or tokenizer stands in its
        place."""
        if not self.reads_text:
            raise LearnedError(f"{self.version}: reads no text, so it has no backbone")
        if self.tuned is None:
            backbone = Backbone.load(self.backbone, device=device, dtype=dtype)
        else:
            backbone = load_tuned(self.backbone, self.tuned, device=device, dtype=dtype)
        if backbone.fingerprint != self.fingerprint:
            raise LearnedError(
                f"backbone {self.backbone!r}: is not the model and tokenizer that {self.version} "
                "was fitted with; put those back, or fit again"
            )
        return backbone

    def examples(
        self,
        moments: Sequence[Moment],
        transcripts: Sequence[Transcript],
        track: Track = lambda over, _: over,
    ) -> Examples:
        """Return the moments as examples for the head, in their order. Raises LearnedError."""
        if not self.reads_text:
            return without_text(moments, self.hidden_size)
        return States(self.load_backbone(), transcripts, self.bounds).examples(moments, track)


def save(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint at `folder`, where nothing may exist yet: a version is never written over.
    Raises OSError."""
    weights = save_tensors(
        {name: tensor.contiguous() for name, tensor in checkpoint.head.state_dict().items()}
    )
    about = _About(
        format=5,
        members=checkpoint.head.members,
        features=list(FEATURES),
        head_sha256=hashlib.sha256(weights).hexdigest(),
        tuned=None,
        **{name: getattr(checkpoint, name) for name in DESCRIBED},
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        if checkpoint.tuned is not None:
            copy = partial / checkpoint.tuned.name
            shutil.copytree(checkpoint.tuned, copy)
            about.tuned = _Tuned.model_validate({"folder": copy.name, "sha256": _checksums(copy)})
        (partial / HEAD).write_bytes(weights)
        (partial / ABOUT).write_text(about.model_dump_json(indent=1) + "\n")
        partial.chmod(0o755)
        partial.rename(folder)  # fails where there is one with something in it
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint that `save` wrote. Raises LearnedError that names the wrong file and the
    fault."""
    about = _read_about(folder / ABOUT)
    try:
        weights = (folder / HEAD).read_bytes()
    except OSError as error:
        raise LearnedError(
            f"{folder / HEAD}: {error.strerror}; export the predictor again"
        ) from error
    if hashlib.sha256(weights).hexdigest() != about.head_sha256:
        raise LearnedError(
            f"{folder / HEAD}: is not the file that was saved (checksum); export the predictor "
            "again"
        )
    if about.features != list(FEATURES):
        raise LearnedError(
            f"{folder / ABOUT}: features: was fitted with others than are computed here; fit again"
        )
    head = QuantileHead(about.hidden_size, about.members)
    try:
        head.load_state_dict(load_tensors(weights))
    except (SafetensorError, RuntimeError) as error:
        raise LearnedError(
            f"{folder / HEAD}: does not hold this head ({str(error).splitlines()[0]})"
        ) from error
    tuned = _check_tuned(folder, about.tuned) if about.tuned else None
    return Checkpoint(
        head=head.eval(), tuned=tuned, **{name: getattr(about, name) for name in DESCRIBED}
    )


def _read_about(path: Path) -> _About:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LearnedError(
            f"{path}: {error.strerror}; is this the folder of a predictor?"
        ) from error
    try:
        return _About.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "literal_error" and field == "format":
            raise LearnedError(
                f"{path}: format {first['input']}; this version reads 5: train it again"
            ) from error
        raise LearnedError(f"{path}: {field}: {first['msg']}") from error


def _check_tuned(folder: Path, tuned: _Tuned) -> Path:
    try:
        found = _checksums(folder / tuned.folder)
    except OSError as error:
        raise LearnedError(
            f"{folder / tuned.folder}: {error.strerror}; export the predictor again"
        ) from error
    for file in sorted(found.keys() | tuned.sha256.keys()):
        if found.get(file) != tuned.sha256.get(file):
            path = folder / tuned.folder / file
            raise LearnedError(
                f"{path}: is not the file that was saved (checksum); export the predictor again"
            )
    return folder / tuned.folder


def _checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of a folder's files by name. Raises OSError."""
    sums: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


class ModelsFolder:
    """Folder of versions. It need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def current(self) -> Path | None:
        """Return the version in use; None where none is. Raises LearnedError where `current` names
        no version."""
        try:
            version = (self.folder / POINTER).read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise LearnedError(f"{self.folder / POINTER}: cannot be read ({error})") from error
        if not _can_name_a_version(version) or not (self.folder / version).is_dir():
            raise LearnedError(
                f"{self.folder / POINTER}: names {version!r}, which is no folder beside it"
            )
        return self.folder / version

    def add(self, checkpoint: Path, version: str = "") -> Path:
        """Copy a checkpoint into this folder, as `version` or under its own name, and promote it.
        Raises LearnedError, also for an existing version, and OSError."""
        found = load(checkpoint)
        version = version or found.version
        self.check_new(version)
        folder = save(replace(found, version=version), self.folder / version)
        self.promote(version)
        return folder

    def check_new(self, version: str) -> None:
        """Raise LearnedError for a name that no version can have, and for a version that is there
        already."""
        if not _can_name_a_version(version):
            raise LearnedError(
                f"version: {version!r} cannot name a folder of {self.folder}; choose another"
            )
        if (self.folder / version).exists():
            raise LearnedError(f"{self.folder / version}: is there already; choose another version")

    def promote(self, version: str) -> None:
        """Put a version into use. Raises LearnedError where it is not there or is not whole, and
        OSError."""
        load(self.folder / version)
        replace_file(self.folder / POINTER, f"{version}\n".encode(), 0o644)


def _can_name_a_version(name: str) -> bool:
    return bool(name) and not name.startswith(".") and Path(name).name == name and name != POINTER
