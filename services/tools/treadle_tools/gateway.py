"""The service's core: tools by name, actions, sessions, and whether there is a sandbox at all.

Invariant: a request is judged first (its fields, its tool, its session) and only then refused for lack of a sandbox, so
that a caller's mistake is always told as one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle_runtime.errors import FailedPrecondition, InvalidArgument

from treadle_tools.actions import Actions
from treadle_tools.arguments import FIELD
from treadle_tools.background import Background
from treadle_tools.registry import Registry
from treadle_tools.sandbox.cell import Cell
from treadle_tools.sandbox.pool import Pool
from treadle_tools.sessions import Session, Sessions
from treadle_tools.standing import Standing
from treadle_tools.tool import Granted, Limits, Result, Tool


@dataclass(frozen=True)
class Pools:
    """Warm cells by tool. version: of the sandbox; empty where there is none, and `missing` says why."""

    pools: Mapping[str, Pool]
    version: str
    missing: str

    async def take(self, tool: Tool) -> Cell:
        """A fresh cell of `tool`. Raises FailedPrecondition without a sandbox, WorkerFailed where the tool does not
        start.
        """
        self.require()
        return await self.pools[tool.name].take()

    async def put_away(self, tool: Tool, cell: Cell) -> None:
        """Kill a cell that was taken."""
        await self.pools[tool.name].put_away(cell)

    def require(self) -> None:
        """Raises FailedPrecondition SANDBOX_UNAVAILABLE without a sandbox: nothing runs unsandboxed."""
        if self.missing:
            raise FailedPrecondition(
                "SANDBOX_UNAVAILABLE", f"tools run in a sandbox only: {self.missing}; then start the service again"
            )


class Gateway:
    """See the module."""

    def __init__(
        self,
        registry: Registry,
        pools: Pools,
        actions: Actions,
        sessions: Sessions,
        background: Background,
        standing: Standing,
    ) -> None:
        self.registry = registry
        self.standing = standing
        self.pools = pools
        self.sessions = sessions
        self._actions = actions
        self._background = background

    async def call(self, tool: Tool, arguments: Mapping[str, Any], limits: Limits, trajectory_id: str) -> Result:
        """Run a stateless tool. The caller's going away stops it."""
        self.pools.require()

        async def work(granted: Granted) -> Mapping[str, Any]:
            cell = await self.pools.take(tool)
            try:
                return await cell.ask("call", arguments, granted, tool.processes)
            finally:
                self._background.spawn(self.pools.put_away(tool, cell))

        result = await self._actions.run(tool, trajectory_id, limits, work)
        if result.invalid is not None:
            raise InvalidArgument(f"{FIELD}.{result.invalid[0]}", result.invalid[1])
        return result

    async def open(
        self, tool: Tool, arguments: Mapping[str, Any], limits: Limits, trajectory_id: str
    ) -> tuple[Session, Result]:
        """Start a session of an environment."""
        self.pools.require()
        return await self.sessions.open(tool, arguments, limits, trajectory_id)
