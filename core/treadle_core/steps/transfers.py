"""Which waiting moves start now: Heddle's trajectory-aware transmission scheduler (§5.3).

Longest trajectory first; an engine takes part in one move at a time, as source or as target; what one call returns
can run strictly in parallel. A long move that has to wait for an engine does not hold back a shorter one between two
free engines. Pure: the caller owns the waiting list and knows which engines are busy.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """A move that waits. Equal lengths go in the order in which they were asked for."""

    transfer_id: str
    source: str
    target: str
    remaining_tokens: float  # predicted length still to come of the trajectory
    asked_at_s: float


def next_transfers(waiting: Iterable[Transfer], busy_engines: Collection[str]) -> list[Transfer]:
    """Return the moves to start in this scheduling epoch, longest first, no two of them (nor a busy one) sharing an
    engine.
    """
    taken = set(busy_engines)
    chosen: list[Transfer] = []
    for transfer in sorted(waiting, key=lambda t: (-t.remaining_tokens, t.asked_at_s, t.transfer_id)):
        if transfer.source in taken or transfer.target in taken:
            continue
        taken.update((transfer.source, transfer.target))
        chosen.append(transfer)
    return chosen
