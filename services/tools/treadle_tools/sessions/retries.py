"""Environments that are lost while they open are opened again, in a fresh cell (RollArt §8: resets fail most).

Tier one of what makes an opening fast and sure is the worker that has imported the tool before anybody asks
(`Tool.preload`). There is no other tier here: a process in a sandbox has no image to fetch.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog
from treadle_runtime.errors import Unavailable

from treadle_tools.sessions.session import Opening
from treadle_tools.tool import Result, Status

log = structlog.get_logger()

PAUSES_S = (0.2, 1.0)  # before each further try: a worker that died is back within a second or two


async def opened(
    opening: Opening, attempt: Callable[[], Awaitable[Result]], pauses_s: Sequence[float] = PAUSES_S
) -> Result:
    """What `attempt` gives, each in a fresh cell, until one environment stands or has said why not.

    One that died or took too long, and a worker that does not start, is tried again after each of `pauses_s`, for as
    long as the caller waits; one that refuses its arguments, raises, or needs too much memory, would do so again.
    Raises what the last attempt raises.
    """
    for pause_s in pauses_s:
        try:
            result = await attempt()
            if result.alive or result.status not in (Status.CRASHED, Status.TIMED_OUT) or _over(opening, pause_s):
                return result
            why = result.error
        except Unavailable as failure:
            if _over(opening, pause_s):
                raise
            why = failure.message
        log.warning("an environment is opened again", tool=opening.tool.name, why=why, pause_s=pause_s)
        await asyncio.sleep(pause_s)
    return await attempt()


def _over(opening: Opening, pause_s: float) -> bool:
    """Whether the caller will not wait for another try."""
    return opening.ends_at is not None and time.monotonic() + pause_s >= opening.ends_at
