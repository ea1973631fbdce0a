"""KV between real engines, new weights in the middle of a step, and an engine that is killed."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import grpc
import grpc.aio
import pytest
from support.conditions import until
from support.engine_steps import (
    Step,
    StepResult,
    int32s,
    packed,
    responses,
    run_step,
    step_request,
    ticket,
)
from support.real_engines import KV_LIMIT_GB, RealEngine
from support.rpc import error_of
from support.sidecar_in_process import Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2
from treadle_sidecar.engine.process import PAGE_TOKENS
from treadle_sidecar.storage_keys import page_keys

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
T = 60.0


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that no other test of this run begins with."""
    return [
        3 + (seed * 104_729 + position * 37 + position * position) % 40_000
        for position in range(length)
    ]


def sampled(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=1.0, seed=3, ignore_eos=True)


def stored_in(engine: RealEngine) -> dict[str, Any]:
    """Settings of a sidecar before an engine that has its folder; an engine may write there
    late."""
    return {"kv_storage_dir": str(engine.kv), "export_wait_s": 10.0}


async def move(
    trajectory_id: str, source: Sidecar, target: Sidecar, *, storage_only: bool
) -> engine_pb2.PrefetchPrefixResponse:
    """Bring the trajectory's context from one engine to the other."""
    request = engine_pb2.PrefetchPrefixRequest(
        request_id=f"{trajectory_id}-{storage_only}",
        trajectory_id=trajectory_id,
        storage_only=storage_only,
    )
    reference = getattr(request, "from")
    reference.engine_address, reference.trajectory_id = source.address, trajectory_id
    return await target.stub.PrefetchPrefix(request, timeout=T)


async def test_new_weights_in_the_middle_of_a_step_show_as_two_spans(
    nats_url: str, engine: RealEngine
) -> None:
    """Result: the step goes on under the new version, on KV that the new weights computed, then
    everything is paused and resumed once more."""
    async with sidecar(nats_url, engine.url) as side:
        step = Step(side.stub, step_request(ticket("e0"), prompt(1, 100), sampled(60)))
        seen = step.seen
        await step.until_tokens(10)
        request = engine_pb2.UpdateWeightsRequest(
            request_id="w", weight_version="v2", model_path=engine.spec.model_path
        )
        answer = await side.stub.UpdateWeights(request, timeout=T)
        assert answer.load_time.ToNanoseconds() > 0
        await until(lambda: len(seen.versions) > 0 and seen.versions[-1] == "v2")

        held = await side.stub.Pause(
            engine_pb2.PauseRequest(request_id="p", mode=engine_pb2.PAUSE_MODE_KEEP), timeout=T
        )
        assert held.kept_steps == 1
        count = len(seen.tokens)
        await asyncio.sleep(0.5)
        assert len(seen.tokens) == count
        await side.stub.Resume(engine_pb2.ResumeRequest(request_id="r"), timeout=T)

        finished = (await step).require_whole()
        assert [span.weight_version for span in finished.version_spans] == [
            answer.previous_weight_version,
            "v2",
        ]
        assert finished.output_tokens == 60
        assert finished.preemptions == 2
        # The first resumption found nothing under the new salt, the second all but a page.
        assert (
            finished.resumed_prompt_tokens // 3
            < finished.resumed_cached_tokens
            < finished.resumed_prompt_tokens
        )
        assert (await side.load()).weight_version == "v2"
        back = engine_pb2.UpdateWeightsRequest(
            request_id="b", weight_version="default", model_path=engine.spec.model_path
        )
        await side.stub.UpdateWeights(back, timeout=T)


