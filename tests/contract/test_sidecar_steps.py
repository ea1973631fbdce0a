"""Steps through a real sidecar before a fake engine: every token once, whatever happens to the
step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from support.conditions import until
from support.engine_steps import Step, evict, int32s, responses, run_step, step_request, ticket
from support.facts import hear
from support.fake_sglang import END_TOKEN, FakeSglang, expected, fake_sglang, text_of
from support.rpc import refusal_of, refused
from support.sidecar_in_process import Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams, TokenIds
from treadle.engine.v1 import engine_pb2
from treadle_runtime.bus import Bus

PROMPT = list(range(10, 74))
LENGTH, STOP, ABORTED = (
    engine_pb2.FINISH_REASON_LENGTH,
    engine_pb2.FINISH_REASON_STOP,
    engine_pb2.FINISH_REASON_ABORTED,
)


def greedy(
    count: int, prompt: list[int] = PROMPT, resumed: list[int] | None = None, **options: Any
) -> engine_pb2.GenerateRequest:
    """A step of `count` tokens. options: of its sampling (stop, ignore_eos), else of its ticket."""
    sampling = {name: options.pop(name) for name in ("stop", "ignore_eos") if name in options}
    params = SamplingParams(max_new_tokens=count, temperature=0.0, **sampling)
    return step_request(ticket("e0", **options), prompt, params, resumed or [])


async def abort(side: Sidecar, request: engine_pb2.GenerateRequest) -> engine_pb2.AbortResponse:
    asked = engine_pb2.AbortRequest(request_id="a", ticket_id=request.ticket.ticket_id)
    return await side.stub.Abort(asked, timeout=10)


@pytest.fixture
async def side(nats_url: str, engine: FakeSglang) -> AsyncIterator[Sidecar]:
    """Of one slot."""
    async with sidecar(nats_url, engine.url, slots=1) as side:
        yield side


async def test_a_step_streams_its_tokens_with_logprobs_version_and_timing(side: Sidecar) -> None:
    result = await run_step(side.stub, greedy(50))
    finished = result.require_whole()
    assert result.tokens.tolist() == expected(PROMPT, 50)
    assert (finished.reason, finished.cached_tokens) == (LENGTH, 0)
    assert [span.weight_version for span in finished.version_spans] == ["default"]
    again = await run_step(side.stub, greedy(5))
    assert again.require_whole().cached_tokens == 48, "whole pages before the last prompt token"


async def test_tokens_of_an_interval_come_together_but_for_the_first(side: Sidecar) -> None:
    """Nine tokens in 20 ms, an interval of 10 s. Result: the first comes alone and the others
    before the end."""
    request = greedy(9)
    request.token_interval.CopyFrom(Duration(seconds=10))
    result = await run_step(side.stub, request)
    result.require_whole()
    assert result.offsets == [0, 1]


async def test_the_start_is_told_while_the_first_token_is_late(
    side: Sidecar, engine: FakeSglang
) -> None:
    engine.hang()
    try:
        stream = side.stub.Generate(greedy(1), timeout=20)
        first = await stream.read()
        assert isinstance(first, engine_pb2.GenerateResponse)
        assert first.WhichOneof("event") == "started"
    finally:
        engine.go_on()


async def test_a_higher_step_evicts_a_lower_one_and_the_lower_one_loses_nothing(
    nats_url: str,
) -> None:
    """One slot; three high steps come while a low one runs. Result: the low one's stream is
    unbroken, its tokens those of an uninterrupted run, and its context came from KV each time it
    resumed."""
    async with fake_sglang(after_abort=2) as engine, sidecar(nats_url, engine.url, slots=1) as side:
        low = Step(side.stub, greedy(400, priority=1.0))
        takers = []
        for turn in range(3):
            await low.until_tokens(len(low.seen.tokens) + 21)
            takers.append(greedy(20, prompt=[turn + 5], priority=5.0))
            assert (await run_step(side.stub, takers[-1])).require_whole().preemptions == 0
        result = await low

        finished = result.require_whole()
        assert finished.preemptions == 3
        assert [event.by_ticket_id for event in result.preempted] == [
            taker.ticket.ticket_id for taker in takers
        ]
        assert result.tokens.tolist() == expected(PROMPT, 400)
        resent, cached = finished.resumed_prompt_tokens, finished.resumed_cached_tokens
        assert resent - 3 * 17 <= cached < resent
        assert engine.most_running == 1


async def test_a_step_that_is_not_preemptible_keeps_its_slot_from_its_first_moment(
    nats_url: str,
) -> None:
    """One slot; a step of far higher priority comes as soon as it has started. Result: that one
    waits."""
    async with (
        fake_sglang() as engine,
        sidecar(nats_url, engine.url, slots=1, min_run_tokens=0) as side,
    ):
        engine.hang()
        keeps = Step(side.stub, greedy(100, preemptible=False))
        await until(lambda: keeps.seen.started)
        high = Step(side.stub, greedy(3, prompt=[5], priority=1e9))
        await side.until_waiting(1)
        engine.go_on()
        for step in (keeps, high):
            assert (await step).require_whole().preemptions == 0
        assert not engine.aborts


async def test_no_rid_is_the_beginning_of_another(nats_url: str) -> None:
    """The engine aborts by prefix: tickets t-1 and t-11 must not share their fate."""
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, slots=4) as side:
        one, eleven = greedy(3000, prompt=[5]), greedy(200)
        one.ticket.ticket_id, eleven.ticket.ticket_id = "t-1", "t-11"
        engine.hang()
        long, other = Step(side.stub, eleven), Step(side.stub, one)
        await until(lambda: engine.running == 2)
        engine.go_on()
        await abort(side, one)
        assert (await other).require_whole().reason == ABORTED
        assert (await long).require_whole().output_tokens == 200


async def test_an_abort_returns_every_token_that_was_sampled(nats_url: str) -> None:
    async with fake_sglang(after_abort=3) as engine, sidecar(nats_url, engine.url) as side:
        request = greedy(1000)
        step = Step(side.stub, request)
        await step.until_tokens(11)
        answer, repeated = await abort(side, request), await abort(side, request)
        result = await step
        finished = result.require_whole()
        assert finished.reason == ABORTED
        assert answer.output_tokens == repeated.output_tokens == finished.output_tokens
        assert result.tokens.tolist() == expected(PROMPT, finished.output_tokens)


async def test_a_waiting_step_is_aborted_without_the_engine(
    engine: FakeSglang, side: Sidecar
) -> None:
    engine.hang()
    running = Step(side.stub, greedy(200))
    await until(lambda: engine.running == 1)
    request = greedy(10)
    waiting = Step(side.stub, request)
    await side.until_waiting(1)
    await abort(side, request)
    engine.go_on()
    finished = (await waiting).require_whole()
    assert (finished.reason, finished.output_tokens) == (ABORTED, 0)
    assert (await running).require_whole().output_tokens == 200


async def test_a_caller_that_goes_away_frees_its_slot(engine: FakeSglang, side: Sidecar) -> None:
    stream = responses(side.stub, greedy(3000))
    async for response in stream:
        if response.WhichOneof("event") == "tokens":
            break
    stream.cancel()
    (await run_step(side.stub, greedy(10))).require_whole()
    assert len(engine.aborts) >= 1


async def test_a_caller_that_goes_away_while_its_step_is_preempted_leaves_no_step(
    side: Sidecar,
) -> None:
    """Result: nothing waits any more while the step that took its slot runs."""
    taker = greedy(3000, prompt=[5], priority=5.0)
    stream, high = responses(side.stub, greedy(3000, priority=1.0)), None
    async for response in stream:
        if response.WhichOneof("event") == "tokens" and high is None:
            high = Step(side.stub, taker)
        if response.WhichOneof("event") == "preempted":
            break
    stream.cancel()
    await side.until_waiting(0)
    await abort(side, taker)
    assert high is not None
    assert (await high).require_whole().reason == ABORTED


async def test_a_late_priority_reorders_what_waits(nats_url: str) -> None:
    async with (
        fake_sglang() as engine,
        sidecar(nats_url, engine.url, slots=1, preempt=False) as side,
    ):
        order: list[str] = []

        async def step(name: str, priority: float) -> None:
            request = greedy(60, priority=priority)
            request.ticket.ticket_id = name
            await run_step(side.stub, request)
            order.append(name)

        async with asyncio.TaskGroup() as group:
            engine.hang()
            group.create_task(step("first", 1.0))
            await until(lambda: engine.running == 1)
            group.create_task(step("second", 2.0))
            group.create_task(step("third", 1.0))
            await side.until_waiting(2)
            changes = [
                engine_pb2.PriorityChange(ticket_id="third", priority=3.0),
                engine_pb2.PriorityChange(ticket_id="gone", priority=1.0),
            ]
            request = engine_pb2.ReprioritizeRequest(request_id="r1", changes=changes)
            answer = await side.stub.Reprioritize(request, timeout=10)
            assert list(answer.unknown_ticket_ids) == ["gone"]
            engine.go_on()
        assert order == ["first", "third", "second"]


async def test_resumed_output_counts_and_is_not_sent_again(
    engine: FakeSglang, side: Sidecar
) -> None:
    """A step whose engine was lost after 30 tokens. Result: the first new token's offset is 30, the
    tokens those of an unbroken run."""
    whole = expected(PROMPT, 100)
    result = await run_step(side.stub, greedy(100, resumed=whole[:30]))
    finished = result.require_whole(resumed=30)
    assert result.tokens.tolist() == whole[30:]
    assert (finished.output_tokens, finished.version_spans[0].start_token) == (100, 30)
    done = await run_step(side.stub, greedy(30, resumed=whole[:30]))
    assert done.finished is not None
    assert (done.finished.reason, len(done.tokens)) == (LENGTH, 0)


async def test_an_engine_that_dies_in_a_stream_is_unavailable_after_all_its_tokens(
    engine: FakeSglang, side: Sidecar
) -> None:
    """The engine is killed while one step runs and one waits; then it comes back. Result: both end
    with ENGINE_LOST, the running one after the tokens it had, and the sidecar serves again."""
    running = Step(side.stub, greedy(3000))
    await running.until_tokens(11)
    waiting = Step(side.stub, greedy(3000))
    await side.until_waiting(1)
    await engine.stop()
    for step in (running, waiting):
        code, reason, _, retry_after_s = await refusal_of(step)
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
        assert retry_after_s is not None
    received = running.seen.tokens.tolist()
    assert len(received) == len(running.seen.logprobs) > 10
    assert received == expected(PROMPT, len(received))

    await side.until_engine_is(False)
    with refused("ENGINE_LOST"):
        await run_step(side.stub, greedy(5))
    await engine.start()
    await side.until_engine_is(True)
    (await run_step(side.stub, greedy(5))).require_whole()


async def test_a_preempted_step_keeps_its_tokens_when_its_engine_dies(
    engine: FakeSglang, side: Sidecar
) -> None:
    low = Step(side.stub, greedy(3000, priority=1.0))
    await low.until_tokens(21)
    high = Step(side.stub, greedy(3000, prompt=[5], priority=5.0))
    await until(lambda: low.seen.preempted)
    await engine.stop()
    for step in (low, high):
        with refused("ENGINE_LOST", grpc.StatusCode.UNAVAILABLE):
            await step
    received = low.seen.tokens.tolist()
    assert len(received) > 20
    assert received == expected(PROMPT, len(received))


async def test_a_stop_string_that_an_eviction_splits_ends_the_step(nats_url: str) -> None:
    """The engine looks at what the present request sampled only. Result: the step stops where an
    uninterrupted one would, wherever it was cut."""
    output = expected(PROMPT, 120)
    stop = [text_of(output[60:90])]
    async with (
        fake_sglang(token_s=0.004, after_abort=1) as engine,
        sidecar(nats_url, engine.url, slots=1) as side,
    ):
        low = Step(side.stub, greedy(120, stop=stop))
        (await evict(engine, side.stub, 68, greedy(3, prompt=[5], priority=9.0))).require_whole()
        result = await low
        finished = result.require_whole()
        assert (finished.preemptions, finished.reason) == (1, STOP)
        assert 60 < result.preempted[0].output_tokens < 90, "the cut fell into the stop string"
        assert result.tokens.tolist() == output[:90]

        resumed = await run_step(side.stub, greedy(120, stop=stop, resumed=output[:75]))
        assert resumed.require_whole(resumed=75).reason == STOP
        assert resumed.tokens.tolist() == output[75:90]


async def test_the_end_token_ends_a_step_and_ignore_eos_does_not(
    engine: FakeSglang, side: Sidecar
) -> None:
    engine.end_at = len(PROMPT) + 7
    ended = await run_step(side.stub, greedy(50))
    assert ended.require_whole().reason == STOP
    assert (len(ended.tokens), ended.tokens[-1]) == (8, END_TOKEN)
    on = await run_step(side.stub, greedy(50, ignore_eos=True))
    assert on.require_whole().output_tokens == 50


async def test_the_context_limit_ends_a_step_as_length(nats_url: str) -> None:
    async with fake_sglang(token_s=0.0) as engine, sidecar(nats_url, engine.url) as side:
        limit = (
            await side.stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=10)
        ).info.max_context_tokens
        finished = (await run_step(side.stub, greedy(50, prompt=[7] * (limit - 5)))).require_whole()
        assert (finished.reason, finished.output_tokens) == (LENGTH, 5)


async def test_the_facts_of_a_step_reach_the_bus_in_order(
    engine: FakeSglang, side: Sidecar
) -> None:
    facts = await hear(
        side.runtime.bus, "step_queued", "step_started", "step_preempted", "step_finished"
    )
    low_request, high_request = greedy(100), greedy(3, priority=3.0)
    low = Step(side.stub, low_request)
    (await evict(engine, side.stub, 30, high_request)).require_whole()
    finished = (await low).require_whole()

    def kinds(request: engine_pb2.GenerateRequest) -> list[str]:
        return [
            type(fact).__name__ for fact in facts if fact.step.ticket_id == request.ticket.ticket_id
        ]

    await until(lambda: len(kinds(low_request)) == 4)
    assert kinds(low_request) == ["StepStarted", "StepPreempted", "StepStarted", "StepFinished"]
    assert kinds(high_request) == ["StepQueued", "StepStarted", "StepFinished"]
    last = facts[-1]
    assert last.output_tokens == finished.output_tokens == 100
    assert (last.context_tokens, last.timing) == (len(PROMPT), finished.timing)


async def test_the_ends_of_a_steps_tokens_are_published_where_that_is_asked_for(
    nats_url: str, bus: Bus, engine: FakeSglang, side: Sidecar
) -> None:
    """Two turns of one trajectory, what its tool said between them, and a sidecar that publishes no
    tokens."""
    starts, ends = await hear(bus, "step_started"), await hear(bus, "step_finished")
    observation = list(range(200, 230))
    async with sidecar(nats_url, engine.url, tell_tokens=8) as telling:
        first = await run_step(telling.stub, greedy(6, trajectory_id="t"))
        context = [*PROMPT, *first.tokens, *observation]
        second = await run_step(telling.stub, greedy(20, prompt=context, trajectory_id="t", turn=1))
    await run_step(side.stub, greedy(6))
    await until(lambda: len(ends) == len(starts) == 3)
    one, two = (fact.tokens for fact in ends[:2])

    def ids(message: TokenIds) -> list[int]:
        return int32s(message.int32_le).tolist()

    assert ids(one.prompt) == [*PROMPT[:16], *PROMPT[-16:]]
    assert [ids(start.prompt) for start in starts[:2]] == [ids(one.prompt), []]
    assert (ids(one.observation), one.observation_tokens, ids(one.output)) == (
        [],
        0,
        first.tokens.tolist(),
    )
    assert (ids(two.prompt), ids(two.output)) == ([], [*second.tokens[:4], *second.tokens[-4:]])
    assert (ids(two.observation), two.observation_tokens) == (
        [*observation[:4], *observation[-4:]],
        30,
    )
    assert not starts[2].HasField("prompt") and not ends[2].HasField("tokens")


def has_requests(engine: FakeSglang, count: int) -> bool:
    return len(engine.requests) == count


async def test_one_long_prompt_is_read_at_a_time_and_what_is_read_already_passes_it(
    nats_url: str,
) -> None:
    """On an engine that reads a token in the time of a decode step, with four slots, two cold
    prompts of 64 tokens come and then a short step; later two more, and then another sample of the
    first. Result: each time the second cold prompt gets to the engine last."""
    curve: dict[str, Any] = {"decode_base_s": 0.01, "prefill_tokens_per_s": 100.0}
    async with (
        fake_sglang(token_s=0.3) as engine,
        sidecar(nats_url, engine.url, slots=4, **curve) as side,
    ):
        for one, other, passing in ((PROMPT, 200, [7, 8, 9]), (list(range(300, 364)), 400, PROMPT)):
            cold, before = list(range(other, other + 64)), len(engine.requests)
            steps = []
            engine.hang()
            for prompt, priority, running, waiting in (
                (one, 9.0, 1, 0),
                (cold, 5.0, 1, 1),
                (passing, 1.0, 2, 1),
            ):
                steps.append(
                    asyncio.create_task(run_step(side.stub, greedy(3, prompt, priority=priority)))
                )
                await side.until_waiting(waiting)
                await until(partial(has_requests, engine, before + running))
            engine.go_on()
            for result in await asyncio.gather(*steps):
                assert result.require_whole().reason == LENGTH
            assert [request["input_ids"] for request in engine.requests[before:]] == [
                one,
                passing,
                cold,
            ]


async def test_samples_of_a_prompt_wait_until_the_first_of_them_has_read_it(nats_url: str) -> None:
    """Three samples of a cold prompt of 64 tokens come together, and then a step with another
    prompt. Result: the other prompt gets to the engine before the second and third sample, which
    come there once the first has a token."""
    async with fake_sglang(token_s=0.3) as engine, sidecar(nats_url, engine.url, slots=4) as side:
        engine.hang()
        samples = [
            asyncio.create_task(run_step(side.stub, greedy(3, PROMPT, priority=9.0)))
            for _ in range(3)
        ]
        await side.until_waiting(2)
        other = asyncio.create_task(run_step(side.stub, greedy(3, [7, 8, 9], priority=1.0)))
        await until(lambda: engine.running == 2)
        engine.go_on()
        for result in await asyncio.gather(*samples, other):
            assert result.require_whole().reason == LENGTH
        asked = [request["input_ids"] for request in engine.requests]
        assert asked[-4:] == [PROMPT, [7, 8, 9], PROMPT, PROMPT]
