"""Run a model with 8-bit weights on a CPU, `--quantization w8a8_int8`: a decode step of a small
model is bound by reading its weights.

A linear layer multiplies bytes. Each row of a weight is scaled to [-127, 127] when it is loaded,
and each token's activations at each call, so that a token's result does not depend on its batch. A
few activations are much larger than the others, which would be rounded to few values. So
activations and weights are first multiplied by the same orthonormal matrix: it spreads each
activation over a block, and does not change the product.

The loaded weights stay beside the packed ones, for embeddings and for updates: SGLang calls
`process_weights_after_loading` after each update as after the start.
"""

from functools import cache
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

LARGEST = 127.0  # of 8 bits with a sign
MIDDLE = 128  # of 8 bits without one, which activations have
TINY = torch.finfo(torch.float32).tiny  # the scale of zeros
MOST_ROTATED = 64  # larger blocks cost more time than they save error


class Int8Config(QuantizationConfig):  # type: ignore[misc]
    """Choice of the layers that multiply by 8-bit weights: the linear layers and the logits."""

    def get_name(self) -> str:
        return "w8a8_int8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Int8Config":
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return Int8LinearMethod()
        return Int8EmbeddingMethod() if isinstance(layer, VocabParallelEmbedding) else None

    def get_scaled_act_names(self) -> list[str]:
        return []


class Int8LinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """Method of a linear layer that multiplies by the packed 8-bit weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed_weight = pack(layer.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = multiply(x, layer.packed_weight).to(x.dtype)
        return out if bias is None else out + bias


class Int8EmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Method that takes embeddings from the loaded weights and computes logits with the packed
    ones, in float32."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed_weight = pack(layer.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = multiply(x, layer.packed_weight)
        return out if bias is None else out + bias


def pack(weight: torch.Tensor) -> torch.ScriptObject:
    """Rotate weights [out, in] and pack them in 8 bits, in the layout of the processor's
    instruction for dot products of bytes."""
    torch.backends.quantized.engine = (
        "fbgemm"  # the one that multiplies without a scale for all tokens
    )
    rows = rotate(weight.detach())
    scales = (rows.abs().amax(dim=1) / LARGEST).clamp(min=TINY).double()
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(
        torch.quantize_per_channel(rows, scales, zeros, 0, torch.qint8), None
    )
    return packed


def multiply(x: torch.Tensor, packed_weight: torch.ScriptObject) -> torch.Tensor:
    """Multiply x [..., in] by the weights; return [..., out] in float32."""
    rows = rotate(x)
    scales = (rows.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_(min=TINY)
    product: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        rows.div_(scales), 1.0, MIDDLE, packed_weight
    )
    return product.mul_(scales)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Multiply each block of the last dimension of x [..., width] by an orthonormal matrix, in
    float32."""
    width = x.shape[-1]
    block = min(width & -width, MOST_ROTATED)  # a power of two that divides the width
    return (x.float().reshape(-1, block) @ hadamard(block)).view(x.shape)


@cache
def hadamard(size: int) -> torch.Tensor:
    """Return the orthonormal matrix of this size, a power of two, whose entries differ in their
    signs only."""
    # while weights are loaded, the default is their dtype
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while len(matrix) < size:
        matrix = (
            torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
        )
    return matrix
