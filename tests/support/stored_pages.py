"""What becomes of a stored page, played with SGLang's own classes in the engine's venv.

python stored_pages.py SCENARIO...
"""

import multiprocessing
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from treadle_sidecar.sglang_cpu.entry import define_vision_operators

define_vision_operators()  # SGLang needs them at import

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from treadle_sidecar.hicache.checked_pages import CheckedPages  # noqa: E402

PAGE = torch.arange(4096, dtype=torch.float32).to(torch.bfloat16)
CONFIG = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=False,
    is_page_first_layout=False,
    model_name="/models/small",
)
LIMIT_BYTES = 100 * PAGE.nbytes


@dataclass
class FakeHostPool:
    """What the store asks of an engine's pool in host memory, which only a running engine has."""

    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    layout: str = "layer_first"
    pages: dict[int, torch.Tensor] = field(default_factory=dict)

    def get_data_page(self, index: torch.Tensor) -> torch.Tensor:
        return self.pages.get(int(index), PAGE)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(PAGE)

    def set_from_flat_data_page(self, index: torch.Tensor, page: torch.Tensor) -> None:
        self.pages[int(index)] = page


@dataclass
class FakeClock:
    """Unix time that a scenario moves."""

    now_s: float = 1e9

    def __call__(self) -> float:
        return self.now_s


def backend(
    folder: Path, pool: FakeHostPool | None = None, limit_gb: float = 1.0, **config: Any
) -> CheckedPages:
    """The store of one engine."""
    options = {"file_storage_path": str(folder), "limit_gb": limit_gb}
    pages = CheckedPages(replace(CONFIG, extra_config=options, **config), {})
    pages.register_mem_pool_host(pool or FakeHostPool())
    return pages


def write_chain(pages: CheckedPages, name: str, begin: int, end: int) -> None:
    """Write pages of a prefix after those before `begin`, as an engine does after a turn."""
    keys = [f"{name}{at}" for at in range(end)]
    slots = torch.arange((end - begin) * 16)
    assert all(
        pages.batch_set_v1(keys[begin:], slots, HiCacheStorageExtraInfo(prefix_keys=keys[:begin]))
    )


def count_stored(pages: CheckedPages, name: str) -> int:
    """Leading pages of a prefix, whose later ones are of no use without them."""
    return int(pages.batch_exists([f"{name}{at}" for at in range(1000)]))


def count_bytes(folder: Path) -> int:
    """Of the folder's files; one that goes away meanwhile counts as gone."""
    count = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            count += file.stat().st_size
    return count


def read(pages: CheckedPages, key: str = "k") -> torch.Tensor | None:
    return pages.get(key, torch.zeros_like(PAGE))


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def whole(folder: Path) -> None:
    """A page that nobody touched comes back as it was, also to another engine of the same kind,
    under SGLang's name."""
    assert backend(folder).set("k", PAGE)
    assert only_file(folder).name == "k_-models-small_0_1.bin"
    other = backend(folder)
    assert other.exists("k") and not other.exists("l")
    found = read(other)
    assert found is not None and torch.equal(found, PAGE)
    assert read(other, "l") is None


def flipped(folder: Path) -> None:
    """One bit of a page, of its checksum or of its facts is another: missing, and written again."""
    pages = backend(folder)
    for at in (0, 40, -PAGE.nbytes - 1, -1):
        assert pages.set("k", PAGE)
        content = bytearray(only_file(folder).read_bytes())
        content[at] ^= 1
        only_file(folder).write_bytes(content)
        assert read(pages) is None
        assert not pages.exists("k")
    assert pages.set("k", PAGE)
    assert read(pages) is not None


def cut(folder: Path) -> None:
    """A file that ends early, or has no byte at all."""
    pages = backend(folder)
    for length in (100_000, 1000, 0):
        assert pages.set("k", PAGE)
        only_file(folder).write_bytes(only_file(folder).read_bytes()[:length])
        assert (read(pages) is None) == (length < 100_000)
    assert read(pages) is None


def swapped(folder: Path) -> None:
    """A whole page under the name of another one."""
    pages = backend(folder)
    assert pages.set("k", PAGE)
    only_file(folder).rename(folder / "l_-models-small_0_1.bin")
    assert read(pages, "l") is None


