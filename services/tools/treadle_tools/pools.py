"""Where cells come from: for each tool the backend that runs it; and where its sessions are remembered.

Invariant: nothing runs unsandboxed. A backend that is missing is missing for its own tools alone, and says what to do.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from treadle_runtime.errors import FailedPrecondition

from treadle_tools.backend import Backend, Cell, Found
from treadle_tools.tool import Tool


class Pools:
    """See the module. of_tool: the name of each tool's backend. missing: why a backend is not there. versions: of the
    sandboxes that are there. folder: the service's own, for what outlives it; None where there is no backend.
    """

    def __init__(
        self,
        of_tool: Mapping[str, str],
        backends: Mapping[str, Backend],
        missing: Mapping[str, str],
        versions: Iterable[str],
        folder: Path | None,
    ) -> None:
        self._of_tool = of_tool
        self._backends = backends
        self._missing = missing
        self._by_session: dict[str, Backend] = {}
        self.version = ", ".join(versions)
        self.folder = folder
        self.found: list[Found] = []
        self.closed: dict[str, str] = {}
        for backend in backends.values():
            self.closed |= backend.closed
            for found in backend.found:
                self.found.append(found)
                self._by_session[str(found.record["session_id"])] = backend

    @property
    def backends(self) -> Iterable[Backend]:
        """Those that are there."""
        return self._backends.values()

    def require(self, tool: Tool) -> Backend:
        """Raises FailedPrecondition SANDBOX_UNAVAILABLE without a sandbox for `tool`."""
        name = self._of_tool[tool.name]
        if name not in self._backends:
            raise FailedPrecondition(
                "SANDBOX_UNAVAILABLE",
                f"tools run in a sandbox only: {self._missing[name]}; then start the service again",
            )
        return self._backends[name]

    def moves_cores(self, tool: Tool) -> bool:
        """Whether the cores of an action of `tool` can be changed while it runs."""
        backend = self._backends.get(self._of_tool.get(tool.name, ""))
        return backend is not None and backend.moves_cores

    async def take(self, tool: Tool) -> Cell:
        """A fresh cell of `tool`. Raises FailedPrecondition without a sandbox, WorkerFailed where the tool does not
        start.
        """
        return await self.require(tool).take(tool.name)

    async def put_away(self, cell: Cell) -> None:
        """Kill a cell that was taken."""
        cell.close()

    def bind(self, record: Mapping[str, Any], cell: Cell) -> None:
        """A session lives in a cell from now on."""
        backend = self._backends[self._of_tool[str(record["tool"])]]
        self._by_session[str(record["session_id"])] = backend
        backend.bind(record, cell)

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """What has changed of it."""
        if session_id in self._by_session:
            self._by_session[session_id].note(session_id, facts)

    def forget(self, session_id: str, closed_by: str = "") -> None:
        """It is closed."""
        if session_id in self._by_session:
            self._by_session.pop(session_id).forget(session_id, closed_by)

    async def told(self) -> None:
        """Returns once all of that will be remembered, come what may."""
        for backend in self.backends:
            await backend.told()
