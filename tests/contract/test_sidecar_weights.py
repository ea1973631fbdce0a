"""Pauses, weight updates and moves of KV at a real sidecar before fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.conditions import until
from support.engine_steps import Step, int32s, packed, run_step, step_request, ticket
from support.facts import hear
from support.fake_sglang import FakeSglang, expected, fake_sglang
from support.rpc import refused
from support.sidecar_in_process import Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2

PROMPT = list(range(10, 74))
T = 20.0
FAST_S = 0.002  # a token
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture
async def side(nats_url: str, engine: FakeSglang) -> AsyncIterator[Sidecar]:
    async with sidecar(nats_url, engine.url, slots=2) as side:
        yield side


async def steps_under_way(engine: FakeSglang, side: Sidecar, count: int, tokens: int) -> list[Step]:
    """Steps of two slots, of which two have sampled some tokens. The other tokens come slowly, so
    that the steps still run when the next call arrives."""
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    steps = [
        Step(side.stub, step_request(ticket("e0"), [*PROMPT, index], sampling))
        for index in range(count)
    ]
    await until(lambda: sum(len(step.seen.tokens) > 5 for step in steps) >= 2)
    engine.token_s = 0.05
    return steps


async def pause(side: Sidecar, mode: engine_pb2.PauseMode.ValueType) -> engine_pb2.PauseResponse:
    return await side.stub.Pause(engine_pb2.PauseRequest(request_id="pause", mode=mode), timeout=T)


async def update(side: Sidecar, version: str = "v2") -> engine_pb2.UpdateWeightsResponse:
    request = engine_pb2.UpdateWeightsRequest(
        request_id=f"to-{version}", weight_version=version, model_path="/m/v2"
    )
    return await side.stub.UpdateWeights(request, timeout=T)


async def prefetch(side: Sidecar, **fields: Any) -> engine_pb2.PrefetchPrefixResponse:
    request = engine_pb2.PrefetchPrefixRequest(
        request_id="p", trajectory_id="t", token_ids=packed(PROMPT), **fields
    )
    return await side.stub.PrefetchPrefix(request, timeout=T)


async def test_a_pause_that_keeps_holds_the_streams_and_they_go_on_after_resume(
    engine: FakeSglang, side: Sidecar
) -> None:
    steps = await steps_under_way(engine, side, count=3, tokens=150)
    answer = await pause(side, engine_pb2.PAUSE_MODE_KEEP)
    load = await side.load()

    engine.token_s = FAST_S
    assert (answer.aborted_steps, answer.kept_steps) == (0, 3)
    assert (load.paused, load.running_steps, load.waiting_steps) == (True, 0, 3)
    held = [len(step.seen.tokens) for step in steps]
    await asyncio.sleep(0.1)
    assert [len(step.seen.tokens) for step in steps] == held

    await side.stub.Resume(engine_pb2.ResumeRequest(request_id="resume"), timeout=T)
    for index, step in enumerate(steps):
        result = await step
        finished = result.require_whole()
        assert finished.reason == engine_pb2.FINISH_REASON_LENGTH
        assert result.tokens.tolist() == expected([*PROMPT, index], 150)
        assert all(event.by_ticket_id == "" for event in result.preempted)


async def test_a_pause_that_aborts_ends_running_and_waiting_steps(
    engine: FakeSglang, side: Sidecar
) -> None:
    steps = await steps_under_way(engine, side, count=3, tokens=1000)
    answer = await pause(side, engine_pb2.PAUSE_MODE_ABORT)

    assert (answer.aborted_steps, answer.kept_steps) == (3, 0)
    for index, step in enumerate(steps):
        result = await step
        finished = result.require_whole()
        assert finished.reason == engine_pb2.FINISH_REASON_ABORTED
        assert result.tokens.tolist() == expected([*PROMPT, index], finished.output_tokens)


async def test_a_step_that_lives_through_an_update_has_two_spans(
    engine: FakeSglang, side: Sidecar
) -> None:
    """New weights while steps run. Result: nobody notices but by the version of their tokens, and
    no KV of the old weights is hit."""
    facts = await hear(side.runtime.bus, "weights_updated")
    steps = await steps_under_way(engine, side, count=2, tokens=150)
    answer = await update(side)
    engine.token_s = FAST_S
    assert answer.previous_weight_version == "default"
    assert (await update(side)) == answer, "a repeat is answered from the record"

    for index, step in enumerate(steps):
        result = await step
        finished = result.require_whole()
        assert [span.weight_version for span in finished.version_spans] == ["default", "v2"]
        assert result.tokens.tolist() == expected([*PROMPT, index], 150)
        assert finished.resumed_cached_tokens == 0
    load = await side.load()
    assert (load.weight_version, load.paused) == ("v2", False)
    assert [request["cache_salt"] for request in engine.requests if request.get("stream")][-2:] == [
        "v2",
        "v2",
    ]
    await until(lambda: [fact.weight_version for fact in facts] == ["v2"])


async def test_a_load_goes_on_when_its_caller_has_gone(engine: FakeSglang, side: Sidecar) -> None:
    """The engine loads for longer than the caller waits. Result: no step runs before the load is
    over, and then under the new name; who asks for the same weights again gets the answer of that
    load."""
    facts = await hear(side.runtime.bus, "weights_updated")
    steps = await steps_under_way(engine, side, count=2, tokens=150)
    engine.load_s = 2.0
    request = engine_pb2.UpdateWeightsRequest(
        request_id="short", weight_version="v2", model_path="/m/v2"
    )
    call = side.stub.UpdateWeights(request, timeout=T)
    await until(lambda: engine.loading)
    call.cancel()
    engine.token_s = FAST_S
    assert (await side.load()).paused and engine.loading
    sent = len(engine.requests)
    assert (await update(side)).previous_weight_version == "default"

    for step in steps:
        assert [span.weight_version for span in (await step).require_whole().version_spans] == [
            "default",
            "v2",
        ]
    assert {asked["cache_salt"] for asked in engine.requests[sent:] if asked.get("stream")} == {
        "v2"
    }
    await until(lambda: [fact.weight_version for fact in facts] == ["v2"])


async def test_an_update_in_a_pause_leaves_the_pause_to_its_owner(side: Sidecar) -> None:
    await pause(side, engine_pb2.PAUSE_MODE_KEEP)
    await update(side)
    assert (await side.load()).paused
    await side.stub.Resume(engine_pb2.ResumeRequest(request_id="resume"), timeout=T)
    assert not (await side.load()).paused


async def test_a_paused_engine_computes_no_prefix(side: Sidecar) -> None:
    """Its device may be a trainer's. Result: refused, and taken after Resume."""
    await pause(side, engine_pb2.PAUSE_MODE_KEEP)
    with refused("ENGINE_PAUSED"):
        await prefetch(side)
    await side.stub.Resume(engine_pb2.ResumeRequest(request_id="resume"), timeout=T)
    assert (await prefetch(side)).tokens_prefilled == len(PROMPT)


