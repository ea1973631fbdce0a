"""Tickets: for this engine, in time, once. Times are Unix seconds and passed in."""

import heapq

from treadle_runtime.errors import FailedPrecondition


class TicketBook:
    """Remembers used tickets until they have expired; after that their date refuses them."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._used: set[str] = set()
        self._expiries: list[tuple[float, str]] = []

    def check(self, ticket_id: str, engine_id: str, expires_at: float, now: float) -> None:
        """Raises FailedPrecondition TICKET_WRONG_ENGINE, TICKET_EXPIRED, TICKET_USED."""
        if engine_id != self._engine_id:
            raise FailedPrecondition(
                "TICKET_WRONG_ENGINE",
                f"the ticket is for engine {engine_id!r}, this is {self._engine_id!r}",
                ticket_id=ticket_id,
            )
        if expires_at <= now:
            raise FailedPrecondition(
                "TICKET_EXPIRED",
                f"the ticket expired {now - expires_at:.1f} s ago; schedule the step again",
                ticket_id=ticket_id,
            )
        if ticket_id in self._used:
            raise FailedPrecondition(
                "TICKET_USED", "the ticket was presented before; schedule the step again", ticket_id=ticket_id
            )

    def use(self, ticket_id: str, expires_at: float, now: float) -> None:
        """The ticket's one use. Forgets those that have expired."""
        self._used.add(ticket_id)
        heapq.heappush(self._expiries, (expires_at, ticket_id))
        while self._expiries[0][0] <= now:
            self._used.discard(heapq.heappop(self._expiries)[1])
