"""States of environments on disk, from which other sessions can start.

Owns: the folder `snapshots` of the state folder, with two files for each snapshot: a tar that the sandbox wrote
(`inside/program.py`), and what the service knows of it. Invariants: a snapshot is listed once it is whole; there are at
most `most`, each removed `kept_s` after it was taken. Snapshots outlive the service as long as its sandbox daemon does.
"""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import structlog
from pydantic import TypeAdapter
from treadle_runtime.errors import NotFound, ResourceExhausted
from treadle_runtime.identity.tenants import like

from treadle_tools.tool import Result, Tool

log = structlog.get_logger()

FULL_RETRY_S = 10.0
RESULT = TypeAdapter(Result)


@dataclass(frozen=True)
class Snapshot:
    """One state. steps: of its session until then. last: its last answer until then. Times in s since the epoch."""

    snapshot_id: str
    tool: Tool
    session_id: str
    steps: int
    last: Result
    size_bytes: int
    taken_at: float
    expires_at: float


class Snapshots:
    """The snapshots of one service. Call `load` first."""

    def __init__(self, folder: Path, *, most: int, kept_s: float) -> None:
        self._folder = folder
        self._most = most
        self._kept_s = kept_s
        self._snapshots: dict[str, Snapshot] = {}
        self._writing = 0

    def load(self, tools: Iterable[Tool]) -> None:
        """Find the snapshots of an earlier run, and remove all other files."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        by_name = {tool.name: tool for tool in tools}
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                message = json.loads(path.read_text())
                last = RESULT.validate_python(message["last"])
                snapshot = Snapshot(**{**message, "tool": by_name[message["tool"]], "last": last})
                self._snapshots[snapshot.snapshot_id] = snapshot
        self.expire()
        for path in self._folder.iterdir():
            if path.stem not in self._snapshots:
                path.unlink()

    @contextlib.contextmanager
    def write(self, session_id: str) -> Iterator[tuple[int, Callable[[Tool, str, int, Result], Snapshot]]]:
        """The descriptor of a new snapshot of a session, and what lists it; not listed, it is removed.

        Raises ResourceExhausted.
        """
        self.expire()
        if len(self._snapshots) + self._writing >= self._most:
            why = f"{self._most} snapshots are kept already"
            raise ResourceExhausted("SNAPSHOTS_FULL", why, retry_after_s=FULL_RETRY_S)
        snapshot_id = like(session_id, f"snap-{uuid.uuid4().hex}")
        file = os.open(self._tar(snapshot_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._writing += 1
        try:
            yield file, partial(self._add, snapshot_id)
        finally:
            self._writing -= 1
            os.close(file)
            if snapshot_id not in self._snapshots:
                self._remove(snapshot_id)

    def _add(self, snapshot_id: str, tool: Tool, session_id: str, steps: int, last: Result) -> Snapshot:
        now = time.time()
        size_bytes = self._tar(snapshot_id).stat().st_size
        snapshot = Snapshot(snapshot_id, tool, session_id, steps, last, size_bytes, now, now + self._kept_s)
        unfinished = self._folder / f"{snapshot_id}.part"
        unfinished.write_text(json.dumps({**asdict(snapshot), "tool": tool.name}))
        unfinished.replace(self._folder / f"{snapshot_id}.json")
        self._snapshots[snapshot_id] = snapshot
        return snapshot

    def get(self, snapshot_id: str) -> Snapshot:
        """Find a snapshot. Raises NotFound."""
        self.expire()
        if snapshot_id not in self._snapshots:
            why = f"snapshot_id: there is no snapshot {snapshot_id[:64]!r}; each is kept {self._kept_s:g} s"
            raise NotFound("SNAPSHOT_NOT_FOUND", why, snapshot_id=snapshot_id)
        return self._snapshots[snapshot_id]

    def open(self, snapshot: Snapshot) -> BinaryIO:
        """Its file, to be read."""
        return self._tar(snapshot.snapshot_id).open("rb")

    def expire(self) -> None:
        """Remove those whose time is over."""
        now = time.time()
        for snapshot in [one for one in self._snapshots.values() if one.expires_at <= now]:
            self._remove(snapshot.snapshot_id)

    def _remove(self, snapshot_id: str) -> None:
        self._snapshots.pop(snapshot_id, None)
        (self._folder / f"{snapshot_id}.json").unlink(missing_ok=True)
        self._tar(snapshot_id).unlink(missing_ok=True)

    def _tar(self, snapshot_id: str) -> Path:
        return self._folder / f"{snapshot_id}.tar"
