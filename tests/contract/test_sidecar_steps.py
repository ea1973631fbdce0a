"""Steps through a real sidecar before a fake engine: every token once, whatever happens to the step."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from support.conditions import until
from support.engine_steps import StepResult, int32s, packed, responses, run_step, step_request, ticket
from support.fake_sglang import END_TOKEN, FakeSglang, expected, fake_sglang, text_of
from support.rpc import error_of
from support.sidecar_in_process import sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams, TokenIds
from treadle.engine.v1 import engine_pb2
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle_runtime.facts import kind_of

PROMPT = list(range(10, 74))


def greedy(count: int, **options: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, **options)  # type: ignore[arg-type]


async def test_a_step_streams_its_tokens_with_logprobs_version_and_timing(nats_url: str) -> None:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url) as side:
        result = await run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(50)))

        finished = result.require_whole()
        assert result.tokens.tolist() == expected(PROMPT, 50)
        assert finished.reason == engine_pb2.FINISH_REASON_LENGTH
        assert [span.weight_version for span in finished.version_spans] == ["default"]
        assert finished.cached_tokens == 0

        again = await run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(5)))
        assert again.require_whole().cached_tokens == 48, "whole pages before the last prompt token"


async def test_a_higher_step_evicts_a_lower_one_and_the_lower_one_loses_nothing(nats_url: str) -> None:
    """One slot; three high steps come while a low one runs. Result: the low one's stream is unbroken, its tokens those
    of an uninterrupted run, and its context came from KV each time it resumed.
    """
    async with fake_sglang(after_abort=2) as engine, sidecar(nats_url, engine.url, slots=1) as side:
        seen = StepResult()

        def note(result: StepResult) -> None:
            nonlocal seen
            seen = result

        low_ticket = ticket("e0", priority=1.0)
        low = asyncio.create_task(run_step(side.stub, step_request(low_ticket, PROMPT, greedy(400)), note))
        takers = []
        for turn in range(3):
            count = len(seen.tokens)
            await until(lambda count=count: len(seen.tokens) > count + 20)  # type: ignore[misc]
            takers.append(ticket("e0", priority=5.0))
            high = await run_step(side.stub, step_request(takers[-1], [turn + 5], greedy(20)))
            assert high.require_whole().preemptions == 0
        result = await low

        finished = result.require_whole()
        assert finished.preemptions == 3
        assert [event.by_ticket_id for event in result.preempted] == [one.ticket_id for one in takers]
        assert result.tokens.tolist() == expected(PROMPT, 400)
        resent, cached = finished.resumed_prompt_tokens, finished.resumed_cached_tokens
        assert resent - 3 * 17 <= cached < resent
        assert engine.most_running == 1


async def test_a_step_that_is_not_preemptible_keeps_its_slot_from_its_first_moment(nats_url: str) -> None:
    """One slot; a step of far higher priority comes as soon as it has started. Result: that one waits."""
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, slots=1, min_run_tokens=0) as side:
        seen = [0]
        keeps = asyncio.create_task(
            run_step(
                side.stub,
                step_request(ticket("e0", preemptible=False), PROMPT, greedy(100)),
                lambda result: seen.append(len(result.started)),
            )
        )
        await until(lambda: seen[-1] == 1)
        high = await run_step(side.stub, step_request(ticket("e0", priority=1e9), [5], greedy(3)))

        kept, waited = (await keeps).require_whole(), high.require_whole()
        assert kept.preemptions == waited.preemptions == 0
        assert waited.timing.accepted_at.ToNanoseconds() < kept.timing.finished_at.ToNanoseconds(), "it came in time"


async def test_no_rid_is_the_beginning_of_another(nats_url: str) -> None:
    """The engine aborts by prefix: tickets t-1 and t-11 must not share their fate."""
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, slots=4) as side:
        one, eleven = ticket("e0"), ticket("e0")
        one.ticket_id, eleven.ticket_id = "t-1", "t-11"
        long = asyncio.create_task(run_step(side.stub, step_request(eleven, PROMPT, greedy(200))))
        other = asyncio.create_task(run_step(side.stub, step_request(one, PROMPT, greedy(200))))
        await until(lambda: engine.most_running == 2)
        await side.stub.Abort(engine_pb2.AbortRequest(request_id="a1", ticket_id="t-1"), timeout=10)

        assert (await other).require_whole().reason == engine_pb2.FINISH_REASON_ABORTED
        assert (await long).require_whole().output_tokens == 200


async def test_an_abort_returns_every_token_that_was_sampled(nats_url: str) -> None:
    async with fake_sglang(after_abort=3) as engine, sidecar(nats_url, engine.url) as side:
        mine = ticket("e0")
        ids: list[int] = []
        step = asyncio.create_task(
            run_step(
                side.stub, step_request(mine, PROMPT, greedy(1000)), lambda r: ids.__setitem__(slice(None), r.tokens)
            )
        )
        await until(lambda: len(ids) > 10)
        answer = await side.stub.Abort(engine_pb2.AbortRequest(request_id="a1", ticket_id=mine.ticket_id), timeout=10)
        repeated = await side.stub.Abort(engine_pb2.AbortRequest(request_id="a1", ticket_id=mine.ticket_id), timeout=10)
        result = await step

        finished = result.require_whole()
        assert finished.reason == engine_pb2.FINISH_REASON_ABORTED
        assert answer.output_tokens == repeated.output_tokens == finished.output_tokens
        assert result.tokens.tolist() == expected(PROMPT, finished.output_tokens)


async def test_a_waiting_step_is_aborted_without_the_engine(nats_url: str) -> None:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, slots=1) as side:
        running = asyncio.create_task(run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(200))))
        await until(lambda: engine.most_running == 1)
        waiting_ticket = ticket("e0")
        waiting = asyncio.create_task(run_step(side.stub, step_request(waiting_ticket, PROMPT, greedy(10))))
        await side.until_waiting(1)
        await side.stub.Abort(engine_pb2.AbortRequest(request_id="a", ticket_id=waiting_ticket.ticket_id), timeout=10)

        finished = (await waiting).require_whole()
        assert (finished.reason, finished.output_tokens) == (engine_pb2.FINISH_REASON_ABORTED, 0)
        assert (await running).require_whole().output_tokens == 200


async def test_a_caller_that_goes_away_frees_its_slot(nats_url: str) -> None:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, slots=1) as side:
        stream = responses(side.stub, step_request(ticket("e0"), PROMPT, greedy(3000)))
        async for response in stream:
            if response.WhichOneof("event") == "tokens":
                break
        stream.cancel()
        result = await run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(10)))
        result.require_whole()
        assert len(engine.aborts) >= 1


async def test_a_late_priority_reorders_what_waits(nats_url: str) -> None:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, slots=1, preempt=False) as side:
        order: list[str] = []

        async def step(name: str, priority: float) -> None:
            mine = ticket("e0", priority=priority)
            mine.ticket_id = name
            await run_step(
                side.stub, step_request(mine, PROMPT, greedy(60)), lambda r: order.append(name) if r.finished else None
            )

        async with asyncio.TaskGroup() as group:
            group.create_task(step("first", 1.0))
            await until(lambda: engine.most_running == 1)
            group.create_task(step("second", 2.0))
            group.create_task(step("third", 1.0))
            await side.until_waiting(2)
            changes = [
                engine_pb2.PriorityChange(ticket_id="third", priority=3.0),
                engine_pb2.PriorityChange(ticket_id="gone", priority=1.0),
            ]
            answer = await side.stub.Reprioritize(
                engine_pb2.ReprioritizeRequest(request_id="r1", changes=changes), timeout=10
            )
            assert list(answer.unknown_ticket_ids) == ["gone"]
        assert order == ["first", "third", "second"]


async def test_resumed_output_counts_and_is_not_sent_again(nats_url: str) -> None:
    """A step whose engine was lost after 30 tokens. Result: the first new token's offset is 30, the tokens those of an
    unbroken run.
    """
    whole = expected(PROMPT, 100)
    async with fake_sglang() as engine, sidecar(nats_url, engine.url) as side:
        request = step_request(ticket("e0"), PROMPT, greedy(100), resumed=whole[:30])
        result = await run_step(side.stub, request)

        finished = result.require_whole(resumed=30)
        assert result.tokens.tolist() == whole[30:]
        assert finished.output_tokens == 100
        assert finished.version_spans[0].start_token == 30

        done = await run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(30), resumed=whole[:30]))
        assert done.finished is not None
        assert (done.finished.reason, len(done.tokens)) == (engine_pb2.FINISH_REASON_LENGTH, 0)


async def test_an_engine_that_dies_in_a_stream_is_unavailable_after_all_its_tokens(nats_url: str) -> None:
    """The engine is killed while one step runs and one waits; then it comes back. Result: both end with ENGINE_LOST,
    the running one after the tokens it had, and the sidecar serves again.
    """
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, slots=1) as side:
        results = [StepResult(), StepResult()]

        async def step(index: int) -> grpc.aio.AioRpcError:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for response in responses(side.stub, step_request(ticket("e0"), PROMPT, greedy(3000))):
                    results[index].take(response)
            return raised.value

        running = asyncio.create_task(step(0))
        await until(lambda: len(results[0].tokens) > 10)
        waiting = asyncio.create_task(step(1))
        await side.until_waiting(1)
        await engine.stop()
        for error in (await running, await waiting):
            code, reason, _, retry_after_s = error_of(error)
            assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
            assert retry_after_s is not None
        received = results[0].tokens.tolist()
        assert len(received) == len(results[0].logprobs) > 10
        assert received == expected(PROMPT, len(received))

        await side.until_engine_is(False)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(5)))
        assert error_of(refused.value).reason == "ENGINE_LOST"

        await engine.start()
        await side.until_engine_is(True)
        (await run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(5)))).require_whole()


async def test_a_stop_string_that_an_eviction_splits_ends_the_step(nats_url: str) -> None:
    """The engine looks at what the present request sampled only. Result: the step stops where an uninterrupted one
    would, wherever it was cut.
    """
    output = expected(PROMPT, 120)
    stop = text_of(output[60:90])
    async with fake_sglang(token_s=0.004, after_abort=1) as engine, sidecar(nats_url, engine.url, slots=1) as side:
        seen = StepResult()

        def note(result: StepResult) -> None:
            nonlocal seen
            seen = result

        low = asyncio.create_task(
            run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(120, stop=[stop])), note)
        )
        await until(lambda: len(seen.tokens) >= 68)
        (await run_step(side.stub, step_request(ticket("e0", priority=9.0), [5], greedy(3)))).require_whole()
        result = await low

        finished = result.require_whole()
        assert finished.preemptions == 1
        assert 60 < result.preempted[0].output_tokens < 90, "the cut fell into the stop string"
        assert finished.reason == engine_pb2.FINISH_REASON_STOP
        assert result.tokens.tolist() == output[:90]

        resumed = await run_step(
            side.stub, step_request(ticket("e0"), PROMPT, greedy(120, stop=[stop]), resumed=output[:75])
        )
        assert resumed.require_whole(resumed=75).reason == engine_pb2.FINISH_REASON_STOP
        assert resumed.tokens.tolist() == output[75:90]


async def test_the_end_token_ends_a_step_and_ignore_eos_does_not(nats_url: str) -> None:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url) as side:
        engine.end_at = len(PROMPT) + 7
        ended = await run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(50)))
        assert ended.require_whole().reason == engine_pb2.FINISH_REASON_STOP
        assert (len(ended.tokens), ended.tokens[-1]) == (8, END_TOKEN)

        on = await run_step(side.stub, step_request(ticket("e0"), PROMPT, greedy(50, ignore_eos=True)))
        assert on.require_whole().output_tokens == 50


async def test_the_context_limit_ends_a_step_as_length(nats_url: str) -> None:
    async with fake_sglang(token_s=0.0) as engine, sidecar(nats_url, engine.url) as side:
        limit = (await side.stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=10)).info.max_context_tokens
        prompt = [7] * (limit - 5)
        result = await run_step(side.stub, step_request(ticket("e0"), prompt, greedy(50)))
        finished = result.require_whole()
        assert (finished.reason, finished.output_tokens) == (engine_pb2.FINISH_REASON_LENGTH, 5)


async def test_the_facts_of_a_step_reach_the_bus_in_order(nats_url: str) -> None:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, slots=1) as side:
        facts: list[Fact] = []

        async def hear(fact: Fact) -> None:
            facts.append(fact)

        await side.runtime.bus.subscribe(["step_queued", "step_started", "step_preempted", "step_finished"], hear)
        low_ticket = ticket("e0")
        seen = [0]
        low = asyncio.create_task(
            run_step(
                side.stub,
                step_request(low_ticket, PROMPT, greedy(100)),
                lambda result: seen.append(len(result.tokens)),
            )
        )
        await until(lambda: seen[-1] >= 30)
        high_ticket = ticket("e0", priority=3.0)
        (await run_step(side.stub, step_request(high_ticket, PROMPT, greedy(3)))).require_whole()
        finished = (await low).require_whole()

        def of(ticket_id: str) -> list[str]:
            kinds = [(kind_of(fact), getattr(fact, kind_of(fact)).step.ticket_id) for fact in facts]
            return [kind for kind, whose in kinds if whose == ticket_id]

        await until(lambda: "step_finished" in of(low_ticket.ticket_id))
        assert of(low_ticket.ticket_id) == [
            "step_queued",
            "step_started",
            "step_preempted",
            "step_started",
            "step_finished",
        ]
        assert of(high_ticket.ticket_id) == ["step_queued", "step_started", "step_finished"]
        last = next(
            f for f in facts if f.HasField("step_finished") and f.step_finished.step.ticket_id == low_ticket.ticket_id
        )
        assert last.step_finished.output_tokens == finished.output_tokens == 100
        assert last.step_finished.context_tokens == len(PROMPT)
        assert last.step_finished.timing == finished.timing


async def test_what_is_packed_is_what_was_sent() -> None:
    """Guards the support code: packing is little-endian int32."""
    assert packed([1, 258]).int32_le == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert isinstance(FakeSglang().token_s, float)


async def test_the_ends_of_a_steps_tokens_are_told_where_that_is_asked_for(nats_url: str) -> None:
    """Two turns of one trajectory, what its tool said between them, and a sidecar that tells nothing."""
    facts: list[Fact] = []
    starts: list[Fact] = []

    async def hear(fact: Fact) -> None:
        facts.append(fact)

    async def hear_start(fact: Fact) -> None:
        starts.append(fact)

    observation = list(range(200, 230))
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, tell_tokens=8) as side:
        await side.runtime.bus.subscribe(["step_finished"], hear)
        await side.runtime.bus.subscribe(["step_started"], hear_start)
        first = await run_step(side.stub, step_request(ticket("e0", trajectory_id="t", turn=0), PROMPT, greedy(6)))
        context = [*PROMPT, *first.tokens, *observation]
        second = await run_step(side.stub, step_request(ticket("e0", trajectory_id="t", turn=1), context, greedy(20)))
        await until(lambda: len(facts) == 2)
    told = [fact.step_finished.tokens for fact in facts]

    def ids(message: TokenIds) -> list[int]:
        return int32s(message.int32_le).tolist()

    assert ids(told[0].prompt) == [*PROMPT[:16], *PROMPT[-16:]]
    assert [ids(start.step_started.prompt) for start in starts] == [ids(told[0].prompt), []]
    assert (ids(told[0].observation), told[0].observation_tokens) == ([], 0)
    assert ids(told[0].output) == first.tokens.tolist()
    assert ids(told[1].prompt) == []
    assert (ids(told[1].observation), told[1].observation_tokens) == ([*observation[:4], *observation[-4:]], 30)
    assert ids(told[1].output) == [*second.tokens[:4], *second.tokens[-4:]]

    async with fake_sglang() as engine, sidecar(nats_url, engine.url, "e1") as side:
        await side.runtime.bus.subscribe(["step_finished"], hear)
        await side.runtime.bus.subscribe(["step_started"], hear_start)
        await run_step(side.stub, step_request(ticket("e1"), PROMPT, greedy(6)))
        await until(lambda: len(facts) == 3)
    assert not facts[2].step_finished.HasField("tokens")
    assert not starts[-1].step_started.HasField("prompt")
