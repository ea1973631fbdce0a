"""Storage keys without a compiler: SGLang builds its page hash from C++ at the first use (17 s, needs g++, ninja and
OpenSSL headers).

The same digests come from hashlib at about 1 us a page, so a CPU engine takes them from
`treadle_sidecar.storage_keys`.
"""

from typing import Any

from treadle_sidecar.storage_keys import chained_digest


def page_hash(token_ids: Any, prior_digest: bytes | None, page_size: int | None = None) -> str | list[str]:
    """Hex digests of all pages (the last may be short), or one digest of everything where no page size is given.

    Same signature and result as sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash for plain token ids.
    """
    from sglang.srt.mem_cache.cpp_utils.native_hash import _native_hash_input, get_native_hash

    raw, length, unit_width, is_bigram = _native_hash_input(token_ids)
    if is_bigram or unit_width != 1:  # speculative decoding's pairs: not on a CPU
        compiled: str | list[str] = get_native_hash(token_ids, prior_digest, page_size)
        return compiled
    digest = prior_digest or b""
    if page_size is None:
        return chained_digest(digest, raw[:length]).hex()
    keys = []
    for start in range(0, length, page_size):
        digest = chained_digest(digest, raw[start : min(start + page_size, length)])
        keys.append(digest.hex())
    return keys


def install() -> None:
    """Replaces the compiled hash in SGLang's radix tree and storage."""
    from sglang.srt.mem_cache import utils

    utils.get_native_hash = page_hash
