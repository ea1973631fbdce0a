"""One session: a stateful environment, its sandbox, its last answer, and its record for the service's next run."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter
from treadle_runtime.errors import FailedPrecondition

from treadle_tools.sandbox.sandboxes import Backend, Sandbox
from treadle_tools.tool import Limits, Result, Tool

RESULT = TypeAdapter(Result)
FIXED = ("session_id", "trajectory_id", "job", "opened_by", "opened_at")  # fields that are stored as they are
CHANGING = ("steps", "ended", "last_key", "last_used_at")


@dataclass(frozen=True)
class Opening:
    """A request to open a session. ends_at: by time.monotonic."""

    tool: Tool
    arguments: Mapping[str, Any]
    limits: Limits
    trajectory_id: str
    request_id: str
    job: str
    ends_at: float | None = None

    @property
    def key(self) -> str:
        """Names this request within its session, where a step may have the same request id."""
        return f"open:{self.request_id}"


@dataclass
class Session:
    """opened_at, last_used_at: seconds since the epoch. ended: why it takes no more steps; empty: it does.

    last_key, last: the newest request that the environment has answered, and its answer, where known. recalled: False
    until the sandbox of a session of an earlier run has been asked for its last answer, which that run may have missed.
    """

    session_id: str
    tool: Tool
    backend: Backend
    trajectory_id: str
    limits: Limits
    opened_by: str
    job: str
    sandbox: Sandbox | None = None
    steps: int = 0
    ended: str = ""
    last_key: str = ""
    last: Result | None = None
    recalled: bool = True
    opened_at: float = field(default_factory=time.time)
    last_used_at: float = field(default_factory=time.time)
    idle_since: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the present step

    def require(self) -> Sandbox:
        """The sandbox. Raises FailedPrecondition where the session has ended."""
        if self.ended or self.sandbox is None:
            why = f"session {self.session_id!r} takes no more steps: {self.ended or 'closed'}"
            raise FailedPrecondition("SESSION_ENDED", why, session_id=self.session_id)
        return self.sandbox

    def touch(self) -> None:
        """Restart the time that it may be idle."""
        self.last_used_at = time.time()
        self.idle_since = time.monotonic()

    def record(self) -> dict[str, Any]:
        """Everything that the next run needs, as JSON."""
        fixed = {name: getattr(self, name) for name in FIXED}
        return {**fixed, "tool": self.tool.name, "limits": asdict(self.limits), **self.facts()}

    def facts(self) -> dict[str, Any]:
        """The fields of the record that change. The last answer only where no sandbox has it any more."""
        last = asdict(self.last) if self.ended and self.last is not None else None
        return {**{name: getattr(self, name) for name in CHANGING}, "last": last}

    @classmethod
    def restore(cls, record: Mapping[str, Any], tool: Tool, backend: Backend, sandbox: Sandbox | None) -> "Session":
        """A session of an earlier run, from its record."""
        used_s = max(0.0, time.time() - record["last_used_at"])
        last = None if record["last"] is None else RESULT.validate_python(record["last"])
        stored = {**record, "tool": tool, "limits": Limits(**record["limits"]), "last": last}
        return cls(**stored, backend=backend, sandbox=sandbox, recalled=False, idle_since=time.monotonic() - used_s)
