"""Seal tickets, which travel through their clients, and check that the scheduler has made a ticket
with these fields.

A seal is an HMAC-SHA256 of the ticket with a key of its engine. Scheduler and sidecar alone know
that key: it is made from the mesh's own key and the engine's name, and the sidecar receives it when
it registers the engine. So it stays the same when either of them starts again, and a ticket of one
engine is refused by every other.
"""

import hmac
from functools import cache

from treadle.common.v1.ticket_pb2 import Ticket

from treadle_runtime.errors import PermissionDenied, Unavailable

HASH = "sha256"
RETRY_NO_KEY_S = 0.5  # a sidecar registers within a second of its start


class Sealer:
    """Maker of seals on tickets. mesh_key: at least 32 bytes, secret."""

    def __init__(self, mesh_key: bytes) -> None:
        self._mesh_key = mesh_key
        self.key_of = cache(self._key_of)

    def seal(self, ticket: Ticket) -> None:
        """Seal all other fields of the ticket, for its engine."""
        ticket.seal = _seal_of(ticket, self.key_of(ticket.engine_id))

    def _key_of(self, engine_id: str) -> bytes:
        return hmac.digest(self._mesh_key, engine_id.encode(), HASH)


class SealCheck:
    """Verifier of tickets that were sealed for one engine. key: the engine's; None until it is
    registered."""

    def __init__(self) -> None:
        self.key: bytes | None = None

    def check(self, ticket: Ticket) -> None:
        """Raise PermissionDenied SEAL_REFUSED for a ticket that the scheduler has not made as it
        is, and Unavailable ENGINE_NOT_REGISTERED."""
        if self.key is None:
            said = "the scheduler does not know this engine yet; schedule the step again"
            raise Unavailable("ENGINE_NOT_REGISTERED", said, retry_after_s=RETRY_NO_KEY_S)
        if not hmac.compare_digest(_seal_of(ticket, self.key).encode(), ticket.seal.encode()):
            said = (
                "Ticket.seal: the scheduler of this mesh has not made this ticket, or not for "
                "this engine"
            )
            raise PermissionDenied("SEAL_REFUSED", said)


def _seal_of(ticket: Ticket, key: bytes) -> str:
    said = Ticket()
    said.CopyFrom(ticket)
    said.ClearField("seal")
    return hmac.digest(key, said.SerializeToString(deterministic=True), HASH).hex()
