"""The hash behind seeded sampling, in torch: SGLang's own CPU version lives in sgl_kernel, which this platform does
without.

MurmurHash3 (32 bits) over four blocks: low and high half of the seed, the position, the column. Equal to
murmur_hash32 in sglang/kernels/ops/sampling/murmur_hash.py. All arithmetic is in int64, masked to 32 bits after each
product.
"""

import torch

_MASK = 0xFFFFFFFF
_HASHED_BYTES = 16


def _rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _key(k: torch.Tensor) -> torch.Tensor:
    return (_rotated((k * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK


def _mixed(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (_rotated(h ^ key, 13) * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """(n,) seeds and positions, (m,) columns -> (n, m) hashes in [0, 2**32), as int64."""
    seed = seed.to(torch.int64)
    h = _mixed(torch.zeros_like(seed), _key(seed & _MASK))
    h = _mixed(h, _key((seed >> 32) & _MASK))
    h = _mixed(h, _key(positions.to(torch.int64) & _MASK))
    h = _mixed(h[:, None], _key(col_indices.to(torch.int64) & _MASK)[None, :])
    h ^= _HASHED_BYTES
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _MASK
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & _MASK
    h ^= h >> 16
    return h


def install() -> None:
    """Puts the hash under SGLang's sampler."""
    from sglang.srt.layers import sampler

    sampler.murmur_hash32 = murmur_hash32
