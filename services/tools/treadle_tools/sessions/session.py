"""One session as the service knows it, and as the keeper remembers it for the service's next life."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from treadle_runtime.errors import FailedPrecondition

from treadle_tools.limits import Limits
from treadle_tools.sandbox.seam import Cell
from treadle_tools.sessions.snapshots import Snapshot
from treadle_tools.tool import Result, Status, Tool


@dataclass(frozen=True)
class Opening:
    """What is asked for. snapshot: to start from, instead of arguments. ends_at: when the caller's time is over
    (time.monotonic); None: never.
    """

    tool: Tool
    arguments: Mapping[str, Any]
    limits: Limits
    trajectory_id: str
    request_id: str
    ends_at: float | None = None
    snapshot: Snapshot | None = None

    @property
    def key(self) -> str:
        """Of this request within its session."""
        return f"open:{self.request_id}"


def step_key(request_id: str) -> str:
    """Of a step within its session: the same id may have opened it."""
    return f"step:{request_id}"


@dataclass
class Session:
    """One environment. opened_at, last_used_at: seconds since the epoch. ended: why it takes no more steps, if so.

    last_key, last: the newest request that the environment has answered, and its answer, where it is known. heard:
    False until the cell has been asked what it answered last, after a life of the service that ended before it heard.
    """

    session_id: str
    tool: Tool
    trajectory_id: str
    limits: Limits
    opened_by: str
    cell: Cell | None = None
    steps: int = 0
    ended: str = ""
    last_key: str = ""
    last: Result | None = None
    heard: bool = True
    opened_at: float = field(default_factory=time.time)
    last_used_at: float = field(default_factory=time.time)
    idle_since: float = field(default_factory=time.monotonic)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def standing(self) -> Cell:
        """The cell, to be asked. Raises FailedPrecondition where the session has ended."""
        if self.ended or self.cell is None:
            raise FailedPrecondition(
                "SESSION_ENDED",
                f"session {self.session_id!r} takes no more steps: {self.ended or 'closed'}",
                session_id=self.session_id,
            )
        return self.cell

    def used(self) -> None:
        """It has just been used."""
        self.last_used_at = time.time()
        self.idle_since = time.monotonic()

    def record(self) -> dict[str, Any]:
        """Everything that is to be remembered, as JSON."""
        fixed = {
            "session_id": self.session_id,
            "tool": self.tool.name,
            "trajectory_id": self.trajectory_id,
            "limits": asdict(self.limits),
            "opened_by": self.opened_by,
            "opened_at": self.opened_at,
        }
        return {**fixed, **self.facts()}

    def facts(self) -> dict[str, Any]:
        """What changes of it. The last answer only where the cell, which has it too, is no more."""
        last = asdict(self.last) if self.ended and self.last is not None else None
        return {
            "steps": self.steps,
            "ended": self.ended,
            "last_key": self.last_key,
            "last": last,
            "last_used_at": self.last_used_at,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any], tool: Tool, cell: Cell | None) -> "Session":
        """From a record of an earlier life of the service."""
        last = record["last"]
        used_s = max(0.0, time.time() - record["last_used_at"])
        return cls(
            session_id=str(record["session_id"]),
            tool=tool,
            trajectory_id=str(record["trajectory_id"]),
            limits=Limits(**record["limits"]),
            opened_by=str(record["opened_by"]),
            cell=cell,
            steps=int(record["steps"]),
            ended=str(record["ended"]),
            last_key=str(record["last_key"]),
            last=None if last is None else _result(last),
            heard=False,
            opened_at=float(record["opened_at"]),
            last_used_at=float(record["last_used_at"]),
            idle_since=time.monotonic() - used_s,
        )


class Memory(Protocol):
    """Where sessions are remembered for the service's next life; see keeper/client.py."""

    def bind(self, record: Mapping[str, Any], cell: Cell) -> None:
        """A session lives in a cell."""
        ...

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """What has changed of it."""
        ...

    def forget(self, session_id: str, closed_by: str = "") -> None:
        """It is closed."""
        ...

    async def told(self) -> None:
        """Returns once all of that will be remembered, come what may."""
        ...


def _result(message: Mapping[str, Any]) -> Result:
    return Result(**{**message, "status": Status(message["status"]), "invalid": None})
