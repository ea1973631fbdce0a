"""HiCache on a CPU: host pools that do not pin memory, and torch copies in place of the three `direct` transfer
kernels.

Layouts are SGLang's own (mem_cache/pool_host/mha.py): layer-first pools are [token, ...] a layer, the page-first-
direct pool is [page, layer, token in page, ...]. Index tensors name tokens; whole pages travel together, so every
page_size-th index names a page.
"""

from collections.abc import Sequence

import torch


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


def install() -> None:
    """Puts both changes into SGLang's host pools. Called once in each worker, before a pool is built."""
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    # There is no device to pin host memory for; the flag is set in a constructor from a default of True, hence the
    # property.
    HostKVCache.pin_memory = property(lambda _self: False, lambda _self, _value: None)
    mha.transfer_kv_direct = transfer_kv_direct
    mha.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    mha.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf
