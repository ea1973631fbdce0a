"""Accepted facts on their way to JetStream: in order, at least once, none lost while the process lives.

Invariants: a message leaves the outbox when the server has acknowledged it, not before. Until then it is sent again
with the same Nats-Msg-Id, which the stream's duplicate window makes harmless. Owns no task: `run` is given to a
TaskGroup.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import nats.errors
import structlog

log = structlog.get_logger()

CAPACITY = 65_536  # messages; about 30 MB, minutes of a busy mesh without NATS. Full: publishing waits.
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0


@dataclass(frozen=True)
class Outgoing:
    """One message for the stream; `headers` carry its Nats-Msg-Id."""

    subject: str
    payload: bytes
    headers: dict[str, str]


class Outbox:
    """An ordered, bounded queue in front of one stream; `send` returns once the stream has acknowledged the message."""

    def __init__(self, send: Callable[[Outgoing], Awaitable[None]]) -> None:
        self._send = send
        self._queue: asyncio.Queue[Outgoing] = asyncio.Queue(CAPACITY)
        self._unacknowledged = 0

    @property
    def unacknowledged(self) -> int:
        """Messages accepted and not yet in the stream."""
        return self._unacknowledged

    async def put(self, message: Outgoing) -> None:
        """Accept a message; waits only while the outbox is full."""
        await self._queue.put(message)
        self._unacknowledged += 1

    async def flush(self) -> None:
        """Returns once all that was accepted is in the stream."""
        await self._queue.join()

    async def run(self) -> None:
        """Send what is accepted, one after another, for ever."""
        while True:
            message = await self._queue.get()
            await self._deliver(message)
            self._unacknowledged -= 1
            self._queue.task_done()

    async def _deliver(self, message: Outgoing) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                return await self._send(message)
            except (nats.errors.Error, OSError) as error:
                if retry_s == FIRST_RETRY_S:
                    log.warning("fact not acknowledged, sending it again", subject=message.subject, error=repr(error))
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)
