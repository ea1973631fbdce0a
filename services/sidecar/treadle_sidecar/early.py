"""An attempt that begins before its step is here, while the step's ticket is on its way (ADR 0068).

Invariants: no token of it leaves the sidecar before a step with a ticket has claimed it. An attempt that nobody claims
is read to its end, since its slot is free only then.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace

from treadle_sidecar.engine.client import EngineChunk, EngineClient, EngineRequest

KEPT_S = 0.25  # for a claim; a ticket that takes longer waits for room, and may name another engine


class EarlyAttempt:
    """A request that is on the engine from now on. on_first: called once it has its first token, claimed or not."""

    def __init__(self, request: EngineRequest, engine: EngineClient, on_first: Callable[[], None]) -> None:
        self.request = request
        self.claimed = False
        self._chunks = engine.generate(request)
        self._on_first = on_first
        self._first = asyncio.ensure_future(anext(self._chunks, None))
        self._first.add_done_callback(self._note_first)
        self._settled = asyncio.Event()

    def is_as(self, request: EngineRequest) -> bool:
        """Whether the engine would answer the request in the same way."""
        return replace(request, rid=self.request.rid) == self.request

    def claim(self) -> None:
        """It is a step's from now on."""
        self.claimed = True
        self._settled.set()

    def give_up(self) -> None:
        """It will be no step's, unless it is one's already."""
        self._settled.set()

    async def until_settled(self) -> None:
        """Return once it is claimed, given up, or KEPT_S old."""
        with suppress(TimeoutError):
            async with asyncio.timeout(KEPT_S):
                await self._settled.wait()

    async def close(self) -> None:
        """Close its connection, where it is not read to its end."""
        self._first.cancel()
        await asyncio.wait((self._first,))
        await self._chunks.aclose()

    async def chunks(self) -> AsyncGenerator[EngineChunk, None]:
        """As those of EngineClient.generate. Raises what it raises."""
        async with aclosing(self._chunks):
            if (first := await self._first) is not None:
                yield first
            async for chunk in self._chunks:
                yield chunk

    def _note_first(self, first: asyncio.Future[EngineChunk | None]) -> None:
        if not first.cancelled() and first.exception() is None:
            self._on_first()
