"""Frameworks' own clients through the gateway, on a real engine: tokens, logprobs and weight
versions are those of a direct call, and what the model has sampled is never tokenised again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.frameworks.packages import run_rollouts
from support.frameworks.slime import Sample, Slime
from support.gateway import Direct, FrontDoor, ask_directly, front_door
from support.real_engines import RealEngine, model_folder

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

SESSIONS = ["s0", "s1"]
NEW_TOKENS, TURNS, OBSERVATION = 16, 3, [28, 284, 260]
# A step computes what came since the turn before, and a direct call the whole context: 32-bit
# floats give the same tokens, and logprobs that differ in their last digits.
LOGPROB_TOLERANCE = 2e-3


def prompt(seed: int) -> list[int]:
    """Token ids that no other test of this run begins with."""
    return [
        3 + (seed * 7919 + position * 31 + position * position) % 40_000 for position in range(40)
    ]


PROMPTS = [prompt(21), prompt(22)]


@pytest.fixture
async def door(tmp_path: Path, engine: RealEngine) -> AsyncIterator[FrontDoor]:
    async with front_door(
        tmp_path, urls={"e0": engine.url}, tokenizer=model_folder(), served_model="smol"
    ) as door:
        yield door


async def check(
    door: FrontDoor, context: list[int], token_ids: list[int], logprobs: list[float]
) -> Direct:
    """An answer is that of a direct call, which is returned."""
    direct = await ask_directly(door.http, door.urls["e0"], context, len(token_ids))
    assert token_ids == direct.token_ids
    assert logprobs == pytest.approx(direct.logprobs, abs=LOGPROB_TOLERANCE)
    return direct


async def check_turns(door: FrontDoor, turns: list[dict[str, Any]]) -> None:
    assert len(turns) == TURNS
    for turn in turns:
        for context, ids, logprobs in zip(
            turn["contexts"], turn["response_ids"], turn["response_logprobs"], strict=True
        ):
            assert len(ids) == NEW_TOKENS
            direct = await check(door, context, ids, logprobs)
            # Their clients drop the spans, so that the request is made once more.
            sampling = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
            answer = await door.post(
                "/inference/v1/generate", {"token_ids": context, "sampling_params": sampling}
            )
            assert answer["choices"][0]["weight_versions"] == direct.versions


def options(door: FrontDoor, **sampling: Any) -> dict[str, Any]:
    return {
        "url": door.url,
        "model": "smol",
        "prompts": PROMPTS,
        "sessions": SESSIONS,
        "turns": TURNS,
        "observation": OBSERVATION,
        "sampling": {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **sampling},
    }


async def test_skyrls_client(door: FrontDoor) -> None:
    answer = await run_rollouts("skyrl", options(door, logprobs=1, min_tokens=1, top_k=-1))
    await check_turns(door, answer["turns"])
    assert all(
        isinstance(text, str) and text for turn in answer["turns"] for text in turn["responses"]
    )


async def test_prime_rls_client(door: FrontDoor) -> None:
    await check_turns(door, await run_rollouts("prime-rl", options(door)))


async def test_what_slime_sends(door: FrontDoor) -> None:
    slime = Slime(door.http, door.url, [door.url])

    async def play(first: list[int], session: str) -> None:
        sample = Sample(session, list(first), NEW_TOKENS)
        for _ in range(TURNS):
            before = list(sample.tokens)
            sample.left, sample.logprobs = NEW_TOKENS, []
            await slime.generate(sample)
            direct = await check(door, before, sample.tokens[len(before) :], sample.logprobs)
            assert sample.weight_versions[-1] == direct.versions[-1]["version"]
            assert sample.spans == direct.versions
            sample.tokens = sample.tokens + OBSERVATION

    await asyncio.gather(*map(play, PROMPTS, SESSIONS))
    assert await slime.discover() == [1]
    await slime.abort()


async def test_an_unmodified_openai_client_chats(door: FrontDoor) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{door.url}/v1", api_key="none", max_retries=0
    ) as client:
        messages: list[Any] = [{"role": "user", "content": "Name a colour."}]
        known: list[int] = []
        for _ in range(TURNS):
            answer = await client.chat.completions.create(
                model="smol",
                messages=messages,
                max_tokens=NEW_TOKENS,
                temperature=0.0,
                logprobs=True,
                extra_headers={"X-Session-ID": "chat"},
                extra_body={"return_token_ids": True},
            )
            choice = answer.choices[0]
            assert (
                choice.model_extra is not None
                and choice.logprobs is not None
                and choice.logprobs.content
            )
            prompt_ids, token_ids = (
                choice.model_extra["prompt_token_ids"],
                choice.model_extra["token_ids"],
            )
            assert prompt_ids[: len(known)] == known
            await check(
                door, prompt_ids, token_ids, [entry.logprob for entry in choice.logprobs.content]
            )
            known = prompt_ids + token_ids
            messages += [
                {"role": "assistant", "content": choice.message.content},
                {"role": "user", "content": "Another."},
            ]
