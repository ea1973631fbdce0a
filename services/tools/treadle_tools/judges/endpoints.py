"""Where a judge is asked: the endpoint with the fewest questions under way, those that failed last.

Invariant: one that failed is asked again when the others are no better, or after a while.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

AVOIDED_S = 10.0  # an endpoint that failed; a server restarts in minutes, a network hiccup is over in seconds


class Seat(Protocol):
    """A place to ask, for one question."""

    @property
    def url(self) -> str: ...
    def failed(self) -> None:
        """It did not answer."""
        ...


class Endpoints(Protocol):
    """Gives seats."""

    def seat(self) -> AbstractAsyncContextManager[Seat]:
        """Waits for a place to ask, and holds it for the block."""
        ...


@dataclass
class _Endpoint:
    url: str
    asked: int = 0
    avoided_until_s: float = float("-inf")

    def failed(self) -> None:
        self.avoided_until_s = time.monotonic() + AVOIDED_S


class FixedEndpoints:
    """See the module. urls: at least one."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._endpoints = [_Endpoint(url) for url in urls]

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[Seat]:
        """See Endpoints."""
        now_s = time.monotonic()
        chosen = min(self._endpoints, key=lambda one: (one.avoided_until_s > now_s, one.asked))
        chosen.asked += 1
        try:
            yield chosen
        finally:
            chosen.asked -= 1
