"""HiCache's storage in files that carry a checksum and say what their KV is; a page that differs counts as missing.

SGLang's own file backend writes bare bytes under a name of token hashes, model path and rank. A page that was damaged
there, or written by an engine with another dtype, layout or degree, would be used as it is. Here every file begins with
a header: what an engine must be to use the page, and a checksum over the page and its name. The engine computes the
tokens of a missing page itself, and writes the page again.

SGLang loads this module in its own venv (`--hicache-storage-backend dynamic`), so it imports only SGLang and what that
needs anyway. `engine/process.py` puts this folder on the engine's path.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
import xxhash
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

log = logging.getLogger(__name__)

FORMAT = 1  # a page of another format is missing to this one
CHECKSUM_BYTES = 8


class CheckedPages(HiCacheFile):  # type: ignore[misc]
    """A file is one line of JSON, the checksum (xxh3, 64 bits), and the page's bytes.

    The weight version is in the key already: it seeds the chain of token hashes (`storage_keys`).
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _options: object = None) -> None:
        super().__init__(storage_config)
        self._config = storage_config

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn what the engine's pages are; SGLang calls this before it reads or writes one."""
        super().register_mem_pool_host(mem_pool_host)
        facts = {
            "format": FORMAT,
            "model": self._config.model_name,
            "dtype": str(mem_pool_host.dtype),
            "tensor_parallel": self._config.tp_size,
            "pipeline_parallel": self._config.pp_size,
            "page_tokens": mem_pool_host.page_size,
            "layout": mem_pool_host.layout,
        }
        self._facts = json.dumps(facts).encode() + b"\n"

    def exists(self, key: str) -> bool:
        """Whether there is a page that this engine can use, its checksum aside."""
        try:
            with self._path(key).open("rb", buffering=0) as file:
                return file.read(len(self._facts)) == self._facts
        except OSError:
            return False

    def get(self, key: str, target_location: torch.Tensor, target_sizes: Any = None) -> torch.Tensor | None:
        """The page, copied to `target_location`; None where it is missing or differs from what was written."""
        target = target_location.view(torch.uint8)
        header_bytes = len(self._facts) + CHECKSUM_BYTES
        sealed = torch.empty(header_bytes + target.numel(), dtype=torch.uint8)
        try:
            if super().get(key, sealed) is None:
                return None
            page = sealed[header_bytes:]
            if bytes(sealed[:header_bytes].numpy()) == self._header(key, page):
                target.copy_(page)
                return target_location
        except OSError as error:
            log.warning("cannot read page %s: %s", key, error)
        log.warning("page %s is damaged or of another engine, and is computed again", key)
        self._remove(key)
        return None

    def set(
        self, key: str, value: torch.Tensor, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> bool:
        """Write a page unless it is there; False where it cannot be written."""
        if not self.exists(key):
            page = value.contiguous().view(torch.uint8).flatten()
            value = torch.cat((torch.frombuffer(bytearray(self._header(key, page)), dtype=torch.uint8), page))
        return bool(super().set(key, value))

    def _header(self, key: str, page: torch.Tensor) -> bytes:
        checksum = xxhash.xxh3_64(self._get_suffixed_key(key).encode())
        checksum.update(page.numpy().data)
        return self._facts + bytes(checksum.digest())

    def _remove(self, key: str) -> None:
        """Make room for the page that the engine is about to write."""
        try:
            self._path(key).unlink()
        except OSError as error:
            log.warning("cannot remove page %s: %s", key, error)

    def _path(self, key: str) -> Path:
        return Path(self.file_path, f"{self._get_suffixed_key(key)}.bin")
