"""The folder of a training that is not done: what has been computed for it so far, by name.

Invariants: a thing is there whole or not at all; a folder is only gone on with by the training that it was begun for,
with the same transcripts and options, and by one process at a time; it is removed when the checkpoint is whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from treadle_learned.errors import TrainingError

ABOUT, LOCK = "training.json", "lock"


class Partial:
    """Begins the folder, or goes on with it. `about`: what it is for, as JSON. Raises TrainingError, OSError."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder = folder
        told = json.dumps(about, indent=1, sort_keys=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)  # the kernel lets go of it with the process
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise TrainingError(f"{folder}: another process is training there; wait for it, or end it") from error
        try:
            self._begin(told)
        except BaseException:
            self.close()
            raise

    def _begin(self, told: str) -> None:
        folder = self.folder
        try:
            begun = json.loads((folder / ABOUT).read_text())
        except FileNotFoundError:
            self._write(ABOUT, told.encode())
            return
        except ValueError as error:
            raise TrainingError(f"{folder / ABOUT}: is no JSON ({error}); remove {folder} to begin afresh") from error
        now = json.loads(told)
        other = sorted(name for name in begun.keys() | now.keys() if begun.get(name) != now.get(name))
        if other:
            raise TrainingError(
                f"{folder}: a training was begun there with another {', '.join(other)}; go on with what it was begun "
                "with, or remove the folder to begin afresh"
            )

    def put(self, name: str, state: Mapping[Any, Any]) -> None:
        """Takes the place of what was there. Raises OSError."""
        partial = self.folder / f".{name}.pt"
        torch.save(dict(state), partial)
        partial.replace(self.folder / f"{name}.pt")

    def get(self, name: str) -> dict[Any, Any] | None:
        """What was put; None where nothing was. Raises TrainingError for what cannot be read."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return None
        try:
            found: dict[Any, Any] = torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
            said = str(error).splitlines()[0]
            raise TrainingError(f"{path}: cannot be read ({said}); remove {self.folder} to begin afresh") from error
        return found

    def close(self) -> None:
        """Lets another process go on with it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """All of it."""
        shutil.rmtree(self.folder)

    def _write(self, name: str, content: bytes) -> None:
        partial = self.folder / f".{name}"
        partial.write_bytes(content)
        partial.replace(self.folder / name)
