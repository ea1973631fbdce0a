"""Bad input to every RPC of RolloutService: the right code, naming the field or the reason."""

from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from support.finished_trajectories import CALL_S, RolloutCalls, finished, rollout_service
from support.rpc import error_of
from treadle.common.v1.tokens_pb2 import VersionSpan
from treadle.rollout.v1 import rollout_pb2 as pb

GOOD_SPEC = {"samples_per_prompt": 1, "prompt_ids": ["p0"], "max_staleness": -1}


@pytest.mark.parametrize(
    ("request_id", "rollout_id", "spec", "field"),
    [
        ("", "r", GOOD_SPEC, "request_id"),
        ("c", "r/1", GOOD_SPEC, "rollout_id"),
        ("c", "r", {**GOOD_SPEC, "samples_per_prompt": 0}, "spec.samples_per_prompt"),
        ("c", "r", {**GOOD_SPEC, "keep_per_prompt": 2}, "spec.keep_per_prompt"),
        ("c", "r", {**GOOD_SPEC, "keep_per_prompt": -1}, "spec.keep_per_prompt"),
        ("c", "r", {**GOOD_SPEC, "max_staleness": -2}, "spec.max_staleness"),
        ("c", "r", {**GOOD_SPEC, "max_total_tokens": -1}, "spec.max_total_tokens"),
        ("c", "r", {**GOOD_SPEC, "prompt_ids": []}, "spec.prompt_ids"),
        ("c", "r", {**GOOD_SPEC, "prompt_ids": ["a", "a"]}, "spec.prompt_ids"),
        ("c", "r", {**GOOD_SPEC, "prompt_ids": ["a", ""]}, "spec.prompt_ids[1]"),
    ],
)
async def test_create_rollout_names_the_bad_field(
    nats_url: str, request_id: str, rollout_id: str, spec: dict[str, object], field: str
) -> None:
    async with rollout_service(nats_url) as channel:
        request = pb.CreateRolloutRequest(
            request_id=request_id,
            rollout_id=rollout_id,
            spec=pb.RolloutSpec(**spec),  # type: ignore[arg-type]
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await RolloutCalls(channel).stub.CreateRollout(request, timeout=CALL_S)
    error = error_of(refused.value)
    assert (error.code, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))


async def test_create_rollout_refuses_a_taken_id_and_a_request_id_used_for_something_else(nats_url: str) -> None:
    async with rollout_service(nats_url) as channel:
        calls = RolloutCalls(channel)
        await calls.create()
        with pytest.raises(grpc.aio.AioRpcError) as taken:
            await calls.create(request_id="another")
        with pytest.raises(grpc.aio.AioRpcError) as reused:
            await calls.create(prompts=2)
    assert error_of(taken.value)[:2] == (grpc.StatusCode.ALREADY_EXISTS, "ROLLOUT_EXISTS")
    assert error_of(reused.value).fields == ("request_id",)


