"""Token ids and logprobs as they travel: packed little-endian int32 and float32 (see treadle/common/v1/tokens.proto).

Invariant: packing then unpacking gives the same ids, and the same logprobs rounded to float32.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from treadle.errors import StreamBroken

_BYTES_PER_ITEM = 4  # of int32 and float32
_SWAP = sys.byteorder == "big"


def pack_ids(ids: Sequence[int]) -> bytes:
    """4 bytes a token. OverflowError for an id outside int32, TypeError for what is not an integer."""
    return _packed(array("i", ids))


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """4 bytes a logprob (natural log)."""
    return _packed(array("f", logprobs))


def unpack_ids(packed: bytes) -> list[int]:
    """Token ids; StreamBroken when the length is not a multiple of 4."""
    return _unpacked(array("i"), packed)


def unpack_logprobs(packed: bytes) -> list[float]:
    """Logprobs (natural log); StreamBroken when the length is not a multiple of 4."""
    return _unpacked(array("f"), packed)


def _packed(items: array[int] | array[float]) -> bytes:
    if _SWAP:
        items.byteswap()
    return items.tobytes()


def _unpacked(items: array, packed: bytes) -> list:  # type: ignore[type-arg]
    if len(packed) % _BYTES_PER_ITEM:
        raise StreamBroken(f"{len(packed)} packed bytes are not a whole number of 4-byte items")
    items.frombytes(packed)
    if _SWAP:
        items.byteswap()
    return items.tolist()
