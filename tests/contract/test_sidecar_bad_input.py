"""Bad input at the sidecar, at least once an RPC: the code, and the field or the reason that names
what is wrong."""

from __future__ import annotations

import time
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from support.engine_steps import packed, run_step, step_request, ticket
from support.fake_sglang import CONTEXT, VOCAB, fake_sglang
from support.rpc import refusal_of, refused
from support.sidecar_in_process import Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams, TokenIds
from treadle.engine.v1 import engine_pb2 as pb

PROMPT = [5, 6, 7]
T = 10.0
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
NOT_FOUND = grpc.StatusCode.NOT_FOUND


@pytest.fixture
async def side(nats_url: str) -> Any:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url) as running:
        yield running


def step(
    prompt: list[int] = PROMPT, resumed: list[int] | None = None, **options: Any
) -> pb.GenerateRequest:
    sampling = SamplingParams(**{"max_new_tokens": 5, **options})
    return step_request(ticket("e0"), prompt, sampling, resumed or [])


TORN = pb.GenerateRequest(
    prompt=TokenIds(int32_le=b"\x01\x00\x00"), sampling=SamplingParams(max_new_tokens=5)
)
SLOW = pb.GenerateRequest(
    prompt=step().prompt, sampling=step().sampling, token_interval=Duration(seconds=11)
)
BAD_STEPS = [
    (step(prompt=[]), "prompt"),
    (step(prompt=[5] * CONTEXT), "prompt"),
    (TORN, "prompt.int32_le"),
    (step(prompt=[5, -1]), "prompt.int32_le"),
    (step(prompt=[5, VOCAB]), "prompt.int32_le"),
    (step(resumed=[VOCAB]), "resumed_output.int32_le"),
    (step(max_new_tokens=0), "sampling.max_new_tokens"),
    (step(max_new_tokens=-4), "sampling.max_new_tokens"),
    (step(temperature=-0.1), "sampling.temperature"),
    (step(temperature=float("nan")), "sampling.temperature"),
    (step(top_p=0.0), "sampling.top_p"),
    (step(top_k=0), "sampling.top_k"),
    (step(min_p=1.5), "sampling.min_p"),
    (step(min_p=0.1), "sampling.min_p"),
    (step(seed=-1), "sampling.seed"),
    (step(stop=[""]), "sampling.stop"),
    (step(stop_token_ids=[-3]), "sampling.stop_token_ids"),
    (SLOW, "token_interval"),
]


async def test_a_bad_step_names_its_field_and_leaves_the_ticket_unused(side: Sidecar) -> None:
    for request, field in BAD_STEPS:
        request.ticket.CopyFrom(ticket("e0"))
        assert (await refusal_of(run_step(side.stub, request)))[:3] == (
            INVALID,
            "INVALID_ARGUMENT",
            (field,),
        ), request
        good = step()
        good.ticket.CopyFrom(request.ticket)
        (await run_step(side.stub, good)).require_whole()


async def test_a_ticket_is_for_one_engine_one_time_and_once(side: Sidecar) -> None:
    used = step()
    await run_step(side.stub, used)
    late, elsewhere = step(), step_request(ticket("e1"), PROMPT, SamplingParams(max_new_tokens=5))
    late.ticket.expires_at.FromNanoseconds(round((time.time() - 1) * 1e9))
    for request, reason, code in (
        (used, "TICKET_USED", PRECONDITION),
        (late, "TICKET_EXPIRED", grpc.StatusCode.PERMISSION_DENIED),
        (elsewhere, "TICKET_WRONG_ENGINE", PRECONDITION),
    ):
        with refused(reason, code):
            await run_step(side.stub, request)
    for field in ("expires_at", "ticket_id"):
        without = step()
        without.ticket.ClearField(field)
        assert (await refusal_of(run_step(side.stub, without))).fields == (f"ticket.{field}",)


async def test_a_full_queue_says_when_to_come_again_and_the_ticket_stays_good(
    nats_url: str,
) -> None:
    async with (
        fake_sglang() as engine,
        sidecar(nats_url, engine.url, slots=1, queue_limit=1) as side,
    ):
        await side.stub.Pause(pb.PauseRequest(request_id="p", mode=pb.PAUSE_MODE_KEEP), timeout=T)
        first = side.stub.Generate(step(), timeout=60)
        await side.until_waiting(1)
        mine = step()
        full = await refusal_of(run_step(side.stub, mine))
        assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert full.retry_after_s
        await side.stub.Resume(pb.ResumeRequest(request_id="r"), timeout=T)
        assert [r.WhichOneof("event") async for r in first][-1] == "finished"
        (await run_step(side.stub, mine)).require_whole()


def prefetch(source: tuple[str, str] | None = None, **fields: Any) -> pb.PrefetchPrefixRequest:
    """source: another sidecar's address and the trajectory there."""
    if source is not None:
        fields["from"] = pb.PrefixRef(engine_address=source[0], trajectory_id=source[1])
    return pb.PrefetchPrefixRequest(**{"request_id": "q", "trajectory_id": "t", **fields})


def push(**fields: Any) -> pb.PushWeightsRequest:
    """Without `fields`, a good one."""
    given = {"request_id": "q", "weight_version": "v2", "push_id": "p", "tensor": b"{}", **fields}
    return pb.PushWeightsRequest(
        **{name: value for name, value in given.items() if value is not None}
    )


