"""Give ROLL's environment managers a proxy through which they reach the mesh.

ROLL finds it once this module is imported, which `env_manager_cls:
treadle.adapters.roll.TrajEnvManager` does, and `llm_proxy: {proxy_type: treadle, proxy_config:
{address: HOST:PORT}}` chooses it. It covers generation; ROLL's own engines stay idle, and the
mesh's engines need new weights from elsewhere. Written against ROLL 0.3.0, whose package is in no
registry.
"""

from __future__ import annotations

import uuid
from typing import Any

import torch
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.env_manager.traj_env_manager import TrajEnvManager
from roll.pipeline.agentic.llm_proxy import BaseLLMProxy, register_llm_proxy
from roll.utils.functionals import concatenate_input_and_output, postprocess_generate

from treadle.adapters.calls import (
    Answer,
    address_of,
    background,
    limit_of,
    link_to,
    require_text,
    require_texts,
    sampling_of,
)

__all__ = ["MeshProxy", "TrajEnvManager"]


@register_llm_proxy("treadle")
class MeshProxy(BaseLLMProxy):  # type: ignore[misc]
    """Proxy to the mesh for one environment. An environment plays one episode at a time: a prompt
    that does not continue the open trajectory begins the next one, and ends that one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.address = address_of(str(self.llm_proxy_config.proxy_config.get("address", "")))
        self._session = uuid.uuid4().hex

    def generate(
        self, messages: list[dict[str, str]], lm_input: DataProto, generation_config: dict[str, Any]
    ) -> DataProto | None:
        """Return the response to one prompt as ROLL's method does, with `infer_logprobs`; None
        where a pause has ended it. meta_info: also finish_reasons, and version_spans as (version,
        first token, end). Raises ValueError, TreadleError."""
        require_texts(messages)
        for data in lm_input.non_tensor_batch.get("multi_modal_data", ()):
            require_text(multi_modal_data=data)
        if lm_input.batch.batch_size[0] != 1:
            raise ValueError(f"lm_input must hold one prompt, holds {lm_input.batch.batch_size[0]}")
        mask = lm_input.batch["attention_mask"][0].bool()
        prompt = lm_input.batch["input_ids"][0][mask].tolist()
        answer = background().run(self._ask(prompt, generation_config))
        if answer.finish_reason == "abort":
            return None
        return self._output(lm_input, answer)

    async def _ask(self, prompt: list[int], config: dict[str, Any]) -> Answer:
        link = await link_to(self.address)
        ends = [
            token
            for token in (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
            if token is not None
        ]
        if (limit := limit_of(config)) is None:
            raise ValueError("max_new_tokens is missing: set it in generating_args")
        sampling = sampling_of({**config, "eos_token_id": ends}, limit)
        return await link.generate(prompt, sampling, self._session, alone=True, shared_seed=True)

    def _output(self, lm_input: DataProto, answer: Answer) -> DataProto:
        """Make the output as ROLL's own scheduler makes it."""
        output = concatenate_input_and_output(
            input_ids=lm_input.batch["input_ids"],
            output_ids=torch.tensor([answer.token_ids], dtype=torch.long),
            num_return_sequences=1,
        )
        found: DataProto = postprocess_generate(
            prompts=lm_input,
            output=output,
            num_return_sequences=1,
            sequence_length=output.shape[-1],
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            pad_to_seq_len=False,
            output_logprobs=[answer.logprobs],
        )
        found.non_tensor_batch = lm_input.non_tensor_batch
        spans = [
            (span.weight_version, span.start_token, span.end_token) for span in answer.version_spans
        ]
        found.meta_info = {
            **lm_input.meta_info,
            "finish_reasons": [answer.finish_reason],
            "version_spans": [spans],
        }
        return found
