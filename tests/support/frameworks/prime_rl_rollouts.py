"""Turns by `renderers.client.generate`, as the rollouts of prime-rl make them (verifiers'
TrainClient): `python prime_rl_rollouts.py FOLDER`, options on stdin, answer on stdout, as JSON.

options: url, model, prompts, sessions, sampling, turns, observation. A renderer that knows no text
stands in for the model's own: token ids are what is sent.
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from renderers.base import ParsedResponse
from renderers.client import generate


class Renderer:
    """What `generate` asks of a renderer where it is given token ids."""

    def get_stop_token_ids(self) -> list[int]:
        """None beside the model's own."""
        return []

    def parse_response(self, token_ids: list[int], **_: Any) -> ParsedResponse:
        """No text."""
        return ParsedResponse(content="")


async def roll_out(options: dict[str, Any]) -> list[dict[str, Any]]:
    contexts = [list(prompt) for prompt in options["prompts"]]
    turns = []
    async with AsyncOpenAI(
        base_url=f"{options['url']}/v1", api_key="EMPTY", max_retries=0
    ) as client:
        for turn in range(options["turns"]):
            bridged = {"routed_experts_prompt_start": len(contexts[0]) - 1} if turn else {}
            answers = await asyncio.gather(
                *(
                    generate(
                        client=client,
                        renderer=Renderer(),
                        messages=[],
                        model=options["model"],
                        prompt_ids=context,
                        sampling_params=options["sampling"] | bridged,
                        cache_salt="7",
                        extra_headers={"X-Session-ID": session},
                    )
                    for context, session in zip(contexts, options["sessions"], strict=True)
                )
            )
            turns.append(
                {
                    "contexts": [list(context) for context in contexts],
                    "response_ids": [answer["completion_ids"] for answer in answers],
                    "response_logprobs": [answer["completion_logprobs"] for answer in answers],
                    "stop_reasons": [answer["finish_reason"] for answer in answers],
                }
            )
            for context, answer in zip(contexts, answers, strict=True):
                context += [*answer["completion_ids"], *options["observation"]]
    return turns


print(json.dumps(asyncio.run(roll_out(json.load(sys.stdin)))))
