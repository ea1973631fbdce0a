"""The service's core: tools by name, actions, sessions, and whether there is a sandbox at all.

Invariant: a request is judged first (its fields, its tool, its session) and only then refused for lack of a sandbox, so
that a caller's mistake is always told as one.
"""

from collections.abc import Mapping
from typing import Any

from treadle_tools.arguments import refuse_invalid
from treadle_tools.background import Background
from treadle_tools.limits import Granted, Limits
from treadle_tools.registry import Registry
from treadle_tools.remote.function import HttpFunction
from treadle_tools.remote.invocations import Invocations
from treadle_tools.sandbox.pools import KeptCells, Pools
from treadle_tools.sandbox.seam import Cell
from treadle_tools.scheduling.actions import Actions
from treadle_tools.scheduling.standing import Standing
from treadle_tools.sessions.session import Opening, Session
from treadle_tools.sessions.sessions import Sessions
from treadle_tools.sessions.snapshots import Snapshots
from treadle_tools.tool import Kind, Result, Tool


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
        snapshots: Snapshots,
        invocations: Invocations,
        kept: KeptCells,
    ) -> None:
        self.registry = registry
        self.standing = standing
        self.pools = pools
        self.sessions = sessions
        self.snapshots = snapshots
        self._actions = actions
        self._background = background
        self._invocations = invocations
        self._kept = kept

    async def call(self, tool: Tool, arguments: Mapping[str, Any], limits: Limits, trajectory_id: str) -> Result:
        """Run a stateless tool. The caller's going away stops it."""
        if isinstance(tool.remote, HttpFunction):
            return await self._invocations.run(tool, tool.remote, arguments, limits, trajectory_id)
        self.pools.require(tool)

        async def work(granted: Granted) -> Mapping[str, Any]:
            kept = self._kept.take(trajectory_id, tool)
            if kept is not None:
                reply = await self._asked(kept, tool, arguments, granted, trajectory_id)
                if not reply.get("soiled"):
                    return reply
            return await self._asked(await self.pools.take(tool), tool, arguments, granted, trajectory_id)

        result = await self._actions.run(tool, trajectory_id, limits, work)
        refuse_invalid(result)
        return result

    async def _asked(
        self, cell: Cell, tool: Tool, arguments: Mapping[str, Any], granted: Granted, trajectory_id: str
    ) -> Mapping[str, Any]:
        """The answer to one call in `cell`, which is kept for the trajectory's next one or put away."""
        again = tool.kind is Kind.STATELESS and self._kept.wanted(cell, trajectory_id)
        keep = False
        try:
            reply = await cell.ask("call", arguments, granted, tool.processes, again=again)
            keep = bool(reply.get("again"))
            return reply
        finally:
            if keep:
                self._kept.keep(trajectory_id, tool, cell)
            else:
                self._background.spawn(self.pools.put_away(cell))

    async def open(self, opening: Opening) -> tuple[Session, Result]:
        """Start a session of an environment."""
        self.pools.require(opening.tool)
        return await self.sessions.open(opening)
