"""Give rLLM a rollout engine whose responses are steps of trajectories in the mesh.

Give a MeshEngine to rLLM's AgentWorkflowEngine, or to anything else that takes a RolloutEngine.
rLLM's own chat template parser makes the tokens once, and they go in and out as ids. Written
against rLLM at commit 17dcfbf (version 0.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from rllm.engine.rollout.rollout_engine import ModelOutput, RolloutEngine
from rllm.parser import ChatTemplateParser
from rllm.types import TerminationEvent, TerminationReason

from treadle.adapters.calls import (
    Answer,
    address_of,
    limit_of,
    link_to,
    one_run,
    require_texts,
    sampling_of,
)


class MeshEngine(RolloutEngine):  # type: ignore[misc]
    """rLLM's rollout engine, through the mesh. tokenizer: of the model. address: of the mesh.
    max_prompt_length, max_response_length: tokens. sampling, validation_sampling: parameters by
    SGLang's names; validation's default to those of training. parser: rLLM's, by default the one
    for the tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        address: str = "",
        *,
        max_prompt_length: int,
        max_response_length: int,
        sampling: Mapping[str, Any] | None = None,
        validation_sampling: Mapping[str, Any] | None = None,
        parser: Any = None,
        accumulate_reasoning: bool = False,
    ) -> None:
        super().__init__()
        self.tokenizer, self.address = tokenizer, address_of(address)
        self.chat_parser = (
            parser if parser is not None else ChatTemplateParser.get_parser(tokenizer)
        )
        self.max_prompt_length, self.max_response_length = max_prompt_length, max_response_length
        self.sampling = dict(sampling or {"temperature": 1.0, "top_p": 1.0, "top_k": -1})
        self.validation_sampling = dict(
            validation_sampling if validation_sampling is not None else self.sampling
        )
        self.accumulate_reasoning = accumulate_reasoning

    @property
    def supports_token_in_token_out(self) -> bool:
        return True

    def trajectory(self) -> AbstractAsyncContextManager[None]:
        """Make all turns of a workflow one trajectory, which ends with the workflow."""
        return one_run(self.address)

    async def get_model_response(
        self, messages: list[dict[str, Any]], **kwargs: Any
    ) -> ModelOutput:
        """Generate a response as rLLM's method does. weight_version: the oldest that sampled a
        token of it, where versions are numbers; metrics: also every version with its tokens."""
        output = await self._get_model_response(messages, **kwargs)
        if output.weight_version is None:
            output.weight_version = self.weight_version
        return output

    async def _get_model_response(
        self, messages: list[dict[str, Any]], **kwargs: Any
    ) -> ModelOutput:
        require_texts(messages)
        prompt = self.chat_parser.parse(
            messages,
            add_generation_prompt=True,
            is_first_msg=True,
            tools=kwargs.pop("tools", []),
            accumulate_reasoning=kwargs.pop("accumulate_reasoning", self.accumulate_reasoning),
            **{name: kwargs.pop(name) for name in ("reasoning_effort",) if name in kwargs},
        )
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        answer = await self.get_token_output_from_token_input(prompt_ids, **kwargs)
        return self.assemble_model_output(prompt_ids, answer)

    async def get_token_output_from_token_input(
        self, token_input: Sequence[int], **kwargs: Any
    ) -> Answer:
        """Generate tokens from tokens, also over a pause. kwargs: application_id (whose turn it
        is), validate, enforce_max_prompt_length, and sampling parameters. Raises TerminationEvent
        for a prompt that is too long, ValueError, TreadleError."""
        session = str(kwargs.pop("application_id", None) or "")
        validation = kwargs.pop("validate", False) or self.is_validation
        room = self.max_prompt_length + self.max_response_length - len(token_input)
        if (
            kwargs.pop("enforce_max_prompt_length", True)
            and len(token_input) > self.max_prompt_length
        ) or room <= 0:
            raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
        usual = self.validation_sampling if validation else self.sampling
        params = {**usual, **kwargs}
        limits = limit_of(kwargs), limit_of(usual), self.max_response_length
        limit = next(each for each in limits if each is not None)
        link = await link_to(self.address)
        sampling = sampling_of(params, min(limit, room))
        shared_seed = not {"seed", "sampling_seed"} & kwargs.keys()  # that of `self.sampling`
        return await link.generate_whole(token_input, sampling, session, shared_seed=shared_seed)

    def assemble_model_output(
        self, token_input: Sequence[int], token_output: Answer
    ) -> ModelOutput:
        """Make rLLM's output from an answer of the mesh."""
        parsed = self.chat_parser.parse_completion(token_output.token_ids)
        versions = token_output.numbered_versions
        return ModelOutput(
            text=self.tokenizer.decode(token_output.token_ids, skip_special_tokens=True),
            content=parsed["content"],
            reasoning=parsed["reasoning"],
            tool_calls=parsed["tool_calls"],
            prompt_ids=list(token_input),
            completion_ids=token_output.token_ids,
            logprobs=token_output.logprobs,
            prompt_length=len(token_input),
            completion_length=len(token_output.token_ids),
            finish_reason=token_output.finish_reason,
            weight_version=min(versions) if versions else None,
            metrics={
                "trajectory_id": token_output.trajectory_id,
                "version_spans": [
                    (s.weight_version, s.start_token, s.end_token)
                    for s in token_output.version_spans
                ],
                "queue_s": token_output.queue_s,
                "ttft": token_output.queue_s + token_output.prefill_s,
                "preemptions": token_output.preemptions,
            },
        )

    async def sleep(self) -> None:
        """Close the open trajectories that wait for another turn, as the trainer takes the
        engines."""
        link = await link_to(self.address)
        await link.sessions.close_everything()
