"""Bad input at the sidecar, at least once an RPC: the code, and the field or the reason that names what is wrong."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from support.engine_steps import packed, run_step, step_request, ticket
from support.fake_sglang import CONTEXT, VOCAB, fake_sglang
from support.rpc import RpcError, error_of
from support.sidecar_in_process import Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams, TokenIds
from treadle.engine.v1 import engine_pb2

PROMPT = [5, 6, 7]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 5, **options})


async def refused(call: Awaitable[object]) -> RpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return error_of(raised.value)


BAD_STEPS: list[tuple[str, Callable[[], engine_pb2.GenerateRequest]]] = [
    ("prompt", lambda: step_request(ticket("e0"), [], sampling())),
    (
        "prompt.int32_le",
        lambda: engine_pb2.GenerateRequest(
            ticket=ticket("e0"), prompt=TokenIds(int32_le=b"\x01\x00\x00"), sampling=sampling()
        ),
    ),
    ("prompt.int32_le", lambda: step_request(ticket("e0"), [5, -1], sampling())),
    ("prompt.int32_le", lambda: step_request(ticket("e0"), [5, VOCAB], sampling())),
    ("prompt", lambda: step_request(ticket("e0"), [5] * CONTEXT, sampling())),
    ("resumed_output.int32_le", lambda: step_request(ticket("e0"), PROMPT, sampling(), resumed=[VOCAB])),
    ("sampling.max_new_tokens", lambda: step_request(ticket("e0"), PROMPT, SamplingParams())),
    ("sampling.max_new_tokens", lambda: step_request(ticket("e0"), PROMPT, sampling(max_new_tokens=-4))),
    ("sampling.temperature", lambda: step_request(ticket("e0"), PROMPT, sampling(temperature=-0.1))),
    ("sampling.temperature", lambda: step_request(ticket("e0"), PROMPT, sampling(temperature=float("nan")))),
    ("sampling.top_p", lambda: step_request(ticket("e0"), PROMPT, sampling(top_p=0.0))),
    ("sampling.top_k", lambda: step_request(ticket("e0"), PROMPT, sampling(top_k=0))),
    ("sampling.min_p", lambda: step_request(ticket("e0"), PROMPT, sampling(min_p=1.5))),
    ("sampling.min_p", lambda: step_request(ticket("e0"), PROMPT, sampling(min_p=0.1))),
    ("sampling.seed", lambda: step_request(ticket("e0"), PROMPT, sampling(seed=-1))),
    ("sampling.stop", lambda: step_request(ticket("e0"), PROMPT, sampling(stop=[""]))),
    ("sampling.stop_token_ids", lambda: step_request(ticket("e0"), PROMPT, sampling(stop_token_ids=[-3]))),
]


@pytest.mark.parametrize(
    ("field", "request_of"), BAD_STEPS, ids=[f"{n}-{field}" for n, (field, _) in enumerate(BAD_STEPS)]
)
async def test_a_bad_step_names_its_field_and_leaves_the_ticket_unused(
    nats_url: str, field: str, request_of: Callable[[], engine_pb2.GenerateRequest]
) -> None:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url) as side:
        request = request_of()
        code, _, fields, _ = await refused(run_step(side.stub, request))
        assert (code, fields) == (INVALID, (field,))
        good = step_request(request.ticket, PROMPT, sampling())
        (await run_step(side.stub, good)).require_whole()


async def test_a_ticket_is_for_one_engine_one_time_and_once(nats_url: str) -> None:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url) as side:
        elsewhere = await refused(run_step(side.stub, step_request(ticket("e1"), PROMPT, sampling())))
        assert (elsewhere.code, elsewhere.reason) == (PRECONDITION, "TICKET_WRONG_ENGINE")

        late = ticket("e0")
        late.expires_at.FromNanoseconds(round((time.time() - 1) * 1e9))
        expired = await refused(run_step(side.stub, step_request(late, PROMPT, sampling())))
        assert (expired.code, expired.reason) == (PRECONDITION, "TICKET_EXPIRED")

        undated = ticket("e0")
        undated.ClearField("expires_at")
        assert (await refused(run_step(side.stub, step_request(undated, PROMPT, sampling())))).fields == (
            "ticket.expires_at",
        )
        unnamed = ticket("e0")
        unnamed.ticket_id = ""
        assert (await refused(run_step(side.stub, step_request(unnamed, PROMPT, sampling())))).fields == (
            "ticket.ticket_id",
        )
        mine = ticket("e0")
        await run_step(side.stub, step_request(mine, PROMPT, sampling()))
        used = await refused(run_step(side.stub, step_request(mine, PROMPT, sampling())))
        assert (used.code, used.reason) == (PRECONDITION, "TICKET_USED")


async def test_a_full_line_says_when_to_come_again_and_the_ticket_stays_good(nats_url: str) -> None:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url, slots=1, queue_limit=1) as side:
        await side.stub.Pause(engine_pb2.PauseRequest(request_id="p", mode=engine_pb2.PAUSE_MODE_KEEP), timeout=10)
        first = side.stub.Generate(step_request(ticket("e0"), PROMPT, sampling()), timeout=60)
        await side.until_waiting(1)
        mine = ticket("e0", priority=9.0)
        full = await refused(run_step(side.stub, step_request(mine, PROMPT, sampling())))
        assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert full.retry_after_s is not None
        assert full.retry_after_s > 0
        await side.stub.Resume(engine_pb2.ResumeRequest(request_id="r"), timeout=10)
        assert [r.WhichOneof("event") async for r in first][-1] == "finished"
        (await run_step(side.stub, step_request(mine, PROMPT, sampling()))).require_whole()


def address_of(where: str, trajectory_id: str = "t") -> engine_pb2.PrefixRef:
    return engine_pb2.PrefixRef(engine_address=where, trajectory_id=trajectory_id)


def prefetch(**fields: Any) -> engine_pb2.PrefetchPrefixRequest:
    if "from_" in fields:
        fields["from"] = fields.pop("from_")
    return engine_pb2.PrefetchPrefixRequest(**{"request_id": "q", "trajectory_id": "t", **fields})


Call = Callable[[Sidecar], Awaitable[object]]
T = 10.0
BAD_CALLS: dict[str, tuple[Call, str]] = {
    "abort without a ticket": (
        lambda s: s.stub.Abort(engine_pb2.AbortRequest(request_id="q"), timeout=T),
        "ticket_id",
    ),
    "abort without a request id": (
        lambda s: s.stub.Abort(engine_pb2.AbortRequest(ticket_id="t"), timeout=T),
        "request_id",
    ),
    "no changes": (
        lambda s: s.stub.Reprioritize(engine_pb2.ReprioritizeRequest(request_id="q"), timeout=T),
        "changes",
    ),
    "a priority that is no number": (
        lambda s: s.stub.Reprioritize(
            engine_pb2.ReprioritizeRequest(
                request_id="q", changes=[engine_pb2.PriorityChange(ticket_id="t", priority=float("inf"))]
            ),
            timeout=T,
        ),
        "changes[0].priority",
    ),
    "pause without a mode": (
        lambda s: s.stub.Pause(engine_pb2.PauseRequest(request_id="q"), timeout=T),
        "mode",
    ),
    "resume without a request id": (
        lambda s: s.stub.Resume(engine_pb2.ResumeRequest(), timeout=T),
        "request_id",
    ),
    "weights without a version": (
        lambda s: s.stub.UpdateWeights(engine_pb2.UpdateWeightsRequest(request_id="q", model_path="/m"), timeout=T),
        "weight_version",
    ),
    "weights without a path": (
        lambda s: s.stub.UpdateWeights(engine_pb2.UpdateWeightsRequest(request_id="q", weight_version="v2"), timeout=T),
        "model_path",
    ),
    "weights that are there already": (
        lambda s: s.stub.UpdateWeights(
            engine_pb2.UpdateWeightsRequest(request_id="q", weight_version="default", model_path="/m"), timeout=T
        ),
        "weight_version",
    ),
    "prefetch of nothing": (lambda s: s.stub.PrefetchPrefix(prefetch(), timeout=T), "prefix"),
    "prefetch for nobody": (
        lambda s: s.stub.PrefetchPrefix(prefetch(trajectory_id="", token_ids=packed([5])), timeout=T),
        "trajectory_id",
    ),
    "an empty prefix": (
        lambda s: s.stub.PrefetchPrefix(prefetch(token_ids=TokenIds()), timeout=T),
        "token_ids",
    ),
    "a prefix outside the vocabulary": (
        lambda s: s.stub.PrefetchPrefix(prefetch(token_ids=packed([VOCAB])), timeout=T),
        "token_ids.int32_le",
    ),
    "a prefix that is too long": (
        lambda s: s.stub.PrefetchPrefix(prefetch(token_ids=packed([5] * CONTEXT)), timeout=T),
        "token_ids",
    ),
    "a source without an address": (
        lambda s: s.stub.PrefetchPrefix(prefetch(from_=address_of("")), timeout=T),
        "from.engine_address",
    ),
    "a source without a trajectory": (
        lambda s: s.stub.PrefetchPrefix(prefetch(from_=address_of("127.0.0.1:1", "")), timeout=T),
        "from.trajectory_id",
    ),
    "export without a trajectory": (
        lambda s: s.stub.ExportPrefix(engine_pb2.ExportPrefixRequest(), timeout=T),
        "trajectory_id",
    ),
    "release without a trajectory": (
        lambda s: s.stub.ReleasePrefix(engine_pb2.ReleasePrefixRequest(request_id="q"), timeout=T),
        "trajectory_id",
    ),
    "get load without a deadline": (lambda s: s.stub.GetLoad(engine_pb2.GetLoadRequest()), "(deadline)"),
    "engine info without a deadline": (
        lambda s: s.stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest()),
        "(deadline)",
    ),
}


@pytest.fixture
async def side(nats_url: str) -> Any:
    async with fake_sglang() as engine, sidecar(nats_url, engine.url) as running:
        yield running


@pytest.mark.parametrize("name", BAD_CALLS)
async def test_a_bad_call_names_its_field(side: Sidecar, name: str) -> None:
    call, field = BAD_CALLS[name]
    code, _, fields, _ = await refused(call(side))
    assert (code, fields) == (INVALID, (field,))


async def test_a_watch_that_is_too_fast_names_its_interval(side: Sidecar) -> None:
    request = engine_pb2.WatchLoadRequest()
    request.interval.FromMilliseconds(10)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in side.stub.WatchLoad(request, timeout=T):
            pass
    assert error_of(raised.value).fields == ("interval",)


async def test_what_is_not_here_is_not_found(side: Sidecar) -> None:
    step = await refused(side.stub.Abort(engine_pb2.AbortRequest(request_id="q", ticket_id="gone"), timeout=T))
    assert (step.code, step.reason) == (grpc.StatusCode.NOT_FOUND, "STEP_NOT_FOUND")
    prefix = await refused(side.stub.ExportPrefix(engine_pb2.ExportPrefixRequest(trajectory_id="gone"), timeout=T))
    assert (prefix.code, prefix.reason) == (grpc.StatusCode.NOT_FOUND, "PREFIX_NOT_FOUND")
    there = await refused(side.stub.PrefetchPrefix(prefetch(from_=address_of(side.address, "gone")), timeout=T))
    assert (there.code, there.reason) == (grpc.StatusCode.NOT_FOUND, "PREFIX_NOT_FOUND")


async def test_a_source_that_is_away_is_unavailable(side: Sidecar) -> None:
    away = await refused(side.stub.PrefetchPrefix(prefetch(from_=address_of("127.0.0.1:9")), timeout=T))
    assert (away.code, away.reason) == (grpc.StatusCode.UNAVAILABLE, "SOURCE_UNAVAILABLE")


async def test_forgetting_what_is_not_here_is_fine(side: Sidecar) -> None:
    await side.stub.ReleasePrefix(engine_pb2.ReleasePrefixRequest(request_id="q", trajectory_id="gone"), timeout=T)
