"""Weights that a trainer pushes in parts, and memory that it takes, at a real sidecar before fake
engines."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from support.conditions import until, until_said
from support.engine_steps import Step, packed, run_step, step_request, ticket
from support.facts import hear
from support.fake_sglang import FakeSglang, expected
from support.rpc import refused
from support.sidecar_in_process import Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2 as pb

PROMPT = list(range(10, 74))
T = 20.0
KEEP, ABORT = pb.PAUSE_MODE_KEEP, pb.PAUSE_MODE_ABORT
Answer = TypeVar("Answer")


@pytest.fixture
def push_timeout_s() -> float:
    """Of the sidecar."""
    return 60.0


@pytest.fixture
async def side(nats_url: str, engine: FakeSglang, push_timeout_s: float) -> AsyncIterator[Sidecar]:
    engine.arguments["enable_memory_saver"] = True
    async with sidecar(nats_url, engine.url, slots=2, push_timeout_s=push_timeout_s) as side:
        yield side


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=0.0)


async def push(
    side: Sidecar,
    part: int,
    *,
    version: str = "v2",
    push_id: str = "a",
    last: bool = False,
    **fields: Any,
) -> pb.PushWeightsResponse:
    """One part, by the way "distributed" unless `fields` say another one."""
    body = fields or {
        "distributed": json.dumps({"names": [f"w{part}"], "weight_version": "not this"}).encode()
    }
    request = pb.PushWeightsRequest(
        request_id=f"{push_id}-{version}-{part}",
        weight_version=version,
        push_id=push_id,
        part=part,
        last=last,
        **body,
    )
    return await side.stub.PushWeights(request, timeout=T)


async def sleep(side: Sidecar, *tags: str, mode: pb.PauseMode.ValueType = KEEP) -> pb.SleepResponse:
    request = pb.SleepRequest(request_id=uuid.uuid4().hex, mode=mode, tags=tags)
    return await side.stub.Sleep(request, timeout=T)


async def wake(side: Sidecar, *tags: str) -> list[str]:
    """What still sleeps."""
    answer = await side.stub.Wake(pb.WakeRequest(request_id=uuid.uuid4().hex, tags=tags), timeout=T)
    return list(answer.asleep_tags)


async def steps_under_way(engine: FakeSglang, side: Sidecar, count: int, tokens: int) -> list[Step]:
    """Steps that have some tokens. The others come slowly, so that the steps still run when the
    next call arrives."""
    steps = [
        Step(side.stub, step_request(ticket("e0"), [*PROMPT, index], sampling(tokens)))
        for index in range(count)
    ]
    await until(lambda: sum(len(step.seen.tokens) > 5 for step in steps) >= min(count, 2))
    engine.token_s = 0.05
    return steps


async def held(engine: FakeSglang, call: Awaitable[Answer]) -> Answer:
    """The answer of a call that holds the steps. After it, tokens come quickly again."""
    answer = await call
    engine.token_s = 0.002
    return answer


async def until_version(side: Sidecar, version: str) -> None:
    """Returns once the sidecar reports it."""
    await until_said(side.load, lambda load: load.weight_version == version)


async def test_steps_wait_from_the_first_part_to_the_last_and_go_on_under_the_new_version(
    engine: FakeSglang, side: Sidecar
) -> None:
    """Three parts and an end, while two steps run and one comes. Result: all parts reach the engine
    as they are, the version is named once all are there, and every token has the version that
    sampled it."""
    facts = await hear(side.runtime.bus, "weights_updated")
    steps = await steps_under_way(engine, side, count=2, tokens=150)
    assert (await held(engine, push(side, 0))).previous_weight_version == "default"
    before = [len(step.seen.tokens) for step in steps]
    steps += [Step(side.stub, step_request(ticket("e0"), [*PROMPT, 2], sampling(20)))]
    await side.until_waiting(3)
    await push(
        side, 1, tensor=b'{"serialized_named_tensors": ["AA=="], "load_format": "flattened_bucket"}'
    )
    await push(side, 2)
    load = await side.load()
    assert (load.weight_version, load.paused, load.engine_healthy) == ("incomplete-v2", True, True)
    assert [len(step.seen.tokens) for step in steps] == [*before, 0]
    assert not facts
    answer = await push(side, 3, last=True)
    assert answer.push_time.ToNanoseconds() > 0

    for index, step in enumerate(steps):
        result = await step
        finished = result.require_whole()
        assert [span.weight_version for span in finished.version_spans] == (
            ["default", "v2"] if index < 2 else ["v2"]
        )
        assert result.tokens.tolist() == expected([*PROMPT, index], 150 if index < 2 else 20)
        assert finished.resumed_cached_tokens == 0
    assert engine.called == [
        *("name incomplete-v2", "begin", "distributed", "tensor", "distributed", "distributed"),
        *("end", "name v2", "flush"),
    ]
    assert engine.pushes[0] == ("distributed", {"names": ["w0"], "flush_cache": False})
    assert engine.pushes[1][1]["load_format"] == "flattened_bucket"
    await until(lambda: [fact.weight_version for fact in facts] == ["v2"])
    assert (await side.load()).weight_version == "v2"


async def test_a_push_by_ipc_ends_with_a_request_without_a_body(
    engine: FakeSglang, side: Sidecar
) -> None:
    """SGLang makes ready by itself what it takes by IPC: a session around it would pack the weights
    twice."""
    await push(side, 0, ipc=b'{"zmq_handles": {}}')
    end = pb.PushWeightsRequest(
        request_id="end", weight_version="v2", push_id="a", part=1, last=True
    )
    await side.stub.PushWeights(end, timeout=T)
    assert engine.called == ["name incomplete-v2", "ipc", "name v2", "flush"]
    (await run_step(side.stub, step_request(ticket("e0"), PROMPT, sampling(3)))).require_whole()


async def test_after_a_part_that_failed_no_step_runs_until_a_push_is_whole(
    engine: FakeSglang, side: Sidecar
) -> None:
    """Result: the parts after it are refused, and a push that is begun anew brings the steps
    back."""
    steps = await steps_under_way(engine, side, count=2, tokens=100)
    await held(engine, push(side, 0))
    engine.refuse_push = True
    with refused("WEIGHTS_NOT_PUSHED", grpc.StatusCode.FAILED_PRECONDITION):
        await push(side, 1)
    engine.refuse_push = False
    for part in (1, 2):
        with refused("PUSH_OUT_OF_ORDER"):
            await push(side, part, last=True)
    sent = len(engine.requests)
    await side.stub.Resume(pb.ResumeRequest(request_id="r"), timeout=T)
    load = await side.load()
    assert (load.weight_version, load.paused, load.waiting_steps) == ("incomplete-v2", True, 2)
    info = (await side.stub.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=T)).info
    assert info.weight_version == "incomplete-v2"
    with refused("ENGINE_PAUSED"):
        await side.stub.PrefetchPrefix(
            pb.PrefetchPrefixRequest(request_id="p", trajectory_id="t", token_ids=packed(PROMPT)),
            timeout=T,
        )
    assert len(engine.requests) == sent

    await push(side, 0, push_id="b")
    await push(side, 1, push_id="b", last=True)
    for step in steps:
        assert [span.weight_version for span in (await step).require_whole().version_spans] == [
            "default",
            "v2",
        ]
    assert not engine.session


@pytest.mark.parametrize("push_timeout_s", [6.0])
async def test_weights_from_disk_bring_back_an_engine_whose_push_was_given_up(
    engine: FakeSglang, side: Sidecar, push_timeout_s: float
) -> None:
    """The trainer dies between two parts. Result: after PUSH_TIMEOUT_S another push may begin, the
    engine runs no step, and goes on with weights that it loads."""
    steps = await steps_under_way(engine, side, count=1, tokens=100)
    await held(engine, push(side, 0))
    load = pb.UpdateWeightsRequest(request_id="u", weight_version="v1", model_path="/m/v1")
    with refused("PUSH_UNDER_WAY"):
        await side.stub.UpdateWeights(load, timeout=T)
    with refused("PUSH_UNDER_WAY"):
        await push(side, 0, version="v3", push_id="b")
    await asyncio.sleep(push_timeout_s + 0.2)
    with refused("PUSH_OUT_OF_ORDER"):
        await push(side, 1, last=True)
    assert (await side.load()).weight_version == "incomplete-v2"
    await side.stub.UpdateWeights(load, timeout=T)
    assert [span.weight_version for span in (await steps[0]).require_whole().version_spans] == [
        "default",
        "v1",
    ]
    assert engine.called[-2:] == ["end", "flush"], (
        "what was unpacked for the push is packed again before the load"
    )


async def test_of_two_trainers_one_pushes_and_the_other_hears_which_version(
    engine: FakeSglang, side: Sidecar
) -> None:
    await push(side, 0)
    for version, part in (("v3", 0), ("v3", 1), ("v2", 1)):
        with pytest.raises(grpc.aio.AioRpcError, match="'v2' are being pushed"):
            await push(side, part, version=version, push_id="b")
    with pytest.raises(grpc.aio.AioRpcError, match="part 1 is due"):
        await push(side, 2)
    await push(side, 1, last=True)
    assert (await side.load()).weight_version == "v2"


async def test_a_trainer_that_was_started_again_pushes_the_same_version_at_once(
    engine: FakeSglang, side: Sidecar
) -> None:
    """Result: its parts count, and no part of its former process can come between them."""
    await push(side, 0)
    await push(side, 1)
    await push(side, 0, push_id="b")
    with refused("PUSH_UNDER_WAY"):
        await push(side, 2)
    await push(side, 1, push_id="b", last=True)
    assert engine.called.count("begin") == 2, "the weights were packed and unpacked again"
    assert ((await side.load()).weight_version, engine.session) == ("v2", False)


async def test_a_part_is_taken_once_however_often_it_is_sent(
    engine: FakeSglang, side: Sidecar
) -> None:
    """Its caller goes away and asks again, with the same request_id and with another one, while the
    engine takes it and later. Result: one push, and the same answer."""
    engine.push_s = 3.0
    request = pb.PushWeightsRequest(
        request_id="q", weight_version="v2", push_id="a", part=0, last=True, distributed=b"{}"
    )
    cut = side.stub.PushWeights(request, timeout=T)
    await until(lambda: engine.pushing)
    cut.cancel()
    assert (await side.load()).paused and engine.pushing
    first = await side.stub.PushWeights(request, timeout=T)
    again = pb.PushWeightsRequest()
    again.CopyFrom(request)
    again.request_id = "q2"
    assert await side.stub.PushWeights(again, timeout=T) == first
    assert len(engine.pushes) == 1
    with refused("INVALID_ARGUMENT"):
        await push(side, 0, push_id="b")  # the engine serves it


@pytest.mark.parametrize("name", ["incomplete-v2", "asleep-kv_cache+weights:incomplete-v2"])
async def test_a_sidecar_that_restarts_runs_nothing_on_parts_of_weights(
    nats_url: str, engine: FakeSglang, name: str
) -> None:
    """Between two parts, or while a trainer has the memory. Result: the next sidecar knows it from
    the engine, runs no step, refuses the rest of the push, and takes a whole one."""
    engine.arguments["enable_memory_saver"] = True
    async with sidecar(nats_url, engine.url) as first:
        if "asleep" not in name:
            await push(first, 0)
        else:
            await sleep(first, "weights", "kv_cache")
            engine.weight_version = name
    async with sidecar(nats_url, engine.url) as side:
        load = await side.load()
        assert (load.weight_version, load.paused) == ("incomplete-v2", True)
        step = Step(side.stub, step_request(ticket("e0"), PROMPT, sampling(10)))
        await side.until_waiting(1)
        with refused("PUSH_OUT_OF_ORDER"):
            await push(side, 1, last=True)
        await wake(side)
        await push(side, 0, push_id="b", last=True)
        assert [span.weight_version for span in (await step).require_whole().version_spans] == [
            "v2"
        ]
        assert not engine.asleep and not engine.session


async def test_a_push_does_not_go_on_with_an_engine_that_has_restarted(
    engine: FakeSglang, side: Sidecar
) -> None:
    """The engine dies between two parts and is back at once with the weights that it was launched
    with. Result: the second part is refused, since the first is gone, and steps run under the
    launch weights."""
    await push(side, 0)
    await engine.stop()
    await engine.start()
    await side.until_engine_is(True)
    with refused("PUSH_OUT_OF_ORDER"):
        await push(side, 1, last=True)
    await until_version(side, "default")
    result = await run_step(side.stub, step_request(ticket("e0"), PROMPT, sampling(10)))
    assert [span.weight_version for span in result.require_whole().version_spans] == ["default"]


async def test_an_engine_joins_the_trainers_group_and_leaves_it(
    engine: FakeSglang, side: Sidecar
) -> None:
    join = pb.JoinWeightsGroupRequest(
        request_id="j",
        group_name="g",
        master_address="10.0.0.1:29500",
        rank_offset=1,
        world_size=3,
        backend="gloo",
    )
    await side.stub.JoinWeightsGroup(join, timeout=T)
    assert engine.groups == [
        {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
        | {"group_name": "g", "backend": "gloo"}
    ]
    await side.stub.LeaveWeightsGroup(
        pb.LeaveWeightsGroupRequest(request_id="l", group_name="g"), timeout=T
    )
    with refused("GROUP_NOT_LEFT", grpc.StatusCode.FAILED_PRECONDITION):
        await side.stub.LeaveWeightsGroup(
            pb.LeaveWeightsGroupRequest(request_id="m", group_name="g"), timeout=T
        )
    join.request_id, join.backend = "k", "none"
    with refused("GROUP_NOT_JOINED", grpc.StatusCode.FAILED_PRECONDITION):
        await side.stub.JoinWeightsGroup(join, timeout=T)


async def test_a_colocated_trainer_takes_the_memory_pushes_and_gives_it_back(
    engine: FakeSglang, side: Sidecar
) -> None:
    """Sleep, wake the weights, push, wake the rest, while a step waits. Result: SGLang is asked in
    this order, the sleeping engine is asked for no token and not suspected, and the step goes on
    under the new version."""
    steps = await steps_under_way(engine, side, count=1, tokens=100)
    answer = await held(engine, sleep(side))
    assert (answer.aborted_steps, answer.kept_steps) == (0, 1)
    assert list(answer.asleep_tags) == ["cuda_graph", "kv_cache", "weights"]
    asked, probes = len(engine.requests), engine.probes
    load = await side.load()
    assert (load.weight_version, load.paused, list(load.asleep_tags)) == (
        *("incomplete-default", True),
        list(answer.asleep_tags),
    )
    with refused("ENGINE_ASLEEP"):
        await push(side, 0)
    await side.stub.Resume(pb.ResumeRequest(request_id="r"), timeout=T)
    await asyncio.sleep(11.0)  # longer than an idle engine is left alone
    assert (len(engine.requests), engine.probes) == (asked, probes)
    assert (await side.load()).engine_healthy

    assert await wake(side, "weights") == ["cuda_graph", "kv_cache"]
    await push(side, 0, last=True)
    load = await side.load()
    assert (load.weight_version, load.paused) == ("v2", True)
    assert await wake(side) == []
    assert [span.weight_version for span in (await steps[0]).require_whole().version_spans] == [
        "default",
        "v2",
    ]
    assert engine.called == [
        *(
            "flush",
            "name asleep-cuda_graph+kv_cache+weights:incomplete-default",
            "release cuda_graph+kv_cache+weights",
        ),
        *("resume weights", "name asleep-cuda_graph+kv_cache:incomplete-default"),
        *("name asleep-cuda_graph+kv_cache:incomplete-v2", "begin", "distributed", "end"),
        *("name asleep-cuda_graph+kv_cache:v2", "flush", "resume cuda_graph+kv_cache", "name v2"),
    ]


async def test_weights_of_which_the_host_keeps_a_copy_are_whole_when_they_wake(
    nats_url: str, engine: FakeSglang
) -> None:
    """Sleep and wake are asked for twice, and for what is not asleep. Result: SGLang, which would
    die of it, is asked once; steps that were aborted have ended, and others run on the same
    weights."""
    engine.arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    async with sidecar(nats_url, engine.url, slots=2) as side:
        steps = await steps_under_way(engine, side, count=2, tokens=1000)
        assert (await held(engine, sleep(side, "weights", mode=ABORT))).aborted_steps == 2
        assert list((await sleep(side, "weights", "kv_cache")).asleep_tags) == [
            "kv_cache",
            "weights",
        ]
        assert (await side.load()).weight_version == "default"
        for step in steps:
            assert (await step).require_whole().reason == pb.FINISH_REASON_ABORTED
        assert await wake(side, "cuda_graph", "kv_cache") == ["weights"]
        assert await wake(side) == await wake(side) == []
        assert [call for call in engine.called if call.startswith("re")] == [
            *("release weights", "release kv_cache", "resume kv_cache", "resume weights")
        ]
        (await run_step(side.stub, step_request(ticket("e0"), PROMPT, sampling(3)))).require_whole()


async def test_an_engine_without_a_memory_saver_is_not_put_to_sleep(
    nats_url: str, engine: FakeSglang
) -> None:
    """SGLang would answer that all is well, and give nothing away."""
    async with sidecar(nats_url, engine.url) as side:
        with pytest.raises(grpc.aio.AioRpcError, match="started without --enable-memory-saver"):
            await sleep(side)
        assert not engine.called and not (await side.load()).paused


async def test_an_engine_is_not_put_to_sleep_in_the_middle_of_a_push(
    engine: FakeSglang, side: Sidecar
) -> None:
    await push(side, 0)
    with refused("PUSH_UNDER_WAY"):
        await sleep(side)
    await push(side, 1, last=True)
    assert (await side.load()).weight_version == "v2"
