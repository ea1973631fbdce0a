"""Reach the scheduler of a mesh, which may run several of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import grpc.aio
from treadle.certificates import FOLDER_VARIABLE, Certificates, open_channel
from treadle.connection import FOLLOWING, follow
from treadle.errors import error_from
from treadle.scheduler.v1 import scheduler_pb2_grpc

from treadle_cli.exits import UsageProblem

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

CONNECT_S = 10.0  # another scheduler leads within 5 s


def own_certificates() -> Certificates | None:
    """Return the certificates of TREADLE_TLS_FOLDER; None where it is not set. Raises
    UsageProblem."""
    try:
        return Certificates.of_environment()
    except ValueError as error:
        raise UsageProblem(f"{FOLDER_VARIABLE}: {error}") from None


@asynccontextmanager
async def reach_scheduler(
    addresses: str, certificates: Certificates | None = None
) -> AsyncIterator[SchedulerServiceAsyncStub]:
    """Yield a stub of the scheduler that serves. addresses: host:port of each scheduler, with
    commas between. certificates: None: those of TREADLE_TLS_FOLDER. Raises UsageProblem where none
    serves within CONNECT_S, and TreadleError for a call in the block that fails."""
    certificates = certificates or own_certificates()
    async with AsyncExitStack() as stack:
        channels: list[grpc.aio.Channel] = []

        def connect(address: str) -> grpc.aio.Channel:
            channel = open_channel(address, "scheduler", certificates, FOLLOWING)
            stack.push_async_callback(channel.close)
            channels.append(channel)
            return channel

        followed = follow(addresses, connect)
        ready = [asyncio.ensure_future(channel.channel_ready()) for channel in channels]
        done, _ = await asyncio.wait(ready, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        for each in ready:
            each.cancel()
        if not done:
            refusals = (
                []
                if certificates is None
                else [certificates.refusal(a, "scheduler") for a in addresses.split(",")]
            )
            for refusal in filter(None, await asyncio.gather(*refusals)):
                raise UsageProblem(f"--scheduler {addresses}: {refusal.message}")
            hint = "" if certificates else f"; of a mesh with certificates, set {FOLDER_VARIABLE}"
            raise UsageProblem(f"--scheduler {addresses}: no scheduler serves there{hint}")
        try:
            yield scheduler_pb2_grpc.SchedulerServiceStub(followed)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise UsageProblem(
                    f"--scheduler {addresses}: what serves there is no scheduler"
                ) from error
            raise error_from(error) from error