async def test_a_trajectorys_kv_moves_to_the_other_engine_through_storage(
    nats_url: str, two_engines: tuple[RealEngine, RealEngine]
) -> None:
    """A step on e0; e1 takes the context over while e0 is not asked for anything but token ids.
    Result: nearly all of it comes from storage, and the next step on e1 finds it."""
    first, second = two_engines
    storage = stored_in(first)
    async with (
        sidecar(nats_url, first.url, **storage) as source,
        sidecar(nats_url, second.url, "e1", **storage) as target,
    ):
        ids = prompt(2, 600)
        step = await run_step(
            source.stub, step_request(ticket("e0", trajectory_id="t1"), ids, sampled(40))
        )
        context = ids + step.tokens.tolist()
        whole_pages = (len(context) - 1) // 16 * 16

        export = await source.stub.ExportPrefix(
            engine_pb2.ExportPrefixRequest(trajectory_id="t1"), timeout=T
        )
        assert int32s(export.token_ids.int32_le).tolist() == context
        assert export.stored_tokens == whole_pages, (
            "the pages' names are the engine's own, and all are written"
        )

        moved = await move("t1", source, target, storage_only=True)
        assert moved.prefix_tokens == len(context)
        assert moved.tokens_from_storage == whole_pages
        assert moved.tokens_from_cache == 0
        assert moved.tokens_prefilled == len(context) - whole_pages

        there = await run_step(
            target.stub,
            step_request(ticket("e1", trajectory_id="t1", turn=1), context, sampled(10)),
        )
        assert there.require_whole().cached_tokens == whole_pages

        unseen = engine_pb2.PrefetchPrefixRequest(
            request_id="n", trajectory_id="t2", token_ids=packed(prompt(3, 100)), storage_only=True
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await target.stub.PrefetchPrefix(unseen, timeout=T)
        assert error_of(raised.value).reason == "PREFIX_NOT_STORED"
        unseen.request_id, unseen.storage_only = "o", False
        computed = await target.stub.PrefetchPrefix(unseen, timeout=T)
        assert (computed.tokens_prefilled, computed.tokens_from_storage) == (100, 0)


async def test_the_folder_keeps_its_limit_and_the_prefix_that_was_used_last_still_moves(
    nats_url: str, two_engines: tuple[RealEngine, RealEngine]
) -> None:
    """e0 takes a trajectory's turn before and after each of four prompts, more together than the
    folder may hold. Result: the folder stays below its limit, and of the trajectory, but for its
    last token, all comes from storage."""
    first, second = two_engines
    storage = stored_in(first)
    async with (
        sidecar(nats_url, first.url, **storage) as source,
        sidecar(nats_url, second.url, "e1", **storage) as target,
    ):
        context = prompt(8, 400)
        for turn in range(5):
            order = step_request(ticket("e0", trajectory_id="t8", turn=turn), context, sampled(16))
            context = context + (await run_step(source.stub, order)).tokens.tolist()
            if turn < 4:
                other = step_request(
                    ticket("e0", trajectory_id=f"o{turn}"), prompt(20 + turn, 1200), sampled(1)
                )
                await run_step(source.stub, other)
                await source.stub.ExportPrefix(
                    engine_pb2.ExportPrefixRequest(trajectory_id=f"o{turn}"), timeout=T
                )
        assert (
            0.5 * KV_LIMIT_GB
            < sum(file.stat().st_size for file in first.kv.iterdir()) / 1e9
            < KV_LIMIT_GB
        )

        moved = await move("t8", source, target, storage_only=True)
        assert moved.tokens_from_storage == (len(context) - 1) // PAGE_TOKENS * PAGE_TOKENS


async def test_a_page_that_was_damaged_in_storage_is_computed_again(
    nats_url: str, two_engines: tuple[RealEngine, RealEngine]
) -> None:
    """The bytes of one page of twelve are zeroed before e1 fetches the prefix. Result: e1 reads the
    pages before it, computes the others, and goes on with the tokens that e0 goes on with."""
    first, second = two_engines
    storage = stored_in(first)
    greedy = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    async with (
        sidecar(nats_url, first.url, **storage) as source,
        sidecar(nats_url, second.url, "e1", **storage) as target,
    ):
        ids = prompt(5, 200)
        step = await run_step(
            source.stub, step_request(ticket("e0", trajectory_id="t5"), ids, sampled(8))
        )
        context = ids + step.tokens.tolist()
        exported = await source.stub.ExportPrefix(
            engine_pb2.ExportPrefixRequest(trajectory_id="t5"), timeout=T
        )
        assert exported.stored_tokens == 192
        damaged = list(page_keys(context, PAGE_TOKENS, exported.cache_salt))[5]
        (file,) = first.kv.glob(f"{damaged}*")
        content = file.read_bytes()
        file.write_bytes(content[:300] + bytes(len(content) - 300))

        request = engine_pb2.PrefetchPrefixRequest(
            request_id="d", trajectory_id="t5", token_ids=packed(context)
        )
        moved = await target.stub.PrefetchPrefix(request, timeout=T)
        assert (moved.tokens_from_storage, moved.tokens_from_cache) == (5 * PAGE_TOKENS, 0)
        assert moved.tokens_prefilled == len(context) - 5 * PAGE_TOKENS

        there = await run_step(
            target.stub, step_request(ticket("e1", trajectory_id="t5", turn=1), context, greedy)
        )
        here = await run_step(
            source.stub, step_request(ticket("e0", trajectory_id="t5", turn=1), context, greedy)
        )
        assert there.require_whole().cached_tokens == 192
        assert there.tokens == here.tokens
        await until(
            lambda: file.exists() and any(file.read_bytes()[300:]), what="the page is written again"
        )


async def test_a_storage_that_vanishes_is_missed_by_no_step_and_replaced_by_a_prefill(
    nats_url: str, two_engines: tuple[RealEngine, RealEngine]
) -> None:
    """The folder is removed while both engines run. Result: steps go on, a move by storage is
    refused, one by prefill computes everything; when the folder is back, KV moves through it again.
    """
    first, second = two_engines
    storage = stored_in(first)
    async with (
        sidecar(nats_url, first.url, **storage) as source,
        sidecar(nats_url, second.url, "e1", **storage) as target,
    ):
        shutil.rmtree(first.kv)
        try:
            step = await run_step(
                source.stub,
                step_request(ticket("e0", trajectory_id="t6"), prompt(6, 100), sampled(8)),
            )
            step.require_whole()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await move("t6", source, target, storage_only=True)
            assert error_of(raised.value).reason == "PREFIX_NOT_STORED"
            computed = await move("t6", source, target, storage_only=False)
            assert (computed.tokens_prefilled, computed.tokens_from_storage) == (108, 0)
        finally:
            first.kv.mkdir()
        await run_step(
            source.stub, step_request(ticket("e0", trajectory_id="t7"), prompt(7, 100), sampled(8))
        )
        assert (await move("t7", source, target, storage_only=False)).tokens_from_storage == 96


async def test_a_step_whose_engine_is_killed_goes_on_elsewhere(
    nats_url: str, two_engines: tuple[RealEngine, RealEngine]
) -> None:
    """SIGKILL in the middle of a step on e1. Result: the stream ends UNAVAILABLE ENGINE_LOST after
    every token that came; e0 goes on from them, and the parts make one whole output."""
    first, second = two_engines
    async with (
        sidecar(nats_url, first.url) as rescue,
        sidecar(nats_url, second.url, "e1") as doomed,
    ):
        ids = prompt(4, 80)
        received = StepResult()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for response in responses(
                doomed.stub, step_request(ticket("e1"), ids, sampled(500))
            ):
                received.take(response)
                if len(received.tokens) >= 20 and second.running:
                    assert any(file.is_socket() for file in second.temp_folder.iterdir())
                    second.kill()
        assert not second.temp_folder.exists()
        code, reason, _, _ = error_of(raised.value)
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
        count = len(received.tokens)
        assert count == len(received.logprobs) >= 20

        rest = await run_step(
            rescue.stub,
            step_request(ticket("e0"), ids, sampled(count + 15), resumed=received.tokens),
        )
        finished = rest.require_whole(resumed=count)
        assert finished.output_tokens == count + 15
        assert rest.offsets[0] == count
        await doomed.until_engine_is(False)
