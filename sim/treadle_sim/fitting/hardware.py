"""Accelerators and language models as data sheets give them: what bounds a step before anything is measured.

Peaks are dense bf16 without sparsity. Memory counts in 1e9 bytes, which is a little less than the card holds (an H100
of 80 GB reports 85.5e9 bytes): the engine's context, CUDA graphs and fragments live in the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2
# Share of the memory that the engine takes for weights and KV, SGLang's --mem-fraction-static on large cards.
MEMORY_FRACTION = 0.88
# An engine that cannot hold the KV of one trajectory at the papers' cap of 40K tokens is of no use to a rollout.
LEAST_KV_TOKENS = 40_960


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One card: bytes of memory, bytes/s of memory, bf16 FLOP/s, and bytes/s to its peers in one direction."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    bf16_flops: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Llm:
    """A dense decoder with grouped-query attention; parameters include the embeddings."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        """Of all weights in bf16."""
        return self.parameters * BF16_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in bf16, over all the cards of an engine together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16_BYTES

    @property
    def token_flops(self) -> float:
        """Of one token through the weights."""
        return 2.0 * self.parameters

    @property
    def pair_flops(self) -> float:
        """Of attention between one query token and one earlier token: scores and values, a multiply and an add each."""
        return 4.0 * self.layers * self.heads * self.head_dim

    def reduced_bytes(self, gpus: int) -> float:
        """Bytes that each card sends to its peers for one token: two ring all-reduces a layer."""
        return 2.0 * self.layers * self.hidden * BF16_BYTES * 2.0 * (gpus - 1) / gpus


ACCELERATORS = {
    card.name: card
    for card in (
        Accelerator("A100", 80e9, 2.04e12, 312e12, 300e9),
        Accelerator("H100", 80e9, 3.35e12, 989e12, 450e9),
        Accelerator("H200", 141e9, 4.8e12, 989e12, 450e9),
        Accelerator("H800", 80e9, 3.35e12, 989e12, 200e9),  # an H100 whose NVLink is cut to 400 GB/s both ways
        Accelerator("H20", 96e9, 4.0e12, 148e12, 450e9),
    )
}
LLMS = {
    llm.name: llm
    for llm in (
        Llm("Qwen3-8B", 8.19e9, 36, 4096, 32, 8, 128),
        Llm("Qwen3-14B", 14.77e9, 40, 5120, 40, 8, 128),
        Llm("Qwen3-32B", 32.76e9, 64, 5120, 64, 8, 128),
        Llm("Llama-2-70B", 68.98e9, 80, 8192, 64, 8, 128),
        Llm("Llama-3.1-70B", 70.55e9, 80, 8192, 64, 8, 128),
        Llm("Llama-3.1-8B", 8.03e9, 32, 4096, 32, 8, 128),
    )
}


def kv_tokens(llm: Llm, accelerator: Accelerator, gpus: int) -> int:
    """Tokens of KV that fit beside the weights on `gpus` cards; 0 where fewer than LEAST_KV_TOKENS would."""
    free = MEMORY_FRACTION * accelerator.memory_bytes * gpus - llm.weight_bytes
    tokens = int(free // llm.kv_bytes_per_token)
    return tokens if tokens >= LEAST_KV_TOKENS else 0
