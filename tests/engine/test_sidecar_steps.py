"""Steps on a real SGLang engine behind a real sidecar: forced evictions, aborts, stop strings,
seeds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.engine_steps import Step, run_step, step_request, ticket
from support.real_engines import RealEngine
from support.sidecar_in_process import sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

# bf16 on a CPU, with 8-bit weights: a token's logprob differs between a decode step and a prefill
# of the whole by this much at most; 0.4 was measured.
LOGPROB_TOLERANCE = 0.8


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that no other test of this run begins with."""
    return [
        3 + (seed * 7919 + position * 31 + position * position) % 40_000
        for position in range(length)
    ]


def sampled(count: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=1.0, seed=seed, ignore_eos=True)


def rescored(
    engine: RealEngine, context: Sequence[int], output: Sequence[int], salt: str
) -> list[float]:
    """The engine's own logprobs of an output, from one forward pass over the whole."""
    answer = engine.ask(
        "/generate",
        {
            "input_ids": [*context, *output],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": len(context) - 1,
            "cache_salt": salt,
        },
    )
    scores = answer["meta_info"]["input_token_logprobs"]
    tail = scores[-len(output) :]
    assert [entry[1] for entry in tail] == list(output)
    return [entry[0] for entry in tail]


LOW_TOKENS = 110  # of a step that is evicted: it still runs when the last urgent one comes


async def test_forced_evictions_lose_no_token_and_keep_the_kv(
    nats_url: str, engine: RealEngine
) -> None:
    """Two slots, two long steps, four urgent ones that come while they run. Result: the long steps
    are evicted several times, every token is there once with the logprob that the engine gives it
    in its context, and a resumption computes little more than the page that was not whole."""
    async with sidecar(nats_url, engine.url, slots=2) as side:
        prompts = [prompt(1, 150), prompt(2, 90)]
        lows = [
            Step(
                side.stub,
                step_request(
                    ticket("e0", priority=1.0 + index), prompts[index], sampled(LOW_TOKENS, index)
                ),
            )
            for index in range(2)
        ]
        for urgent in range(4):
            for low in lows:
                await low.until_tokens(12 + 22 * urgent)
            high_ticket = ticket("e0", priority=10.0)
            high = await run_step(
                side.stub, step_request(high_ticket, prompt(10 + urgent, 30), sampled(8))
            )
            assert high.require_whole().output_tokens == 8
        results = [await low for low in lows]

        preemptions = 0
        for index, result in enumerate(results):
            finished = result.require_whole()
            assert finished.output_tokens == LOW_TOKENS
            preemptions += finished.preemptions
            scores = rescored(engine, prompts[index], result.tokens, salt=f"score-{index}")
            worst = max(abs(a - b) for a, b in zip(scores, result.logprobs, strict=True))
            assert worst < LOGPROB_TOLERANCE
            # All but the page that was not whole, and the last token, which has no KV: 16 and 1
            # tokens at each resumption.
            missed = finished.resumed_prompt_tokens - finished.resumed_cached_tokens
            assert missed <= 17 * finished.preemptions
        assert preemptions >= 3
        assert results[0].preempted, "the lowest gives way first"


async def test_an_abort_returns_all_that_was_sampled(nats_url: str, engine: RealEngine) -> None:
    async with sidecar(nats_url, engine.url) as side:
        mine = ticket("e0")
        step = Step(side.stub, step_request(mine, prompt(20, 60), sampled(2000)))
        await step.until_tokens(10)
        answer = await side.stub.Abort(
            engine_pb2.AbortRequest(request_id="a", ticket_id=mine.ticket_id), timeout=30
        )
        finished = (await step).require_whole()
        assert finished.reason == engine_pb2.FINISH_REASON_ABORTED
        assert answer.output_tokens == finished.output_tokens >= 10
        assert (await side.load()).running_steps == 0


async def test_a_stop_string_ends_a_step_also_across_a_cut(
    nats_url: str, text_engine: RealEngine
) -> None:
    """A greedy step, then the same with a stop string made of its own text, begun on an engine that
    was lost."""
    async with sidecar(nats_url, text_engine.url, slots=1) as side:
        # Counting: never the same text twice, which would match too early, and never two tokens
        # that are about as likely, of which a prefill of the whole may take the other one than the
        # decode steps did.
        counting = ", ".join(str(number) for number in range(1, 61)) + ","
        ids = text_engine.ask("/tokenize", {"prompt": counting})["tokens"]
        greedy = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
        free = await run_step(side.stub, step_request(ticket("e0"), ids, greedy))
        output = free.tokens.tolist()
        text = text_engine.ask(
            "/detokenize", {"tokens": output[24:44], "skip_special_tokens": False}
        )["text"]
        stopping = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True, stop=[text])

        plain = await run_step(side.stub, step_request(ticket("e0"), ids, stopping))
        assert plain.require_whole().reason == engine_pb2.FINISH_REASON_STOP

        # From tokens that another engine sampled: the first half of the stop string is in them.
        resumed = await run_step(
            side.stub, step_request(ticket("e0"), ids, stopping, resumed=output[:34])
        )
        finished = resumed.require_whole(resumed=34)
        assert finished.reason == engine_pb2.FINISH_REASON_STOP
        assert finished.output_tokens == len(plain.tokens) == 44


async def test_a_seed_decides_what_is_sampled(nats_url: str, engine: RealEngine) -> None:
    async with sidecar(nats_url, engine.url) as side:
        ids = prompt(40, 20)
        # The first step computes the KV that the others find: its logits may differ from theirs in
        # the last bit.
        _, first, same, other = [
            await run_step(side.stub, step_request(ticket("e0"), ids, sampled(12, seed)))
            for seed in (7, 7, 7, 8)
        ]
        assert first.tokens[:4] == same.tokens[:4]
        assert first.tokens != other.tokens
        unseeded = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)
        siblings = [
            await run_step(side.stub, step_request(ticket("e0"), ids, unseeded)) for _ in range(2)
        ]
        assert siblings[0].tokens != siblings[1].tokens, (
            "trajectories of a group sample differently without seeds"
        )
