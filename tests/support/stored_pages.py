"""What becomes of a stored page, played with SGLang's own classes in the engine's venv: python stored_pages.py"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from treadle_sidecar.sglang_cpu.entry import define_vision_operators

define_vision_operators()  # SGLang needs them at import

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # noqa: E402
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


@dataclass
class FakeHostPool:
    """What the store asks of an engine's pool in host memory, which only a running engine has."""

    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    layout: str = "layer_first"


def backend(folder: Path, pool: FakeHostPool | None = None, **config: Any) -> CheckedPages:
    """The store of one engine."""
    pages = CheckedPages(replace(CONFIG, extra_config={"file_storage_path": str(folder)}, **config), {})
    pages.register_mem_pool_host(pool or FakeHostPool())
    return pages


def read(pages: CheckedPages, key: str = "k") -> torch.Tensor | None:
    return pages.get(key, torch.zeros_like(PAGE))


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def whole(folder: Path) -> None:
    """A page that nobody touched comes back as it was, also to another engine of the same kind, under SGLang's name."""
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
    """Pages of another dtype, layout or degree, and SGLang's own without a header, all under the same name."""
    pages = backend(folder, is_mla_model=True)  # whose file names do not carry the degree
    others = (
        backend(folder, FakeHostPool(dtype=torch.float16), is_mla_model=True),
        backend(folder, FakeHostPool(layout="page_first"), is_mla_model=True),
        backend(folder, is_mla_model=True, tp_size=2),
        HiCacheFile(replace(CONFIG, is_mla_model=True, extra_config={"file_storage_path": str(folder)})),
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


if __name__ == "__main__":
    for scenario in (whole, flipped, cut, swapped, other_kind, no_folder):
        with tempfile.TemporaryDirectory() as made:
            scenario(Path(made) / "pages")
