"""Token ids and logprobs on the wire."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle.errors import StreamBroken
from treadle.types import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_come_back_as_they_went_and_are_little_endian_int32(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert pack_ids(ids) == struct.pack(f"<{len(ids)}i", *ids)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_come_back_as_they_went_and_are_little_endian_float32(
    logprobs: list[float],
) -> None:
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs
    assert pack_logprobs(logprobs) == struct.pack(f"<{len(logprobs)}f", *logprobs)


@pytest.mark.parametrize("unpack", [unpack_ids, unpack_logprobs])
def test_a_torn_array_is_an_error(unpack: object) -> None:
    assert callable(unpack)
    with pytest.raises(StreamBroken, match="7 packed bytes"):
        unpack(b"1234567")


def test_what_is_no_token_id_is_refused_before_it_is_sent() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(TypeError):
        pack_ids([1.5])  # type: ignore[list-item]
