"""Stand-in for ROLL 0.3.0, after alibaba/ROLL and copies of it on GitHub: `BaseLLMProxy` as in
xudongwu-0/SafeSelfPlay at commit 7a08f56e8c73adc9550a95d956cb62197cc58e2d, `postprocess_generate`
at 3f839ca2da08285c606fceae0449790d2738bf15.

Its package is in no registry, so nothing compares this with its source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

LLM_PROXY_REGISTRY: dict[str, Any] = {}


class Batch(dict[str, torch.Tensor]):
    """As much of a TensorDict as the adapter reads."""

    @property
    def batch_size(self) -> tuple[int]:
        return (next(iter(self.values())).shape[0],)


@dataclass
class DataProto:
    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class BaseLLMProxy(ABC):
    def __init__(
        self, generate_scheduler: Any, llm_proxy_config: Any, tokenizer: Any, env: Any
    ) -> None:
        self.generate_scheduler, self.llm_proxy_config = generate_scheduler, llm_proxy_config
        self.tokenizer, self.env = tokenizer, env

    @abstractmethod
    def generate(
        self, messages: Any, lm_input: DataProto, generation_config: dict[str, Any]
    ) -> DataProto: ...


def register_llm_proxy(name: str) -> Callable[[Any], Any]:
    def register(cls: Any) -> Any:
        LLM_PROXY_REGISTRY[name] = cls
        return cls

    return register


class TrajEnvManager: ...


def concatenate_input_and_output(
    input_ids: torch.Tensor, output_ids: torch.Tensor, num_return_sequences: int
) -> torch.Tensor:
    return torch.cat((input_ids.repeat_interleave(num_return_sequences, dim=0), output_ids), dim=1)


def postprocess_generate(
    prompts: DataProto,
    output: torch.Tensor,
    num_return_sequences: int,
    sequence_length: int,
    eos_token_id: int,
    pad_token_id: int,
    fill_eos_token: bool = False,
    output_logprobs: list[list[float]] | None = None,
    pad_to_seq_len: bool = True,
) -> DataProto:
    """Of one prompt without padding: `infer_logprobs` are one fewer than tokens, each where its
    token is predicted."""
    prompt_tokens = prompts.batch["input_ids"].shape[1]
    logprobs = torch.zeros(1, output.shape[1] - 1)
    if output_logprobs is not None:
        logprobs[0, prompt_tokens - 1 :] = torch.tensor(output_logprobs[0])
    batch = Batch(input_ids=output, responses=output[:, prompt_tokens:], infer_logprobs=logprobs)
    return DataProto(batch=batch)


def contents() -> dict[str, dict[str, Any]]:
    """Name → what is in the module."""
    return {
        "roll.distributed.scheduler.protocol": {"DataProto": DataProto},
        "roll.pipeline.agentic.env_manager.traj_env_manager": {"TrajEnvManager": TrajEnvManager},
        "roll.pipeline.agentic.llm_proxy": {
            "BaseLLMProxy": BaseLLMProxy,
            "register_llm_proxy": register_llm_proxy,
        },
        "roll.utils.functionals": {
            "concatenate_input_and_output": concatenate_input_and_output,
            "postprocess_generate": postprocess_generate,
        },
    }


def create_llm_proxy(proxy_type: str, proxy_config: dict[str, Any]) -> Any:
    """As an environment manager makes it out of `llm_proxy` in its config."""
    tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=0)
    settings = SimpleNamespace(proxy_type=proxy_type, proxy_config=proxy_config)
    return LLM_PROXY_REGISTRY[proxy_type](None, settings, tokenizer, None)


def lm_input(prompt: list[int]) -> DataProto:
    """As TrajEnvManager.format_messages makes it."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    return DataProto(
        Batch(input_ids=ids, attention_mask=mask, position_ids=mask.cumsum(-1) - 1),
        {},
        {"src_rank": 0},
    )
