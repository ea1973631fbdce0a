"""Bad input to every RPC of PredictorService: the right code, naming the field."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from support.rpc import RpcError, refusal_of
from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle_predictor.config import PredictorSettings
from treadle_predictor.wire import wire
from treadle_runtime.server import serving

Stub: TypeAlias = "predictor_pb2_grpc.PredictorServiceAsyncStub"
CALL_S = 10.0
INVALID = grpc.StatusCode.INVALID_ARGUMENT
GOOD: dict[str, object] = {"trajectory_id": "t", "prompt_id": "p"}
BAD_QUERIES: list[tuple[dict[str, object], str]] = [
    ({"trajectory_id": ""}, "trajectory_id"),
    ({"trajectory_id": "t/1"}, "trajectory_id"),
    ({"prompt_id": ""}, "prompt_id"),
    ({"prompt_id": "p" * 257}, "prompt_id"),
    ({"sample": -1}, "sample"),
    ({"turn": -1}, "turn"),
    ({"gen_tokens": -1}, "gen_tokens"),
    ({"context_tokens": -1}, "context_tokens"),
    ({"prompt_tokens": -1}, "prompt_tokens"),
    ({"max_total_tokens": -1}, "max_total_tokens"),
    ({"context": {"int32_le": b"abc"}}, "context.int32_le"),
]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(shared_nats_url: str) -> AsyncIterator[Stub]:
    settings = PredictorSettings(listen="127.0.0.1:0", nats_url=shared_nats_url)
    async with (
        serving(settings, wire) as served,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        yield predictor_pb2_grpc.PredictorServiceStub(channel)


def query(**changed: object) -> predictor_pb2.Query:
    return predictor_pb2.Query(**{**GOOD, **changed})  # type: ignore[arg-type]


async def test_a_bad_field_of_a_query_is_named(stub: Stub) -> None:

    async def ask(query: predictor_pb2.Query | None = None) -> RpcError:
        request = predictor_pb2.PredictRemainingRequest(query=query)
        return await refusal_of(stub.PredictRemaining(request, timeout=CALL_S))

    async def ask_all(*queries: predictor_pb2.Query) -> RpcError:
        request = predictor_pb2.BatchPredictRemainingRequest(queries=queries)
        return await refusal_of(stub.BatchPredictRemaining(request, timeout=CALL_S))

    for bad, field in BAD_QUERIES:
        assert (await ask(query(**bad)))[::2] == (INVALID, (f"query.{field}",))
        assert (await ask_all(query(), query(**bad)))[::2] == (INVALID, (f"queries[1].{field}",))
    assert (await ask())[::2] == (INVALID, ("query",))
    for count in (0, 4_097):
        assert (await ask_all(*[query()] * count))[::2] == (INVALID, ("queries",))


async def test_get_model_info_has_nothing_to_refuse_but_a_call_without_a_deadline(
    stub: Stub,
) -> None:
    refusal = await refusal_of(stub.GetModelInfo(predictor_pb2.GetModelInfoRequest()))
    assert refusal[:2] == (INVALID, "DEADLINE_REQUIRED")
    info = await stub.GetModelInfo(predictor_pb2.GetModelInfoRequest(), timeout=CALL_S)
    assert info == predictor_pb2.GetModelInfoResponse(
        model_version="prior-0", best_estimator=predictor_pb2.ESTIMATOR_PRIOR
    )


async def test_the_largest_batch_is_answered_in_the_order_of_its_queries_beside_other_calls(
    stub: Stub,
) -> None:
    queries = [query(trajectory_id=f"t{index}", gen_tokens=index) for index in range(4_096)]
    large = stub.BatchPredictRemaining(
        predictor_pb2.BatchPredictRemainingRequest(queries=queries), timeout=CALL_S
    )
    single = stub.PredictRemaining(
        predictor_pb2.PredictRemainingRequest(query=query()), timeout=CALL_S
    )
    response, _ = await asyncio.gather(large, single)
    assert [each.trajectory_id for each in response.predictions] == [
        each.trajectory_id for each in queries
    ]
    for each in response.predictions:
        assert each.estimator == predictor_pb2.ESTIMATOR_PRIOR
        assert 0 < each.remaining_tokens.p10 < each.remaining_tokens.p50 < each.remaining_tokens.p90
