"""Store HiCache's pages in files with a checksum and a description of their KV; a page that differs
counts as missing.

SGLang's own file backend writes bare bytes under a name of token hashes, model path and rank. A
page that was damaged there, or written by an engine with another dtype, layout or degree, would be
used as it is. Here every file begins with a header: what an engine must be to use the page, and a
checksum over the page and its name. The engine computes the tokens of a missing page itself, and
writes the page again.

The folder has a limit that its engines keep together (`PagesFolder`). Any of them may delete any
page at any time: a page that has gone is missing.

SGLang loads this module in its own venv (`--hicache-storage-backend dynamic`), so it imports only
SGLang and what that needs anyway. `engine/process.py` puts this folder on the engine's path.
"""

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

log = logging.getLogger(__name__)

FORMAT = 1  # a page of another format is missing to this one
CHECKSUM_BYTES = 8
GB = 10**9
# Each engine process looks at the folder when it has written LOOK_SHARE of the limit, and then
# deletes what is above KEPT_SHARE. So up to (1 - KEPT_SHARE) / LOOK_SHARE = 16 processes never
# exceed the limit, however they take turns; a look at 30,000 pages takes 0.1 s.
LOOK_SHARE = 1 / 64
KEPT_SHARE = 3 / 4
# A page's time of use is noted once in so long. Of prefixes that were used in one such period, the
# longest is shortened first, whichever was used last: it is short beside a turn of a trajectory.
USE_S = 1.0
# by which each page of a prefix counts as older than the one before it
DEPTH_NS = 100_000


