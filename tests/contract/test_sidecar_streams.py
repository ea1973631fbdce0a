"""A sidecar reads both kinds of SGLang's streams: new tokens alone, and all tokens in each
chunk."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from aiohttp import web
from support.conditions import until_said
from support.engine_steps import Step, evict, run_step, step_request, ticket
from support.fake_sglang import VOCAB, FakeSglang, expected, fake_sglang, text_of
from support.rpc import refused
from support.sidecar_in_process import sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2

PROMPT = list(range(10, 74))


def greedy(
    count: int, stop: str = "", prompt: list[int] = PROMPT, **options: Any
) -> engine_pb2.GenerateRequest:
    sampling = SamplingParams(max_new_tokens=count, temperature=0.0, stop=[stop] if stop else [])
    return step_request(ticket("e0", **options), prompt, sampling)


@pytest.mark.parametrize("incremental", [True, False])
async def test_the_tokens_of_a_step_are_those_that_were_sampled(
    nats_url: str, incremental: bool
) -> None:
    """A step that is evicted while it runs, before an engine of each kind. Result: tokens and
    logprobs are the engine's, each once, and a stop string that the eviction splits is found in the
    text."""
    output = expected(PROMPT, 120)
    stop = text_of(output[60:90])
    async with (
        fake_sglang(token_s=0.004, incremental=incremental) as engine,
        sidecar(nats_url, engine.url, slots=1) as side,
    ):
        low = Step(side.stub, greedy(120, stop))
        high = await evict(engine, side.stub, 68, greedy(3, prompt=[5], priority=9.0))
        result = await low
    assert high.tokens.tolist() == expected([5], 3)
    assert (result.require_whole().preemptions, result.tokens.tolist()) == (1, output[:90])
    assert result.logprobs.tolist() == pytest.approx([-1.0 / (1 + token) for token in output[:90]])


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_stream_that_is_not_as_the_engine_says_ends_before_a_wrong_token(
    nats_url: str, incremental: bool
) -> None:
    """Result: the step ends with an error that names SGLang's argument, and the tokens before it
    are right."""
    async with (
        fake_sglang(incremental=incremental, says_incremental=not incremental) as engine,
        sidecar(nats_url, engine.url) as side,
    ):
        step = Step(side.stub, greedy(20))
        with refused(
            "ENGINE_LOST", grpc.StatusCode.UNAVAILABLE, says="--incremental-streaming-output"
        ):
            await step
        received = step.seen.tokens.tolist()
        assert received == expected(PROMPT, len(received))


async def test_an_engine_that_cannot_run_a_step_says_which_argument_to_change(
    nats_url: str,
) -> None:
    async with fake_sglang() as engine:
        engine.arguments["disaggregation_mode"] = "prefill"
        async with sidecar(nats_url, engine.url, healthy=False) as side:

            async def problem() -> str:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await side.stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=10)
                return raised.value.details() or ""

            await until_said(problem, lambda said: "--disaggregation-mode prefill" in said)
            with refused("ENGINE_LOST", says="--disaggregation-mode prefill"):
                await run_step(side.stub, greedy(5))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("output_ids", ["x"]),
        ("output_ids", [2**31]),
        ("output_ids", [-1]),
        ("output_ids", [VOCAB]),
        ("completion_tokens", "1"),
        ("completion_tokens", 21),
        ("weight_version", "\ud800"),
        ("weight_version", None),
        ("output_token_logprobs", [[math.nan, 1, None]]),
        ("output_token_logprobs", [[0.5, 1, None]]),
        ("cached_tokens", 2**70),
        ("finish_reason", "stop"),
    ],
)
async def test_a_chunk_that_no_message_can_carry_ends_its_step_alone(
    nats_url: str, part: str, value: object
) -> None:
    """Result: an error with a reason, and the sidecar runs the next step; it ended with all of its
    steps."""

    class FakeOddSglang(FakeSglang):
        odd = True

        async def send(self, response: web.StreamResponse, answer: dict[str, Any]) -> None:
            if self.odd:
                (answer if part in answer else answer["meta_info"])[part] = value
            await super().send(response, answer)

    engine = FakeOddSglang()
    await engine.start()
    async with sidecar(nats_url, engine.url) as side:
        with refused(
            "ENGINE_LOST", grpc.StatusCode.UNAVAILABLE, says="does not speak the protocol"
        ):
            await run_step(side.stub, greedy(20))
        engine.odd = False
        assert (await run_step(side.stub, greedy(20))).tokens.tolist() == expected(PROMPT, 20)
    await engine.stop()
