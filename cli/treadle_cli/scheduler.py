"""Reach the scheduler of a mesh, which may run several of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import grpc.aio
from treadle.connection import FOLLOWING, follow
from treadle.scheduler.v1 import scheduler_pb2_grpc

from treadle_cli.problems import UsageProblem

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

CONNECT_S = 10.0  # another scheduler leads within 5 s


@asynccontextmanager
async def reach_scheduler(addresses: str) -> AsyncIterator[SchedulerServiceAsyncStub]:
    """Call the scheduler that serves. addresses: host:port of each scheduler, with commas between. Raises UsageProblem
    where none serves within CONNECT_S."""
    async with AsyncExitStack() as stack:
        channels: list[grpc.aio.Channel] = []

        def connect(address: str) -> grpc.aio.Channel:
            channel = grpc.aio.insecure_channel(address, FOLLOWING)
            stack.push_async_callback(channel.close)
            channels.append(channel)
            return channel

        followed = follow(addresses, connect)
        ready = [asyncio.ensure_future(channel.channel_ready()) for channel in channels]
        done, _ = await asyncio.wait(ready, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        for each in ready:
            each.cancel()
        if not done:
            raise UsageProblem(f"--scheduler {addresses}: no scheduler serves there")
        yield scheduler_pb2_grpc.SchedulerServiceStub(followed)