class PagesFolder:
    """Folder of pages that engines share; it keeps below `limit_bytes` and chooses which pages go
    first.

    A file's time of modification is when its page was last used. The engines know nothing of each
    other: two that look at once see the same times and delete the same files. Pages of a prefix are
    used together, and a later one counts as older, so a prefix is deleted from its end: what is
    left of it is of use.
    """

    def __init__(
        self, path: Path, limit_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self._path = path
        self._limit_bytes = limit_bytes
        self._unseen_bytes = 0  # that may be written before the next look
        self._period = 0
        self._noted: set[str] = set()  # names of the files whose use was noted in this period

    def make_room(self, page_bytes: int) -> bool:
        """Delete other pages, if need be, for a page that is to be written; return False where the
        limit has no room."""
        if page_bytes > (1 - KEPT_SHARE) * self._limit_bytes:
            log.warning(
                "a page of %d bytes does not fit in a folder of %d bytes",
                page_bytes,
                self._limit_bytes,
            )
            return False
        self._unseen_bytes -= page_bytes
        if self._unseen_bytes < 0:
            self._delete_excess(self._limit_bytes * KEPT_SHARE)
            self._unseen_bytes = int(self._limit_bytes * LOOK_SHARE) - page_bytes
        return True

    def note_use(self, names: Sequence[str]) -> None:
        """Note that these pages of a prefix, in order from its first token on, are in use now."""
        period = int(self.clock() // USE_S)
        if period != self._period:
            self._period, self._noted = period, set()
        for depth, name in enumerate(names):
            if name not in self._noted:
                self._noted.add(name)
                time_ns = int(period * USE_S * 1e9) - depth * DEPTH_NS
                try:
                    os.utime(self._path / name, ns=(time_ns, time_ns))
                except OSError as error:
                    log.debug("cannot note the use of page %s: %s", name, error)

    def _delete_excess(self, kept_bytes: float) -> None:
        files = sorted(self._list_files())
        excess = sum(size for _, size, _ in files) - kept_bytes
        for _, size, path in files:
            if excess <= 0:
                return
            try:
                path.unlink()
            except FileNotFoundError:
                pass  # another engine has deleted it
            except OSError as error:
                log.warning("cannot delete page %s: %s", path, error)
                continue
            excess -= size

    def _list_files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield each file's time of use, bytes and path. The unfinished files of killed engines are
        among them."""
        try:
            with os.scandir(self._path) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield status.st_mtime_ns, status.st_size, Path(entry.path)
        except OSError as error:
            log.warning("cannot list the folder of pages: %s", error)


class CheckedPages(HiCacheFile):  # type: ignore[misc]
    """HiCache's storage in checked files: one line of JSON, the checksum (xxh3, 64 bits), and the
    page's bytes.

    The weight version is in the key already: it seeds the chain of token hashes (`storage_keys`).
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _options: object = None) -> None:
        super().__init__(storage_config)
        _try_to_write(Path(self.file_path))
        self._config = storage_config
        self.pages_folder = PagesFolder(
            Path(self.file_path), _limit_bytes(storage_config.extra_config or {})
        )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn what the engine's pages are; SGLang calls this before it reads or writes a page."""
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
        """Return whether there is a page that this engine can use, its checksum aside."""
        try:
            with self._path(key).open("rb", buffering=0) as file:
                return file.read(len(self._facts)) == self._facts
        except OSError:
            return False

    def get(
        self, key: str, target_location: torch.Tensor, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Copy the page to `target_location` and return it; None where it is missing or differs
        from what was written."""
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
        self,
        key: str,
        value: torch.Tensor,
        target_location: torch.Tensor | None = None,
        target_sizes: Any = None,
    ) -> bool:
        """Write a page unless it is there; return False where it cannot be written."""
        if not self.exists(key):
            page = value.contiguous().view(torch.uint8).flatten()
            value = torch.cat(
                (torch.frombuffer(bytearray(self._header(key, page)), dtype=torch.uint8), page)
            )
            if not self.pages_folder.make_room(value.numel()):
                return False
        return bool(super().set(key, value))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Write pages of the engine's memory up to the first failure; return each key's success.

        SGLang calls this and `batch_get_v1` with what the pages follow, so that a whole prefix
        counts as used.
        """
        pool = self.mem_pool_host
        slots = host_indices[:: pool.page_size]
        return self._until_first_failure(
            keys, extra_info, lambda at: self.set(keys[at], pool.get_data_page(slots[at]))
        )

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the engine's memory up to the first that is missing; return each key's
        success."""
        pool = self.mem_pool_host
        slots = host_indices[:: pool.page_size]

        def read(at: int) -> bool:
            page = self.get(keys[at], pool.get_dummy_flat_data_page())
            if page is not None:
                pool.set_from_flat_data_page(slots[at], page)
            return page is not None

        return self._until_first_failure(keys, extra_info, read)

    def _until_first_failure(
        self,
        keys: list[str],
        extra_info: HiCacheStorageExtraInfo | None,
        succeed: Callable[[int], bool],
    ) -> list[bool]:
        done = 0
        while done < len(keys) and succeed(done):
            done += 1
        prefix = (extra_info.prefix_keys if extra_info else None) or []
        self.pages_folder.note_use([self._path(key).name for key in (*prefix, *keys[:done])])
        return [at < done for at in range(len(keys))]

    def _header(self, key: str, page: torch.Tensor) -> bytes:
        checksum = xxhash.xxh3_64(self._get_suffixed_key(key).encode())
        checksum.update(page.numpy().data)
        return self._facts + bytes(checksum.digest())

    def _remove(self, key: str) -> None:
        """Delete a bad page, so that the engine can write it again."""
        try:
            self._path(key).unlink()
        except OSError as error:
            log.warning("cannot remove page %s: %s", key, error)

    def _path(self, key: str) -> Path:
        return Path(self.file_path, f"{self._get_suffixed_key(key)}.bin")


def _try_to_write(folder: Path) -> None:
    """Raise OSError where no page can be written there: an engine that starts all the same would
    promise moves of KV that always recompute."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"user {os.getuid()} cannot write pages of KV to {folder}: {error}"
        ) from error


def _limit_bytes(options: dict[str, Any]) -> int:
    """Return the folder's limit from the storage's options. Raises ValueError."""
    limit_gb = options.get("limit_gb")
    if not isinstance(limit_gb, int | float) or not 0 < limit_gb < math.inf:
        raise ValueError(
            "limit_gb of the storage's extra config must be a number of GB above 0, is "
            f"{limit_gb!r}"
        )
    return int(limit_gb * GB)
