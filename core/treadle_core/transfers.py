"""Moves of KV between engines: the cost of one, whether it is worth that, and which of several
start now (Heddle 5.3).

A prefix moves while the trajectory's tool runs; the part of the move that the tool does not hide
delays the next step. Without shared storage the target computes the prefix again, which takes its
time from others even when it is hidden.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from treadle_core.model import DEFAULT_PREFILL_TOKENS_PER_S, EngineSpec, KvTransfer
from treadle_core.tuning import Tuning


def move_cost_s(
    context_tokens: int, source: EngineSpec, target: EngineSpec, tuning: Tuning
) -> float:
    """Return the seconds from the start of a move to its switch, by the declared speeds;
    `MeasuredMoves` corrects it."""
    if moves_by_storage(source, target):
        return (
            tuning.move_fixed_s
            + context_tokens * source.kv_bytes_per_token / tuning.storage_bytes_per_s
        )
    rate = target.decode_curve.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
    return tuning.move_fixed_s + context_tokens / rate


def moves_by_storage(source: EngineSpec, target: EngineSpec) -> bool:
    """Return whether both engines read the same store of KV."""
    return source.kv_transfer is KvTransfer.STORAGE and target.kv_transfer is KvTransfer.STORAGE


class MeasuredMoves:
    """Slowness of moves, as a multiple of `move_cost_s`, from those that have ended: a running mean
    for each source and target, and one over all of them for those that have not moved anything yet.
    Nothing of it is stored."""

    def __init__(self, newest_weight: float) -> None:
        self._newest_weight = newest_weight
        self._slowness: dict[tuple[str, str], float] = {}

    def slowness(self, source_id: str, target_id: str) -> float:
        """Return how many times as long as `move_cost_s` a move takes; 1 before any move has
        ended."""
        found = self._slowness.get((source_id, target_id))
        return found if found is not None else self._slowness.get(("", ""), 1.0)

    def note_end(
        self, source_id: str, target_id: str, expected_s: float, took_s: float, *, moved: bool
    ) -> None:
        """Count a move that took `took_s` where `move_cost_s` expected `expected_s`. A move that
        was given up would have taken longer, so it counts only where it was slower than expected
        already."""
        for pair in ((source_id, target_id), ("", "")):
            known = self._slowness.get(pair)
            newest = took_s / expected_s if moved else max(took_s / expected_s, known or 0.0)
            self._slowness[pair] = (
                newest if known is None else known + self._newest_weight * (newest - known)
            )


def longest_useful_move_s(
    *,
    cost_s: float,
    tool_left_s: float,
    saving_s: float,
    source: EngineSpec,
    target: EngineSpec,
    tuning: Tuning,
) -> float | None:
    """Return the seconds that a move may take before it costs more than its `saving_s`; None where
    it is not worth its cost at all. `cost_s`: what it is expected to take. `tool_left_s`: seconds
    that the tool call is expected to last."""
    # A hidden read from storage costs no other trajectory; a hidden prefill takes time from those
    # of the target.
    price_s = max(0.0, cost_s - tool_left_s) if moves_by_storage(source, target) else cost_s
    worth = saving_s >= tuning.move_gain_factor * max(price_s, tuning.move_fixed_s)
    return tool_left_s + saving_s if worth else None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move that waits to start."""

    transfer_id: str
    source: str
    target: str
    remaining_tokens: float  # predicted length still to come of the trajectory
    asked_at_s: float


def next_transfers(waiting: Iterable[Transfer], busy_engines: Collection[str]) -> list[Transfer]:
    """Return the moves to start now: longest trajectory first, of equal ones the one requested
    first.

    An engine takes part in one move at a time, as source or target, so what one call returns runs
    in parallel. A long move that waits for an engine does not hold back a shorter one between two
    free engines.
    """
    taken = set(busy_engines)
    chosen: list[Transfer] = []
    for transfer in sorted(
        waiting, key=lambda t: (-t.remaining_tokens, t.asked_at_s, t.transfer_id)
    ):
        if transfer.source in taken or transfer.target in taken:
            continue
        taken.update((transfer.source, transfer.target))
        chosen.append(transfer)
    return chosen