def join(**fields: Any) -> pb.JoinWeightsGroupRequest:
    """Without `fields`, a good one."""
    given = {"group_name": "g", "master_address": "h:1", "rank_offset": 1, "world_size": 2}
    return pb.JoinWeightsGroupRequest(request_id="q", **{**given, **fields})


TOO_FAST = pb.WatchLoadRequest(interval=Duration(nanos=10_000_000))
NO_NUMBER = pb.PriorityChange(ticket_id="t", priority=float("inf"))
BAD_CALLS: list[tuple[Any, str]] = [
    (pb.AbortRequest(request_id="q"), "ticket_id"),
    (pb.AbortRequest(ticket_id="t"), "request_id"),
    (pb.ReprioritizeRequest(request_id="q"), "changes"),
    (pb.ReprioritizeRequest(request_id="q", changes=[NO_NUMBER]), "changes[0].priority"),
    (pb.PauseRequest(request_id="q"), "mode"),
    (pb.ResumeRequest(), "request_id"),
    (pb.UpdateWeightsRequest(request_id="q", model_path="/m"), "weight_version"),
    (pb.UpdateWeightsRequest(request_id="q", weight_version="v2"), "model_path"),
    (
        pb.UpdateWeightsRequest(request_id="q", weight_version="default", model_path="/m"),
        "weight_version",
    ),
    (
        pb.UpdateWeightsRequest(request_id="q", weight_version="asleep-v2", model_path="/m"),
        "weight_version",
    ),
    (push(request_id=""), "request_id"),
    (push(weight_version=""), "weight_version"),
    (push(weight_version="default"), "weight_version"),
    (push(weight_version="incomplete-v2"), "weight_version"),
    (push(push_id=""), "push_id"),
    (push(part=-1), "part"),
    (push(tensor=None), "body"),
    (push(tensor=b"{"), "tensor"),
    (push(tensor=None, ipc=b"[]"), "ipc"),
    (join(group_name=""), "group_name"),
    (join(master_address="h"), "master_address"),
    (join(rank_offset=0), "rank_offset"),
    (join(rank_offset=2), "rank_offset"),
    (pb.LeaveWeightsGroupRequest(request_id="q"), "group_name"),
    (pb.SleepRequest(request_id="q"), "mode"),
    (pb.SleepRequest(request_id="q", mode=pb.PAUSE_MODE_KEEP, tags=["cpu"]), "tags"),
    (pb.WakeRequest(request_id="q", tags=["cpu"]), "tags"),
    (prefetch(), "prefix"),
    (prefetch(trajectory_id="", token_ids=packed([5])), "trajectory_id"),
    (prefetch(token_ids=TokenIds()), "token_ids"),
    (prefetch(token_ids=packed([VOCAB])), "token_ids.int32_le"),
    (prefetch(token_ids=packed([5] * CONTEXT)), "token_ids"),
    (prefetch(source=("", "t")), "from.engine_address"),
    (prefetch(source=("127.0.0.1:1", "")), "from.trajectory_id"),
    (pb.ExportPrefixRequest(), "trajectory_id"),
    (pb.ReleasePrefixRequest(request_id="q"), "trajectory_id"),
    (TOO_FAST, "interval"),
]


async def call(side: Sidecar, request: Any, timeout_s: float | None = T) -> None:
    """Send a request to its RPC."""
    answer = getattr(side.stub, type(request).__name__.removesuffix("Request"))(
        request, timeout=timeout_s
    )
    if isinstance(answer, grpc.aio.UnaryStreamCall):
        answer = answer.read()
    await answer


def test_every_rpc_has_a_case() -> None:
    requests = {type(request) for request, _ in BAD_CALLS} | {pb.GenerateRequest, pb.GetLoadRequest}
    named = {kind.__name__.removesuffix("Request") for kind in (*requests, pb.GetEngineInfoRequest)}
    assert named == {
        method.name for method in pb.DESCRIPTOR.services_by_name["EngineService"].methods
    }


async def test_a_bad_call_names_its_field(side: Sidecar) -> None:
    for request, field in BAD_CALLS:
        assert (await refusal_of(call(side, request)))[:3] == (
            INVALID,
            "INVALID_ARGUMENT",
            (field,),
        ), request
    for question in (pb.GetLoadRequest(), pb.GetEngineInfoRequest()):
        error = await refusal_of(call(side, question, timeout_s=None))
        assert (error.code, error.fields) == (INVALID, ("(deadline)",))


async def test_a_step_or_a_prefix_that_is_not_here_is_not_found_and_may_be_released(
    side: Sidecar,
) -> None:
    with refused("STEP_NOT_FOUND", NOT_FOUND):
        await call(side, pb.AbortRequest(request_id="q", ticket_id="gone"))
    with refused("PREFIX_NOT_FOUND", NOT_FOUND):
        await call(side, pb.ExportPrefixRequest(trajectory_id="gone"))
    with refused("PREFIX_NOT_FOUND", NOT_FOUND):
        await call(side, prefetch(source=(side.address, "gone")))
    with refused("SOURCE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
        await call(side, prefetch(source=("127.0.0.1:9", "t")))
    await call(side, pb.ReleasePrefixRequest(request_id="q", trajectory_id="gone"))
