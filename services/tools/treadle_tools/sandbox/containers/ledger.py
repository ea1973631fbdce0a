"""What the service has told of its sessions, in files that its next life reads: one for each session.

Invariant: a file is whole, or the one before it; what `bind`, `note` and `forget` have written is the kernel's when
they return, and outlives this process (not the machine, whose containers do not outlive it either). Owns: the files
below its folder, which the lock on that folder (`keeper/folder.py`) makes one service's.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_CLOSED = 4096  # closings remembered, for a service that comes back and is asked for one again
OPEN, CLOSED = ".session.json", ".closed"


@dataclass(frozen=True)
class Entry:
    """A session and the container it lives in."""

    record: dict[str, Any]
    host: str
    container: str


class Ledger:
    """See the module. Reads what is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: dict[str, Entry] = {}
        for file in folder.glob(f"*{OPEN}"):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # written by another version
                entry = Entry(**json.loads(file.read_text()))
                self.entries[str(entry.record["session_id"])] = entry
        self.closed = {
            file.name.removesuffix(CLOSED): file.read_text()
            for file in sorted(folder.glob(f"*{CLOSED}"), key=lambda file: file.stat().st_mtime)
        }

    def bind(self, record: Mapping[str, Any], host: str, container: str) -> None:
        """A session, new or again, lives in a container."""
        self._keep(Entry(dict(record), host, container))

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """What has changed."""
        entry = self.entries.get(session_id)
        if entry is not None:
            self._keep(Entry({**entry.record, **facts}, entry.host, entry.container))

    def forget(self, session_id: str, closed_by: str) -> None:
        """It was closed. closed_by: by which request, "" where by none."""
        if closed_by:
            self.closed[session_id] = closed_by
            (self._folder / f"{session_id}{CLOSED}").write_text(closed_by)
            while len(self.closed) > MOST_CLOSED:
                oldest = next(iter(self.closed))
                del self.closed[oldest]
                (self._folder / f"{oldest}{CLOSED}").unlink(missing_ok=True)
        self.entries.pop(session_id, None)
        (self._folder / f"{session_id}{OPEN}").unlink(missing_ok=True)

    def clear(self) -> None:
        """Nobody will ask again."""
        for file in (*self._folder.glob(f"*{OPEN}"), *self._folder.glob(f"*{CLOSED}")):
            file.unlink(missing_ok=True)

    def _keep(self, entry: Entry) -> None:
        session_id = str(entry.record["session_id"])
        self.entries[session_id] = entry
        file = self._folder / f"{session_id}{OPEN}"
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps({"record": entry.record, "host": entry.host, "container": entry.container}))
        fresh.replace(file)
