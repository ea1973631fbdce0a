"""The keeper's table of sessions: what the service has told of each, and which cell is its.

Invariant: a record is the service's own, kept word for word; the keeper reads nothing in it but its id. Owns: no
process; `keeper.py` does.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

MOST_CLOSED = 4096  # closings remembered, for a service that comes back and is asked for one again

Record = dict[str, Any]


class Table:
    """See the module. closed: session id → the request that closed it."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._cells: dict[str, str] = {}
        self.closed: OrderedDict[str, str] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[Record, str | None]]:
        for session_id, record in self._records.items():
            yield record, self._cells.get(session_id)

    def bind(self, record: Record, cell: str) -> None:
        """A session, new or again, lives in a cell."""
        session_id = str(record["session_id"])
        self._records[session_id] = record
        self._cells[session_id] = cell

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """What has changed."""
        if session_id in self._records:
            self._records[session_id].update(facts)

    def forget(self, session_id: str, closed_by: str) -> None:
        """It was closed. closed_by: by which request, "" where by none."""
        self._records.pop(session_id, None)
        self._cells.pop(session_id, None)
        if closed_by:
            self.closed[session_id] = closed_by
            while len(self.closed) > MOST_CLOSED:
                self.closed.popitem(last=False)

    def unbind(self, cell: str) -> None:
        """The cell is gone; the session's record stays."""
        for session_id in [session_id for session_id, its in self._cells.items() if its == cell]:
            del self._cells[session_id]

    def cells(self) -> set[str]:
        """Every cell that a session lives in."""
        return set(self._cells.values())
