"""The seam: what the service asks of whatever holds its sandboxes, and of one sandbox.

The keeper of bubblewrap's sandboxes (`keeper/client.py`) and the fleet of containers (`containers/fleet.py`) both have
this shape; neither knows of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from treadle_tools.limits import Limits


class Cell(Protocol):
    """A sandbox in which one action or one session runs. name: unique for as long as anyone remembers it."""

    name: str

    @property
    def reusable(self) -> bool:
        """Whether another call may be asked of it after one that was asked with `again`."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        ...

    async def ask(
        self,
        op: str,
        arguments: Any,
        limits: Limits,
        processes: int,
        *,
        request_id: str = "",
        file: int | None = None,
        again: bool = False,
    ) -> dict[str, Any]:
        """The worker's answer to one request: `call`, `open`, `step`, `recall`, `snapshot` to `file` or `restore` from
        it (see `inside/supervisor.py`). again: what this call leaves is to be removed, since another will follow; an
        answer that is `soiled` says that the last one's could not be, and that this call has not run.

        limits may name the cores that were granted (`cores`, numbers of this machine). Raises CellLost; the cell must
        be closed then.
        """
        ...

    def close(self) -> None:
        """Have everything in it killed, without waiting. Safe to call again."""
        ...


class Found(Protocol):
    """A session of an earlier life of the service. cell: None where its sandbox has ended."""

    @property
    def record(self) -> Mapping[str, Any]:
        """As it was bound and noted."""
        ...

    @property
    def cell(self) -> Cell | None:
        """Where it lives."""
        ...


class Backend(Protocol):
    """Whatever holds sandboxes. Once `run` has begun it keeps some ready for each of its tools."""

    @property
    def found(self) -> Sequence[Found]:
        """The sessions that outlived the service's last life."""
        ...

    @property
    def closed(self) -> Mapping[str, str]:
        """Sessions closed in that life: session id -> the request that closed it."""
        ...

    async def take(self, tool: str) -> Cell:
        """A fresh cell. Raises WorkerFailed where the tool's worker does not start."""
        ...

    def bind(self, record: Mapping[str, Any], cell: Cell) -> None:
        """A session lives in a cell from now on. record: JSON, with its session_id."""
        ...

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """What has changed in its record."""
        ...

    def forget(self, session_id: str, closed_by: str = "") -> None:
        """It is closed. closed_by: by which request."""
        ...

    async def told(self) -> None:
        """Returns once all of that will be remembered although this process is killed."""
        ...

    async def run(self) -> None:
        """Keep sandboxes ready, for ever."""
        ...

    async def close(self) -> None:
        """Leave in good order."""
        ...
