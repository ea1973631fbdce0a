"""Name the KV pages in HiCache storage as SGLang 0.5.23 does: by a chain of SHA-256 over pages of
token ids.

The chain starts with the cache salt. The sidecar looks up which part of a prefix is in a shared
folder; the CPU plugin gives these digests to SGLang in place of its compiled ones, so that no C++
compiler is needed. Standard library only, because the engine's venv imports it too. A test with a
real engine compares the names.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

_NAMESPACE = b"sglang-cache-namespace-v1"
_WIDE_TAG = (
    b"\xff"  # marks a page with ids above 32 bits, so that no narrow page has the same bytes
)
_LARGEST_NARROW = 0xFFFFFFFF


def namespace_seed(cache_salt: str | None) -> str | None:
    """Return the hex digest that starts a chain; None where there is no salt."""
    if cache_salt is None:
        return None
    encoded = cache_salt.encode()
    # The first part is SGLang's extra_key, absent here.
    return hashlib.sha256(
        _NAMESPACE + b"\x00\x01" + len(encoded).to_bytes(8, "little") + encoded
    ).hexdigest()


def page_keys(token_ids: Sequence[int], page_tokens: int, cache_salt: str | None) -> Iterator[str]:
    """Yield the key of each whole page of the prefix, in order."""
    seed = namespace_seed(cache_salt)
    digest = bytes.fromhex(seed) if seed else b""
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        digest = chained_digest(digest, token_ids[start : start + page_tokens])
        yield digest.hex()


def chained_digest(prior: bytes, words: Sequence[int]) -> bytes:
    """Return the digest of one page after `prior` (empty for none)."""
    if max(words, default=0) <= _LARGEST_NARROW:
        return hashlib.sha256(prior + array("I", words).tobytes()).digest()
    return hashlib.sha256(prior + _WIDE_TAG + array("Q", words).tobytes()).digest()


class StoredPages:
    """Counts the leading tokens of a prefix whose pages are in `folder` (None: not known, so none).
    `look` updates the count.

    A file's name is the page's key and one of `suffixes`.
    """

    def __init__(
        self,
        folder: Path | None,
        suffixes: Sequence[str],
        token_ids: Sequence[int],
        page_tokens: int,
        cache_salt: str | None,
    ) -> None:
        self._folder = folder
        self._suffixes = suffixes
        self._page_tokens = page_tokens
        self._missing = page_keys(token_ids, page_tokens, cache_salt)
        self._next = next(self._missing, None)
        self.tokens = 0

    def look(self) -> None:
        """Look for further pages from the first missing one on. Blocks: for 0.1 s where 128k tokens
        are stored.

        A page that was there and has been deleted since still counts: the engine computes what it
        does not find.
        """
        while self._folder is not None and self._next is not None:
            if not any(
                (self._folder / f"{self._next}{suffix}").exists() for suffix in self._suffixes
            ):
                return
            self.tokens += self._page_tokens
            self._next = next(self._missing, None)