def other_kind(folder: Path) -> None:
    """Pages of another dtype, layout or degree, and SGLang's own without a header, all under the
    same name."""
    pages = backend(folder, is_mla_model=True)  # whose file names do not carry the degree
    others = (
        backend(folder, FakeHostPool(dtype=torch.float16), is_mla_model=True),
        backend(folder, FakeHostPool(layout="page_first"), is_mla_model=True),
        backend(folder, is_mla_model=True, tp_size=2),
        HiCacheFile(
            replace(CONFIG, is_mla_model=True, extra_config={"file_storage_path": str(folder)})
        ),
    )
    for other in others:
        assert other.set("k", PAGE)
        assert not pages.exists("k")
        assert pages.batch_exists(["k"]) == 0
        assert read(pages) is None
        assert pages.set("k", PAGE)
        found = read(pages)
        assert found is not None and torch.equal(found, PAGE)
        only_file(folder).unlink()


def no_folder(folder: Path) -> None:
    """The folder is gone: nothing is found, nothing is written, nothing raises."""
    pages = backend(folder)
    assert pages.set("k", PAGE)
    only_file(folder).unlink()
    folder.rmdir()
    assert not pages.exists("k")
    assert read(pages) is None
    assert not pages.set("k", PAGE)
    folder.mkdir()
    assert pages.set("k", PAGE)


def several_engines(folder: Path) -> None:
    """Three processes write to the folder and read what the others wrote, ten times its limit in
    all: it never holds more than the limit, and a page that another process deletes is missing or
    whole, and no error."""
    backend(folder)
    engines = [
        multiprocessing.Process(target=write_and_read, args=(folder, name)) for name in "abc"
    ]
    for engine in engines:
        engine.start()
    most = 0
    while any(engine.is_alive() for engine in engines):
        most = max(most, count_bytes(folder))
    assert [engine.exitcode for engine in engines] == [0, 0, 0]
    assert LIMIT_BYTES // 2 < most <= LIMIT_BYTES, most / LIMIT_BYTES
    assert LIMIT_BYTES // 2 < count_bytes(folder) <= LIMIT_BYTES


def write_and_read(folder: Path, name: str) -> None:
    """One of the three engines."""
    pages = backend(folder, limit_gb=LIMIT_BYTES / 1e9)
    for at in range(LIMIT_BYTES * 10 // 3 // PAGE.nbytes):
        assert pages.set(f"{name}{at}", PAGE)
        for other in "abc":
            found = read(pages, f"{other}{at}")
            assert found is None or torch.equal(found, PAGE)


def last_used_last(folder: Path) -> None:
    """Of three prefixes, one goes on with a turn, and one is read by another engine, before more is
    written than fits: both stay whole, and the third loses its end first."""
    engine, other = (backend(folder, limit_gb=LIMIT_BYTES / 1e9) for _ in range(2))
    engine.pages_folder.clock = other.pages_folder.clock = clock = FakeClock()
    for name in "abc":
        write_chain(engine, name, 0, 20)
        clock.now_s += 60
    write_chain(engine, "a", 20, 21)
    keys = [f"b{at}" for at in range(20)]
    assert all(other.batch_get_v1(keys, torch.arange(20 * 16), HiCacheStorageExtraInfo()))
    for turn in range(4):
        clock.now_s += 60
        write_chain(engine, "d", 8 * turn, 8 * (turn + 1))
    stored = {name: count_stored(engine, name) for name in "abcd"}
    assert (stored["a"], stored["b"], stored["d"]) == (21, 20, 32)
    assert 0 < stored["c"] < 20
    assert not any(engine.exists(f"c{at}") for at in range(stored["c"], 20))


def leftovers(folder: Path) -> None:
    """What an engine that was killed in the middle of a write has left counts, and goes in its
    turn."""
    pages = backend(folder, limit_gb=LIMIT_BYTES / 1e9)
    (folder / ".killed.tmp").write_bytes(bytes(LIMIT_BYTES))
    write_chain(pages, "a", 0, 2)
    assert not (folder / ".killed.tmp").exists()
    assert count_stored(pages, "a") == 2


def too_large(folder: Path) -> None:
    """A page that the limit has no room for is not written, and a limit is required."""
    pages = backend(folder, limit_gb=PAGE.nbytes / 1e9)
    assert not pages.set("k", PAGE)
    assert not list(folder.iterdir())
    for config in ({}, {"limit_gb": 0}, {"limit_gb": "much"}):
        try:
            CheckedPages(
                replace(CONFIG, extra_config={"file_storage_path": str(folder), **config}), {}
            )
        except ValueError as error:
            assert "limit_gb" in str(error)
        else:
            raise AssertionError(config)


if __name__ == "__main__":
    for scenario in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as made:
            globals()[scenario](Path(made) / "pages")
