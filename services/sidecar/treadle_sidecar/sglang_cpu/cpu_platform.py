"""Run the stock SGLang 0.5.23 engine on a CPU, without the sgl_kernel build.

SGLang's own CPU platform needs compiled kernels. This one declares no capabilities, so that the engine picks its
torch-native paths: attention by torch's scaled dot product, eager compilation, native layers. HiCache and seeds work,
and a cached prefix saves time, after four replacements, made in `init_backend`, which every worker calls once:

- `install_transfers`: host pools that do not pin memory, and torch copies in place of the three `direct` transfer
  kernels. Layouts are SGLang's own (mem_cache/pool_host/mha.py): layer-first pools are [token, ...] a layer, the
  page-first-direct pool is [page, layer, token in page, ...]. Index tensors name tokens; whole pages travel together,
  so every page_size-th index names a page.
- `page_hash`: SGLang compiles its page hash from C++ at the first use (17 s; needs g++, ninja and OpenSSL
  headers). The same digests come from hashlib at about 1 us a page (`treadle_sidecar.storage_keys`).
- `murmur_hash32`: the hash behind seeded sampling, in torch; SGLang's CPU version lives in sgl_kernel.
- `CpuAttention` (`attention.py`), under the name torch_native.

SGLang honours `sampling_seed` only with --enable-deterministic-inference, which requires a batch-invariant attention
backend and Triton kernels. torch-native attention works sequence by sequence, so it is registered as one; the kernels
are left out, so logits may still differ in the last bit between batch sizes. The seed's noise depends on the seed and
the position alone: a step that is preempted and resumed draws what it would have drawn.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from treadle_sidecar.sglang_cpu.attention import install_extend
from treadle_sidecar.storage_keys import chained_digest


class TreadleCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """CpuDeviceMixin describes the device; this class makes the engine's choices."""

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

    def init_backend(self) -> None:
        from sglang.srt import batch_invariant_ops
        from sglang.srt.layers import sampler
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.mem_cache import utils

        from treadle_sidecar.sglang_cpu.attention import CpuAttention

        install_transfers()
        register_attention_backend("torch_native")(CpuAttention)
        utils.get_native_hash = page_hash  # of the radix tree and the storage
        sampler.murmur_hash32 = murmur_hash32
        batch_invariant_ops.enable_batch_invariant_mode = lambda *_args, **_kwargs: None


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Layer-first to layer-first, layer by layer. `page_size` is the kernel's unit of copying; a gather needs none."""
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
    """One layer from page-first host pools ([K, V]) to layer-first device pools ([K, V] of that layer)."""
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
    """All layers from layer-first device pools (K layers, then V layers) to page-first host pools ([K, V])."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for pool, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            dst[pages, layer] = src_ptrs[pool * layers + layer][src_indices].reshape(-1, *dst.shape[2:])


def install_transfers() -> None:
    """Make SGLang's host pools unpinned and copied by torch. Call it in each worker before a pool is built."""
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    # There is no device to pin host memory for; the flag is set in a constructor from a default of True, hence the
    # property.
    HostKVCache.pin_memory = property(lambda _self: False, lambda _self, _value: None)
    mha.transfer_kv_direct = transfer_kv_direct
    mha.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    mha.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf


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


_MASK = 0xFFFFFFFF
_HASHED_BYTES = 16  # four blocks: low and high half of the seed, the position, the column


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _scramble(k: torch.Tensor) -> torch.Tensor:
    return (_rotate((k * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK


def _mix(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (_rotate(h ^ key, 13) * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """(n,) seeds and positions, (m,) columns -> (n, m) hashes in [0, 2**32), as int64.

    MurmurHash3 (32 bits), equal to murmur_hash32 in sglang/kernels/ops/sampling/murmur_hash.py. All arithmetic is in
    int64, masked to 32 bits after each product.
    """
    seed = seed.to(torch.int64)
    h = _mix(torch.zeros_like(seed), _scramble(seed & _MASK))
    h = _mix(h, _scramble((seed >> 32) & _MASK))
    h = _mix(h, _scramble(positions.to(torch.int64) & _MASK))
    h = _mix(h[:, None], _scramble(col_indices.to(torch.int64) & _MASK)[None, :])
    h ^= _HASHED_BYTES
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _MASK
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & _MASK
    h ^= h >> 16
    return h
