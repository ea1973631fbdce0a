"""Run the stock SGLang 0.5.23 engine on a CPU, without the sgl_kernel build.

SGLang's own CPU platform needs compiled kernels. This one declares no capabilities, so that the
engine picks its torch-native paths: attention by torch's scaled dot product, eager compilation,
native layers. 8-bit weights (`int8.py`) are offered as a quantization. HiCache and seeds work, and
a cached prefix saves time, after four replacements, made in `init_backend`, which every worker
calls once:

- `install_transfers`: host pools that do not pin memory, and torch copies in place of the three
  `direct` transfer kernels. Layouts are SGLang's own (mem_cache/pool_host/mha.py): layer-first
  pools are [token, ...] a layer, the page-first-direct pool is [page, layer, token in page, ...].
  Index tensors name tokens; whole pages travel together, so every page_size-th index names a page.
- `page_hash`: SGLang compiles its page hash from C++ at the first use (17 s; needs g++, ninja and
  OpenSSL headers). The same digests come from hashlib at about 1 us a page
  (`treadle_sidecar.storage_keys`).
- `murmur_hash32`: the hash behind seeded sampling; SGLang's CPU version lives in sgl_kernel.
- `CpuAttention` (`attention.py`), under the name torch_native.

Its scheduler and detokenizer are forks of its server (`fork_workers`). And one figure: beside host
pools SGLang keeps 10 GiB of memory free, more than a laptop has (`HOST_RESERVE_BYTES`).

SGLang honours `sampling_seed` only with --enable-deterministic-inference, which requires a
batch-invariant attention backend and Triton kernels. torch-native attention works sequence by
sequence, so it is registered as one; the kernels are left out, so logits may still differ in the
last bit between batch sizes. The seed's noise depends on the seed and the position alone: a step
that is preempted and resumed draws what it would have drawn.
"""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from treadle_sidecar.storage_keys import chained_digest

Words = npt.NDArray[np.uint32]

# stays free beside the host pools: one gigabyte, as the engine itself is this small
HOST_RESERVE_BYTES = 2**30


class TreadleCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Platform that makes the engine's choices on a CPU; CpuDeviceMixin describes the device."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.arg_groups import choices

        choices.add_deterministic_attention_backend_choices(["torch_native"])
        choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
        fork_workers()  # they start later
        load_tokenizer_once(server_args)

    def get_quantization_config(self, quantization: str) -> Any:
        from treadle_sidecar.sglang_cpu.int8 import Int8Config

        return Int8Config if quantization == "w8a8_int8" else None

    def init_backend(self) -> None:
        from sglang.srt import batch_invariant_ops
        from sglang.srt.layers import sampler
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.mem_cache import utils
        from sglang.srt.mem_cache.pool_host import base

        from treadle_sidecar.sglang_cpu.attention import CpuAttention

        # A fork of a process that imported torch with another number of threads has that number.
        if threads := os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(int(threads))
        install_transfers()
        register_attention_backend("torch_native")(CpuAttention)
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_RESERVE_BYTES
        utils.get_native_hash = page_hash  # of the radix tree and the storage
        sampler.murmur_hash32 = murmur_hash32
        batch_invariant_ops.enable_batch_invariant_mode = lambda *_args, **_kwargs: None


def fork_workers() -> None:
    """Make SGLang start its scheduler and its detokenizer as forks of the server, where it chooses
    new interpreters ("spawn").

    The server has imported all that they need: ten processor seconds each. SGLang starts them
    before it opens a socket or starts a thread. A fork is safe only from a process with one thread,
    so a server that has more keeps SGLang's way: where it computes on several cores, numpy's
    OpenBLAS has started threads.
    """
    set_start_method = multiprocessing.set_start_method

    def set_fork(method: str | None, force: bool = False) -> None:
        has_one_thread = len(list(Path("/proc/self/task").iterdir())) == 1
        set_start_method("fork" if has_one_thread else method, force)

    multiprocessing.set_start_method = set_fork


def load_tokenizer_once(server_args: Any) -> None:
    """Load the model's tokenizer in the server, and make SGLang use that one wherever it loads the
    same, also in forks of the server.

    The server, the detokenizer and the scheduler load it, the last one twice: half of the processor
    time of a start.
    """
    from sglang.srt.utils.hf_transformers import get_tokenizer as load

    loaded: dict[str, Any] = {}

    def get_tokenizer(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, sorted(kwargs.items())))
        if key not in loaded:
            loaded[key] = load(*args, **kwargs)
        return loaded[key]

    for module in list(sys.modules.values()):
        if vars(module).get("get_tokenizer") is load:
            module.get_tokenizer = get_tokenizer  # type: ignore[attr-defined]
    # Where it cannot be loaded, SGLang tries again and says why.
    with contextlib.suppress(Exception):
        get_tokenizer(
            server_args.tokenizer_path or server_args.model_path,
            tokenizer_mode=server_args.tokenizer_mode,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
            tokenizer_backend=server_args.tokenizer_backend,
        )


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy layer-first pools to layer-first pools, layer by layer. `page_size` is the kernel's unit
    of copying; a gather needs none."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices].reshape(-1, *dst.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer from page-first host pools ([K, V]) to layer-first device pools ([K, V] of
    that layer)."""
    pages = src_indices[::page_size] // page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[pages, layer_id].reshape(-1, *dst.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy all layers from layer-first device pools (K layers, then V layers) to page-first host
    pools ([K, V])."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for pool, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            dst[pages, layer] = src_ptrs[pool * layers + layer][src_indices].reshape(
                -1, *dst.shape[2:]
            )


def install_transfers() -> None:
    """Make SGLang's host pools unpinned and copied by torch. Call it in each worker before a pool
    is built."""
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    # There is no device to pin host memory for; the flag is set in a constructor from a default of
    # True, hence the property.
    HostKVCache.pin_memory = property(lambda _self: False, lambda _self, _value: None)
    mha.transfer_kv_direct = transfer_kv_direct
    mha.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    mha.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf


def page_hash(
    token_ids: Any, prior_digest: bytes | None, page_size: int | None = None
) -> str | list[str]:
    """Return hex digests of all pages (the last may be short), or one digest of everything where no
    page size is given.

    Signature and result are those of sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash for
    plain token ids.
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


# four blocks: low and high half of the seed, the position, the column
_HASHED_BYTES = np.uint32(16)


def _rotate(x: Words, bits: int) -> Words:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _mix(h: Words, block: Words) -> Words:
    key = _rotate(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate(h ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """Hash (n,) seeds and positions with (m,) columns to (n, m) uint32.

    This is MurmurHash3 (32 bits), equal to murmur_hash32 in
    sglang/kernels/ops/sampling/murmur_hash.py. It uses numpy, whose unsigned words wrap; torch
    would need 64 bits, and takes five times as long.
    """
    seeds = seed.to(torch.int64).numpy()
    h = np.zeros((len(seeds), 1), np.uint32)
    for block in (seeds, seeds >> 32, positions.numpy()):
        h = _mix(h, block.astype(np.uint32)[:, None])
    h = _mix(h, col_indices.numpy().astype(np.uint32))
    h ^= _HASHED_BYTES
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return torch.from_numpy(h)
