"""What every part of the client shares: channels, the call policy, the clock, and where the services are.

Invariant: one address, the scheduler's, is enough; the others come from Scheduler.GetDirectory at first use.
Owned by Client; trajectories, sessions and rollouts borrow it.

Channels to the mesh: one for each address, opened at first use and closed with the client.

Invariant: a channel reconnects by itself within about a second of its peer's return, because every wait above it is
bounded too."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from treadle.engine.v1 import engine_pb2_grpc
from treadle.errors import refused
from treadle.retry import Calls, Timeouts
from treadle.rollout.v1 import rollout_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle.tools.v1 import rewards_pb2_grpc, tools_pb2_grpc
from treadle.types import Clock

if TYPE_CHECKING:
    from treadle.engine.v1.engine_pb2_grpc import EngineServiceAsyncStub
    from treadle.rollout.v1.rollout_pb2_grpc import RolloutServiceAsyncStub
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub
    from treadle.tools.v1.rewards_pb2_grpc import RewardsServiceAsyncStub
    from treadle.tools.v1.tools_pb2_grpc import ToolsServiceAsyncStub

# GetBatch answers with whole groups of long trajectories; gRPC's own limit of 4 MiB is about 350k tokens with
# logprobs and mask.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
# A machine that vanished sends no reset: pings find out within their sum. Treadle's servers allow this often.
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    (
        "grpc.max_reconnect_backoff_ms",
        1_000,
    ),  # gRPC's default grows to 120 s: a restarted scheduler would be missed for minutes
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long one attempt to connect may take
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    # Two clients of one process, or of one test, never share a connection and so never each other's backoff.
    ("grpc.use_local_subchannel_pool", 1),
)


class Channels:
    """Stubs by address. Owns the channels."""

    def __init__(
        self,
        credentials: grpc.ChannelCredentials | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    ) -> None:
        self._credentials, self._interceptors = credentials, tuple(interceptors)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._engines: dict[str, EngineServiceAsyncStub] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port."""
        channel = self._channels.get(address)
        if channel is None:
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(address, _OPTIONS, interceptors=self._interceptors)
            else:
                channel = grpc.aio.secure_channel(address, self._credentials, _OPTIONS, interceptors=self._interceptors)
            self._channels[address] = channel
        return channel

    def scheduler(self, address: str) -> SchedulerServiceAsyncStub:
        """The scheduler at host:port."""
        return scheduler_pb2_grpc.SchedulerServiceStub(self.channel(address))

    def engine(self, address: str) -> EngineServiceAsyncStub:
        """The sidecar at host:port; made once an address, because each step asks for it."""
        stub = self._engines.get(address)
        if stub is None:
            stub = self._engines[address] = engine_pb2_grpc.EngineServiceStub(self.channel(address))
        return stub

    def tools(self, address: str) -> ToolsServiceAsyncStub:
        """The tools service at host:port."""
        return tools_pb2_grpc.ToolsServiceStub(self.channel(address))

    def rewards(self, address: str) -> RewardsServiceAsyncStub:
        """The rewards of the tools service at host:port."""
        return rewards_pb2_grpc.RewardsServiceStub(self.channel(address))

    def rollout(self, address: str) -> RolloutServiceAsyncStub:
        """The rollout service at host:port."""
        return rollout_pb2_grpc.RolloutServiceStub(self.channel(address))

    async def close(self) -> None:
        """Closes every channel; calls still in flight on them are cancelled."""
        channels, self._channels = list(self._channels.values()), {}
        self._engines = {}
        for channel in channels:
            await channel.close()


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
