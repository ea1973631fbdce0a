"""Send changes to open pages: server-sent events, at most two a second, each with what has changed.

The id of an event is the cursor after it, so that a browser which reconnects (Last-Event-ID)
continues where it was. An id from another process of the console is no cursor here: the page then
begins anew.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from treadle_console.convert import to_json
from treadle_console.records import Cursor
from treadle_console.state import Mesh

PERIOD_S = 0.5  # between two messages to a page
HEARTBEAT_S = 10.0  # a page that receives nothing for longer takes the connection for lost
RETRY_MS = 1000  # after which a browser connects again


class Feed:
    """Streams of changes, one for each open page. epoch: names this process, of A-Z a-z 0-9.
    now_ms: the time, since the epoch."""

    def __init__(self, mesh: Mesh, epoch: str, stopping: asyncio.Event, now_ms: Any) -> None:
        self._mesh, self._epoch, self._stopping, self._now_ms = mesh, epoch, stopping, now_ms
        # messages of this revision, by what they follow
        self._made: dict[tuple[Cursor, int], tuple[str, Cursor]] = {}
        self.open = 0

    def cursor_of(self, event_id: str) -> Cursor | None:
        """Return the cursor that an id names; None where a page has to begin anew."""
        epoch, *numbers = event_id.split("-")
        if (
            epoch != self._epoch
            or len(numbers) != 3
            or not all(each.isascii() and each.isdigit() for each in numbers)
        ):
            return None
        return Cursor(*map(int, numbers))

    async def events(self, last_id: str) -> AsyncIterator[str]:
        """Yield the text of one page's stream, from the event after `last_id` on; it ends with the
        service."""
        cursor = self.cursor_of(last_id)
        reset, cursor = cursor is None, cursor or Cursor()
        self.open += 1
        try:
            yield f"retry: {RETRY_MS}\n\n"
            quiet_s = HEARTBEAT_S  # so that a page learns at once that it is connected
            while not self._stopping.is_set():
                message, following = self._message(cursor)
                if following != cursor or reset or quiet_s >= HEARTBEAT_S:
                    begins = f'{{"reset":{json.dumps(reset)},"now_ms":{self._now_ms()},'
                    ids = "-".join(map(str, following))
                    yield f"id: {self._epoch}-{ids}\ndata: {begins}{message}\n\n"
                    cursor, reset, quiet_s = following, False, 0.0
                    if cursor.span < self._mesh.spans.end:  # more is waiting
                        continue
                quiet_s += PERIOD_S
                await self._pause()
        finally:
            self.open -= 1

    def _message(self, since: Cursor) -> tuple[str, Cursor]:
        """Return the rest of a message's object, and the cursor after it. Pages at the same cursor
        share one message."""
        key = since, self._mesh.revision
        if key not in self._made:
            self._made = {
                known: made for known, made in self._made.items() if known[1] == self._mesh.revision
            }
            delta, following = self._mesh.delta(since)
            self._made[key] = to_json(delta)[1:], following
        return self._made[key]

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._stopping.wait()
        except TimeoutError:
            return
