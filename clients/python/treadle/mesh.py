"""What every part of the client shares: channels, the call policy, the clock, and where the services are.

Invariant: one address, the scheduler's, is enough; the others come from Scheduler.GetDirectory at first use.
Owned by Client; trajectories, sessions and rollouts borrow it.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from treadle.channels import Channels
from treadle.clock import Clock
from treadle.errors import refused
from treadle.retry import Calls, Timeouts
from treadle.scheduler.v1 import scheduler_pb2

if TYPE_CHECKING:
    from treadle.rollout.v1.rollout_pb2_grpc import RolloutServiceAsyncStub
    from treadle.tools.v1.rewards_pb2_grpc import RewardsServiceAsyncStub
    from treadle.tools.v1.tools_pb2_grpc import ToolsServiceAsyncStub


def request_id() -> str:
    """A fresh id for one logical call; reused by every attempt of that call."""
    return uuid.uuid4().hex


class Mesh:
    """The mesh as this client reaches it."""

    def __init__(
        self,
        address: str,
        channels: Channels,
        calls: Calls,
        timeouts: Timeouts,
        clock: Clock,
        call_tokens: int = 0,
        job: str = "",
    ) -> None:
        self.channels, self.calls, self.timeouts, self.clock = channels, calls, timeouts, clock
        self.call_tokens = call_tokens  # most tokens of one call to an engine, 0 for whole turns
        self.job = job  # whose share of pooled services this client's work takes; empty: its rollout's
        self.scheduler = channels.scheduler(address)
        self._directory: scheduler_pb2.GetDirectoryResponse | None = None
        self._asking = asyncio.Lock()

    async def tools(self) -> ToolsServiceAsyncStub:
        """The tools service; FAILED_PRECONDITION NO_TOOLS_SERVICE where the mesh runs none."""
        return self.channels.tools(await self._tools_address())

    async def rewards(self) -> RewardsServiceAsyncStub:
        """The rewards of the tools service; FAILED_PRECONDITION NO_TOOLS_SERVICE where the mesh runs none."""
        return self.channels.rewards(await self._tools_address())

    async def rollout(self) -> RolloutServiceAsyncStub:
        """The rollout service; FAILED_PRECONDITION NO_ROLLOUT_SERVICE where the mesh runs none."""
        address = (await self._where()).rollout_address
        if not address:
            raise refused("NO_ROLLOUT_SERVICE", "the scheduler's directory names no rollout service")
        return self.channels.rollout(address)

    async def _tools_address(self) -> str:
        address = (await self._where()).tools_address
        if not address:
            raise refused("NO_TOOLS_SERVICE", "the scheduler's directory names no tools service")
        return address

    async def _where(self) -> scheduler_pb2.GetDirectoryResponse:
        async with self._asking:
            if self._directory is None:
                request = scheduler_pb2.GetDirectoryRequest()
                self._directory = await self.calls.unary(self.scheduler.GetDirectory, request, self.timeouts.control_s)
            return self._directory
