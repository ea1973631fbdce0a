"""Compute the attention of the new tokens alone; SGLang's torch-native backend computes more than
it returns.

With a cached prefix, SGLang's extend computes attention for the prefix's queries too and drops
their rows: 50 tokens after 500 cost as much as 550. Its decode reads the keys once for each query
head, also where heads share them. Here results are the same, in bf16 bit for bit. Sequences are
computed one by one, as in SGLang, so that a sequence's result does not depend on its batch.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class CpuAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's backend with two of its methods replaced, for decoders without cross-attention and
    sliding windows.

    Queries and outputs are [token, head, width]; KV pools [slot, KV head, width]; `req_to_token`
    [request, position].
    """

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if encoder_lens is not None or options["sliding_window_size"] is not None:
            lengths = (req_to_token, req_pool_indices, seq_lens, encoder_lens)
            whole: torch.Tensor = super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, *lengths, **options
            )
            return whole
        for index, (request, length) in enumerate(
            zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
        ):
            keys, values = gather(query, req_to_token[request, :length], k_cache, v_cache)
            # The query heads that share a KV head are as many queries of that head.
            queries = query[index].view(1, k_cache.shape[1], -1, query.shape[2])
            result = scaled_dot_product_attention(queries, keys, values, scale=options["scaling"])
            output[index] = result.view(output.shape[1:])
        return output

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if encoder_lens is not None or options["sliding_window_size"] is not None:
            lengths = (
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
            )
            whole: torch.Tensor = super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, *lengths, **options
            )
            return whole
        causal, start = options["causal"], 0
        sequences = zip(
            req_pool_indices.tolist(),
            extend_prefix_lens.tolist(),
            extend_seq_lens.tolist(),
            strict=True,
        )
        for request, cached, new in sequences:
            keys, values = gather(query, req_to_token[request, : cached + new], k_cache, v_cache)
            past = (
                query.new_ones((new, cached + new), dtype=torch.bool).tril(cached)
                if causal and cached
                else None
            )
            result = scaled_dot_product_attention(
                query[start : start + new].transpose(0, 1)[None],
                keys,
                values,
                attn_mask=past,
                is_causal=causal and not cached,
                scale=options["scaling"],
                enable_gqa=options["enable_gqa"],
            )
            output[start : start + new] = result[0].transpose(0, 1)
            start += new
        return output


def gather(query: torch.Tensor, slots: torch.Tensor, *pools: torch.Tensor) -> list[torch.Tensor]:
    """Return the slots' rows of each pool as [1, KV head, slot, width], in the query's dtype."""
    # Whole rows: indexing the pool itself copies element by element.
    rows = [pool.flatten(1).index_select(0, slots).view(-1, *pool.shape[1:]) for pool in pools]
    return [row.transpose(0, 1)[None].to(query.dtype) for row in rows]