async def test_every_rpc_says_that_a_rollout_is_unknown_and_refuses_an_empty_id(nats_url: str) -> None:
    async with rollout_service(nats_url) as channel:
        stub = RolloutCalls(channel).stub

        async def calls_for(rollout_id: str) -> list[grpc.aio.AioRpcError]:
            errors = []
            trajectory = finished("a")
            for call in (
                stub.GetRollout(pb.GetRolloutRequest(rollout_id=rollout_id), timeout=CALL_S),
                stub.CancelRollout(pb.CancelRolloutRequest(request_id="a", rollout_id=rollout_id), timeout=CALL_S),
                stub.SubmitTrajectory(
                    pb.SubmitTrajectoryRequest(request_id="a", rollout_id=rollout_id, trajectory=trajectory),
                    timeout=CALL_S,
                ),
                stub.GetBatch(pb.GetBatchRequest(request_id="a", rollout_id=rollout_id, max_groups=1), timeout=CALL_S),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                errors.append(refused.value)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.WatchRollout(pb.WatchRolloutRequest(rollout_id=rollout_id)):
                    pass
            return [*errors, refused.value]

        unknown = [error_of(error) for error in await calls_for("nowhere")]
        empty = [error_of(error) for error in await calls_for("")]
    assert {error[:2] for error in unknown} == {(grpc.StatusCode.NOT_FOUND, "ROLLOUT_NOT_FOUND")}
    assert {error.fields for error in empty} == {("rollout_id",)}


async def test_cancel_rollout_needs_a_request_id(nats_url: str) -> None:
    async with rollout_service(nats_url) as channel:
        calls = RolloutCalls(channel)
        await calls.create()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.stub.CancelRollout(pb.CancelRolloutRequest(rollout_id="r"), timeout=CALL_S)
    assert error_of(refused.value).fields == ("request_id",)


def with_spans(*spans: tuple[str, int, int]) -> Callable[[pb.FinishedTrajectory], None]:
    def spoil(trajectory: pb.FinishedTrajectory) -> None:
        del trajectory.version_spans[:]
        for version, start, end in spans:
            trajectory.version_spans.append(VersionSpan(weight_version=version, start_token=start, end_token=end))

    return spoil


def setting(**fields: object) -> Callable[[pb.FinishedTrajectory], None]:
    return lambda trajectory: trajectory.MergeFrom(pb.FinishedTrajectory(**fields))  # type: ignore[arg-type]


def replacing(name: str, data: bytes) -> Callable[[pb.FinishedTrajectory], None]:
    def spoil(trajectory: pb.FinishedTrajectory) -> None:
        match name:
            case "tokens":
                trajectory.tokens.int32_le = data
            case "logprobs":
                trajectory.logprobs.float32_le = data
            case "loss_mask":
                trajectory.loss_mask = data

    return spoil


NAN = b"\x00\x00\xc0\x7f"
SPANS = "trajectory.version_spans"


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (setting(trajectory_id="a b"), "trajectory.trajectory_id"),
        (setting(prompt_id="elsewhere"), "trajectory.prompt_id"),
        (setting(sample=2), "trajectory.sample"),
        (setting(sample=-1), "trajectory.sample"),
        (setting(reward=float("nan")), "trajectory.reward"),
        (setting(reward=float("inf")), "trajectory.reward"),
        (setting(turns=-1), "trajectory.turns"),
        (replacing("tokens", b""), "trajectory.tokens"),
        (replacing("tokens", b"\x01\x00\x00"), "trajectory.tokens"),
        (replacing("tokens", b"\xff" * 28), "trajectory.tokens"),
        (replacing("loss_mask", b"\x00\x00\x00\x01"), "trajectory.loss_mask"),
        (replacing("loss_mask", b"\x00\x00\x00\x01\x01\x01\x02"), "trajectory.loss_mask"),
        (replacing("logprobs", b"\x00" * 24), "trajectory.logprobs"),
        (replacing("logprobs", b"\x00" * 24 + NAN), "trajectory.logprobs"),
        (replacing("logprobs", b"\x00\x00\x80\x3f" * 7), "trajectory.logprobs"),
        (with_spans(("0", 3, 8)), f"{SPANS}[0]"),
        (with_spans(("0", -1, 7)), f"{SPANS}[0]"),
        (with_spans(("0", 5, 5)), f"{SPANS}[0]"),
        (with_spans(("0", 3, 5), ("1", 4, 7)), f"{SPANS}[1]"),
        (with_spans(("0", 2, 7)), f"{SPANS}[0]"),
        (with_spans(("0", 3, 6)), SPANS),
        (with_spans(), SPANS),
        (with_spans(("step-12", 3, 7)), f"{SPANS}[0].weight_version"),
        (with_spans(("-1", 3, 7)), f"{SPANS}[0].weight_version"),
    ],
)
async def test_submit_trajectory_names_the_bad_field(
    nats_url: str, spoil: Callable[[pb.FinishedTrajectory], None], field: str
) -> None:
    """Three prompt tokens and four sampled ones, under a staleness bound, each time with one thing wrong."""
    trajectory = finished("a")
    spoil(trajectory)
    async with rollout_service(nats_url) as channel:
        calls = RolloutCalls(channel)
        await calls.create(samples=2, staleness=1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.submit(trajectory, "one")
        assert (await calls.submit(finished("a"), "two")).kept
    error = error_of(refused.value)
    assert (error.code, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))


async def test_submit_trajectory_takes_any_version_where_staleness_is_not_bounded(nats_url: str) -> None:
    async with rollout_service(nats_url) as channel:
        calls = RolloutCalls(channel)
        await calls.create()
        assert (await calls.submit(finished("a", versions=("step-12",)))).kept


async def test_submit_trajectory_refuses_a_sample_that_another_trajectory_handed_in(nats_url: str) -> None:
    async with rollout_service(nats_url) as channel:
        calls = RolloutCalls(channel)
        await calls.create(samples=2)
        await calls.submit(finished("a"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.submit(finished("b"))
        with pytest.raises(grpc.aio.AioRpcError) as nameless:
            await calls.stub.SubmitTrajectory(
                pb.SubmitTrajectoryRequest(rollout_id="r", trajectory=finished("c", sample=1)), timeout=CALL_S
            )
    assert error_of(refused.value)[:2] == (grpc.StatusCode.ALREADY_EXISTS, "SAMPLE_TAKEN")
    assert error_of(nameless.value).fields == ("request_id",)


async def test_submit_trajectory_refuses_more_sampled_tokens_than_the_cap(nats_url: str) -> None:
    async with rollout_service(nats_url) as channel:
        calls = RolloutCalls(channel)
        spec = pb.RolloutSpec(samples_per_prompt=1, max_staleness=-1, prompt_ids=["p0"], max_total_tokens=4)
        request = pb.CreateRolloutRequest(request_id="c", rollout_id="r", spec=spec)
        await calls.stub.CreateRollout(request, timeout=CALL_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.submit(finished("a", sampled=5))
        assert (await calls.submit(finished("b", sampled=4))).kept
    assert error_of(refused.value).fields == ("trajectory.tokens",)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"max_groups": 0}, "max_groups"),
        ({"max_groups": -3}, "max_groups"),
        ({"weight_version": -1}, "weight_version"),
    ],
)
async def test_get_batch_names_the_bad_field(nats_url: str, fields: dict[str, object], field: str) -> None:
    async with rollout_service(nats_url) as channel:
        calls = RolloutCalls(channel)
        await calls.create()
        values = {"request_id": "b", "rollout_id": "r", "max_groups": 1, **fields}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.stub.GetBatch(pb.GetBatchRequest(**values), timeout=CALL_S)  # type: ignore[arg-type]
    error = error_of(refused.value)
    assert (error.code, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))


async def test_get_batch_refuses_other_parameters_under_a_used_request_id(nats_url: str) -> None:
    async with rollout_service(nats_url) as channel:
        calls = RolloutCalls(channel)
        await calls.create()
        await calls.submit(finished("a"))
        await calls.batch("b", 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.batch("b", 2)
    assert error_of(refused.value).fields == ("request_id",)
