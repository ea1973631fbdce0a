"""The client's one clock: unix time that never steps back.

Invariant: read once from the wall clock, then carried on by the monotonic one, so that spans of one client are
comparable.
"""

from __future__ import annotations

import time


class Clock:
    """Calling it gives seconds of unix time."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset_s