async def test_weights_that_do_not_load_leave_the_steps_running_on_the_old_ones(
    engine: FakeSglang, side: Sidecar
) -> None:
    engine.refuse_weights = True
    steps = await steps_under_way(engine, side, count=2, tokens=100)
    with refused("WEIGHTS_NOT_LOADED", PRECONDITION):
        await update(side)
    engine.token_s = FAST_S
    for step in steps:
        assert [span.weight_version for span in (await step).require_whole().version_spans] == [
            "default"
        ]


async def test_a_trajectory_moves_from_sidecar_to_sidecar_through_storage(nats_url: str) -> None:
    """A step on e0; e1 asks e0 for the context and takes its pages from storage. Result: the next
    step on e1 finds them, and the tokens went past the caller."""
    stored: dict[str, list[list[int]]] = {}
    async with (
        fake_sglang(stored=stored) as first,
        fake_sglang(stored=stored) as second,
        sidecar(nats_url, first.url) as source,
        sidecar(nats_url, second.url, "e1") as target,
    ):
        mine = ticket("e0", trajectory_id="t7")
        sampling = SamplingParams(max_new_tokens=40, temperature=0.0)
        result = await run_step(source.stub, step_request(mine, PROMPT, sampling))
        context = PROMPT + result.tokens.tolist()

        export = await source.stub.ExportPrefix(
            engine_pb2.ExportPrefixRequest(trajectory_id="t7"), timeout=T
        )
        assert (int32s(export.token_ids.int32_le).tolist(), export.cache_salt) == (
            context,
            "default",
        )

        moved = await move(target, source.address, "t7", "m1")
        assert (moved.prefix_tokens, moved.tokens_from_cache) == (104, 0)
        assert (moved.tokens_from_storage, moved.tokens_prefilled) == (96, 8)
        again = await move(target, source.address, "t7", "m2")
        assert (again.tokens_from_cache, again.tokens_from_storage) == (96, 0)

        there = await run_step(
            target.stub, step_request(ticket("e1", trajectory_id="t7"), context, sampling)
        )
        assert there.require_whole().cached_tokens == 96
        await source.stub.ReleasePrefix(
            engine_pb2.ReleasePrefixRequest(request_id="release", trajectory_id="t7"), timeout=T
        )
        with refused("PREFIX_NOT_FOUND"):
            await source.stub.ExportPrefix(
                engine_pb2.ExportPrefixRequest(trajectory_id="t7"), timeout=T
            )


async def test_a_prefix_of_other_weights_is_not_taken(side: Sidecar) -> None:
    """KV computed under one version must not be stored under another's name."""
    with refused("WEIGHT_VERSION_MISMATCH", PRECONDITION):
        await prefetch(side, cache_salt="v9")


async def test_storage_only_prefills_nothing_that_is_not_stored(
    nats_url: str, tmp_path: Path
) -> None:
    async with (
        fake_sglang(stored={}) as engine,
        sidecar(nats_url, engine.url, kv_storage_dir=str(tmp_path)) as side,
    ):
        with refused("PREFIX_NOT_STORED", PRECONDITION):
            await prefetch(side, storage_only=True)


async def move(
    target: Sidecar, source_address: str, trajectory_id: str, request_id: str
) -> engine_pb2.PrefetchPrefixResponse:
    request = engine_pb2.PrefetchPrefixRequest(request_id=request_id, trajectory_id=trajectory_id)
    reference = getattr(request, "from")
    reference.engine_address, reference.trajectory_id = source_address, trajectory_id
    return await target.stub.PrefetchPrefix(request, timeout=T)
