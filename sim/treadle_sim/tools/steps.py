"""How long a trajectory generates between its actions, on an engine of the project's fitted profiles."""

from __future__ import annotations

from collections.abc import Sequence

from treadle_sim.profiles import engine_model

LLM, ACCELERATOR, GPUS = "Qwen3-32B", "H200", 4  # ARL-Tangram §6.1: Qwen3-32B on Hopper GPUs; the degree is a choice
IN_FLIGHT = 16  # sequences an engine: 1,280 trajectories on 48 nodes of 8 GPUs are 13


def generation_s(prompt_tokens: int, gen_tokens: Sequence[int], obs_tokens: Sequence[int]) -> list[float]:
    """Of each step: reading what came since the last one, then decoding."""
    curve = engine_model(LLM, ACCELERATOR, GPUS).curve
    found, context, new = [], 0, prompt_tokens
    for gen, obs in zip(gen_tokens, obs_tokens, strict=True):
        read_s = curve.prefill_s(new, context)
        context += new + gen
        token_s = curve.decode_s(IN_FLIGHT) + curve.per_kv_token_s * IN_FLIGHT * context
        found.append(read_s + gen * token_s)
        new = obs
    return found
