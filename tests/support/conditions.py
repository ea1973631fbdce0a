"""Waiting for what has to become true, instead of sleeping."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

POLL_S = 0.01
# What an aiohttp server grants its open requests when it stops. To aiohttp 0 means no limit.
SHUTDOWN_S = 0.1

Said = TypeVar("Said")


async def until(condition: Callable[[], object], within_s: float = 30.0, what: str = "") -> None:
    """Returns once `condition()` is true. Raises AssertionError after `within_s`."""
    ends_at = asyncio.get_running_loop().time() + within_s
    while not condition():
        if asyncio.get_running_loop().time() > ends_at:
            raise AssertionError(f"not within {within_s} s: {what or condition}")
        await asyncio.sleep(POLL_S)


async def until_said(
    ask: Callable[[], Awaitable[Said]], holds: Callable[[Said], object], within_s: float = 30.0
) -> Said:
    """The first answer that holds, asked again and again. Raises AssertionError after
    `within_s`."""
    ends_at = asyncio.get_running_loop().time() + within_s
    while not holds(said := await ask()):
        if asyncio.get_running_loop().time() > ends_at:
            raise AssertionError(f"not within {within_s} s; the last answer: {said}")
        await asyncio.sleep(POLL_S)
    return said
