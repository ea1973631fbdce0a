"""Stand-in for rLLM, after rllm-org/rllm at commit 17dcfbf24e5b89f835478f9ae5f6dfc7f042d232
(version 0.3).

Its package is in no registry, so nothing compares this with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass
class ModelOutput:
    text: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    multi_modal_inputs: dict[str, Any] | None = None
    logprobs: list[float] | None = None
    prompt_logprobs: list[float] | None = None
    routing_matrices: list[str] | None = None
    prompt_length: int = 0
    completion_length: int = 0
    finish_reason: str | None = None
    weight_version: int | None = None
    metrics: dict[str, Any] | None = None


class RolloutEngine:
    chat_parser: Any = None
    tokenizer: Any = None
    is_validation: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.weight_version: int = 0

    async def _get_model_response(
        self, messages: list[dict[str, Any]], **kwargs: Any
    ) -> ModelOutput:
        raise NotImplementedError

    async def get_model_response(
        self, messages: list[dict[str, Any]], **kwargs: Any
    ) -> ModelOutput:
        result = await self._get_model_response(messages, **kwargs)
        result.weight_version = self.weight_version
        return result

    def assemble_model_output(self, token_input: Any, token_output: Any) -> ModelOutput:
        raise NotImplementedError

    async def get_token_output_from_token_input(self, token_input: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def supports_token_in_token_out(self) -> bool:
        return False

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...


class Tokenizer:
    """A token a word: a number is itself."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


class ChatTemplateParser:
    def parse(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = False,
        is_first_msg: bool = False,
        **_: Any,
    ) -> str:
        return " ".join(message["content"] for message in messages)

    def parse_completion(self, completion_ids: list[int]) -> dict[str, Any]:
        return {"content": " ".join(map(str, completion_ids)), "reasoning": "", "tool_calls": []}

    @classmethod
    def get_parser(cls, tokenizer: Any, **_: Any) -> ChatTemplateParser:
        return cls()


class TerminationReason(Enum):
    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"


class TerminationEvent(Exception):  # noqa: N818 - rLLM's name
    def __init__(self, reason: TerminationReason) -> None:
        super().__init__(reason)
        self.reason = reason


def contents() -> dict[str, dict[str, Any]]:
    """Name → what is in the module."""
    return {
        "rllm.engine.rollout.rollout_engine": {
            "ModelOutput": ModelOutput,
            "RolloutEngine": RolloutEngine,
        },
        "rllm.parser": {"ChatTemplateParser": ChatTemplateParser},
        "rllm.types": {
            "TerminationEvent": TerminationEvent,
            "TerminationReason": TerminationReason,
        },
    }
