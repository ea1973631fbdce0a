"""The deadline of the RPC being served: required, known to the code below, passed on to the calls it makes.

Owns: one context variable. The interceptor sets it for the time of an RPC; `channels.py` reads it for each outgoing
call. A task that outlives its RPC sees no deadline once the RPC has ended; one that is started to live on from the
beginning takes `detached_context()`.
"""

import asyncio
import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _Served:
    ends_at: float  # loop time, seconds
    active: bool = True


_served: contextvars.ContextVar[_Served | None] = contextvars.ContextVar("treadle_deadline", default=None)


def remaining_s() -> float | None:
    """Seconds left to the RPC being served, not below 0; None outside one, or where it has no deadline."""
    served = _served.get()
    if served is None or not served.active:
        return None
    return max(0.0, served.ends_at - asyncio.get_running_loop().time())


def detached_context() -> contextvars.Context:
    """The present context without the deadline, for `create_task(..., context=)` of work that outlives its RPC."""
    context = contextvars.copy_context()
    context.run(_served.set, None)
    return context


@contextmanager
def serving_for(time_remaining_s: float | None) -> Iterator[None]:
    """Within the block, `remaining_s` counts down from `time_remaining_s`; None: no deadline."""
    if time_remaining_s is None:
        yield
        return
    served = _Served(asyncio.get_running_loop().time() + time_remaining_s)
    token = _served.set(served)
    try:
        yield
    finally:
        served.active = False
        _served.reset(token)
