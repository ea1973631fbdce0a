"""A folder of predictors, one a version, and the file that names the one in use.

Invariants: the pointer is replaced whole, so whoever reads it finds the old version or the new one; it only ever names
a version that is there and loads. A version that is in use is never removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from treadle_learned.checkpoint import load, save
from treadle_learned.errors import CheckpointError

POINTER = "current"


class ModelsFolder:
    """See the module. The folder need not be there yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def current(self) -> Path | None:
        """The version in use; None where none is. Raises CheckpointError for a pointer that leads nowhere."""
        try:
            version = (self.folder / POINTER).read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.folder / POINTER}: cannot be read ({error})") from error
        found = self.folder / version
        elsewhere = not version or version.startswith(".") or Path(version).name != version
        if elsewhere or not found.is_dir():
            raise CheckpointError(f"{self.folder / POINTER}: names {version!r}, which is no folder beside it")
        return found

    def add(self, checkpoint: Path, version: str = "") -> Path:
        """Copies a checkpoint here, as `version` where that is given, and promotes it. Raises CheckpointError, also for
        a version that is there already, OSError."""
        found = load(checkpoint)
        version = version or found.version
        self.check_new(version)
        folder = save(replace(found, version=version), self.folder / version)
        self.promote(version)
        return folder

    def check_new(self, version: str) -> None:
        """Raises CheckpointError for a name that no version can have, and for one that is taken."""
        if not version or version.startswith(".") or Path(version).name != version or version == POINTER:
            raise CheckpointError(f"version: {version!r} cannot name a folder of {self.folder}; choose another")
        if (self.folder / version).exists():
            raise CheckpointError(f"{self.folder / version}: is there already; choose another version")

    def promote(self, version: str) -> None:
        """Makes a version the one in use. Raises CheckpointError where it is not there or is not whole, OSError."""
        load(self.folder / version)
        handle, partial = tempfile.mkstemp(prefix=f".{POINTER}-", dir=self.folder)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(f"{version}\n")
                file.flush()
                os.fsync(file.fileno())
            Path(partial).chmod(0o644)
            Path(partial).replace(self.folder / POINTER)
        finally:
            Path(partial).unlink(missing_ok=True)

    def prune(self, keep: int) -> None:
        """Removes the oldest versions beyond the newest `keep`, but the one in use."""
        current = self.current()
        versions = [each for each in self.folder.iterdir() if each.is_dir() and not each.name.startswith(".")]
        versions.sort(key=lambda each: each.stat().st_mtime_ns, reverse=True)
        for each in versions[keep:]:
            if each != current:
                shutil.rmtree(each, ignore_errors=True)
