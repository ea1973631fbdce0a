"""Bad input to every RPC of RolloutService: the right code, naming the field or the reason."""

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from support.finished_trajectories import CALL_S, RolloutCalls, finished, rollout_service
from support.rpc import RpcError, refusal_of
from treadle.common.v1.tokens_pb2 import Logprobs, TokenIds, VersionSpan
from treadle.rollout.v1 import rollout_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN = b"\x00\x00\xc0\x7f"


@pytest.fixture
async def calls(nats_url: str) -> AsyncIterator[RolloutCalls]:
    async with rollout_service(nats_url) as calls:
        yield calls


async def refusal(calls: RolloutCalls, rpc: str, request: Any) -> RpcError:
    return await refusal_of(getattr(calls.stub, rpc)(request, timeout=CALL_S))


def creation(
    request_id: str = "c", rollout_id: str = "new", **spec: Any
) -> pb.CreateRolloutRequest:
    given = {"samples_per_prompt": 1, "prompt_ids": ["p0"], "max_staleness": -1, **spec}
    return pb.CreateRolloutRequest(
        request_id=request_id, rollout_id=rollout_id, spec=pb.RolloutSpec(**given)
    )


def batch(**fields: Any) -> pb.GetBatchRequest:
    return pb.GetBatchRequest(**{"request_id": "b", "rollout_id": "r", "max_groups": 1, **fields})


def pushed(**chunk: Any) -> pb.PushTokensRequest:
    """One sampled token of trajectory a."""
    given = {
        "trajectory_id": "a",
        "prompt_id": "p0",
        "tokens": TokenIds(int32_le=b"\1\0\0\0"),
        "loss_mask": b"\1",
        "logprobs": Logprobs(float32_le=b"\0" * 4),
        **chunk,
    }
    return pb.PushTokensRequest(rollout_id="r", chunk=pb.TokenChunk(**given))


async def test_a_bad_field_of_a_request_is_named(calls: RolloutCalls) -> None:
    bad: list[tuple[str, Any, str]] = [
        ("CreateRollout", creation(request_id=""), "request_id"),
        ("CreateRollout", creation(rollout_id="r/1"), "rollout_id"),
        ("CreateRollout", creation(samples_per_prompt=0), "spec.samples_per_prompt"),
        ("CreateRollout", creation(keep_per_prompt=2), "spec.keep_per_prompt"),
        ("CreateRollout", creation(keep_per_prompt=-1), "spec.keep_per_prompt"),
        ("CreateRollout", creation(max_staleness=-2), "spec.max_staleness"),
        ("CreateRollout", creation(max_total_tokens=-1), "spec.max_total_tokens"),
        ("CreateRollout", creation(prompt_ids=[]), "spec.prompt_ids"),
        ("CreateRollout", creation(prompt_ids=["a", "a"]), "spec.prompt_ids"),
        ("CreateRollout", creation(prompt_ids=["a", ""]), "spec.prompt_ids[1]"),
        ("CreateRollout", creation(samples=[1, 1]), "spec.samples"),
        ("CreateRollout", creation(samples_per_prompt=2, samples=[1]), "spec.samples[0]"),
        ("CreateRollout", creation(keep_groups=2), "spec.keep_groups"),
        ("CreateRollout", creation(max_open_groups=-1), "spec.max_open_groups"),
        ("CreateRollout", creation(replace_stale=True), "spec.replace_stale"),
        ("CreateRollout", creation(batch_groups=-1), "spec.batch_groups"),
        ("CreateRollout", creation(batch_groups=1), "spec.batch_groups"),
        (
            "CreateRollout",
            creation(batch_groups=1, max_staleness=0, keep_groups=1),
            "spec.batch_groups",
        ),
        ("CreateRollout", creation(samples_in_flight=-1), "spec.samples_in_flight"),
        ("CreateRollout", creation(samples_in_flight=1), "spec.samples_in_flight"),
        (
            "CreateRollout",
            creation(replace_stale=True, max_staleness=0, keep_groups=1),
            "spec.replace_stale",
        ),
        ("CreateRollout", creation(selection={"rule": 99}), "spec.selection.rule"),
        (
            "CreateRollout",
            creation(selection={"rule": "SELECTION_RULE_MIXED"}),
            "spec.keep_per_prompt",
        ),
        ("CreateRollout", creation(selection={"longest": 1}), "spec.selection.longest"),
        (
            "CreateRollout",
            creation(selection={"rule": "SELECTION_RULE_DUAL_END", "longest": 2}),
            "spec.selection.longest",
        ),
        (
            "CreateRollout",
            creation(selection={"saturated_samples": -1}),
            "spec.selection.saturated_samples",
        ),
        (
            "CreateRollout",
            creation(selection={"success_reward": math.nan}),
            "spec.selection.success_reward",
        ),
        ("CreateRollout", creation(redundancy={"budget": 1}), "spec.history"),
        (
            "CreateRollout",
            creation(history="h", redundancy={"budget": 0.5}),
            "spec.redundancy.budget",
        ),
        (
            "CreateRollout",
            creation(history="h", redundancy={"budget": math.inf}),
            "spec.redundancy.budget",
        ),
        (
            "CreateRollout",
            creation(history="h", redundancy={"budget": 1, "most_samples": 2}),
            "spec.redundancy.most_samples",
        ),
        (
            "CreateRollout",
            creation(history="h", redundancy={"budget": 1}, samples=[1]),
            "spec.samples",
        ),
        ("CreateRollout", creation(history="h/1"), "spec.history"),
        (
            "CreateRollout",
            creation(history="h", length_cap={"ceiling_tokens": 5}),
            "spec.length_cap.floor_tokens",
        ),
        (
            "CreateRollout",
            creation(history="h", length_cap={"ceiling_tokens": 5, "floor_tokens": 6}),
            "spec.length_cap",
        ),
        (
            "CreateRollout",
            creation(
                history="h",
                length_cap={"ceiling_tokens": 5, "floor_tokens": 1, "percentile": math.nan},
            ),
            "spec.length_cap.percentile",
        ),
        (
            "CreateRollout",
            creation(
                history="h", length_cap={"ceiling_tokens": 5, "floor_tokens": 1, "cut_reward": 9}
            ),
            "spec.length_cap.cut_reward",
        ),
        ("GetShaping", pb.GetShapingRequest(), "rollout_id"),
        ("GetShaping", pb.GetShapingRequest(rollout_id="r", history="h"), "rollout_id"),
        # used with another request
        ("CreateRollout", creation("create", "r", prompt_ids=["a", "b"]), "request_id"),
        ("CancelRollout", pb.CancelRolloutRequest(rollout_id="r"), "request_id"),
        (
            "SubmitTrajectory",
            pb.SubmitTrajectoryRequest(rollout_id="r", trajectory=finished("a")),
            "request_id",
        ),
        ("GetBatch", batch(request_id=""), "request_id"),
        ("GetBatch", batch(max_groups=0), "max_groups"),
        ("GetBatch", batch(max_groups=-3), "max_groups"),
        ("GetBatch", batch(weight_version=-1), "weight_version"),
        ("GetBatch", batch(part=1), "part"),
        ("GetBatch", batch(part=-1, parts=2), "part"),
        ("GetBatch", batch(parts=-1), "parts"),
        ("GetBatch", batch(wait_at_most={"seconds": -1}), "wait_at_most"),
        (
            "ConfirmBatch",
            pb.ConfirmBatchRequest(request_id="f", rollout_id="r"),
            "batch_request_id",
        ),
        (
            "ConfirmBatch",
            pb.ConfirmBatchRequest(
                request_id="f", rollout_id="r", batch_request_id="b", part=2, parts=2
            ),
            "part",
        ),
        ("PushTokens", pushed(prompt_id="other"), "chunk.prompt_id"),
        ("PushTokens", pushed(trajectory_id="a/b"), "chunk.trajectory_id"),
        ("PushTokens", pushed(sample=1), "chunk.sample"),
        ("PushTokens", pushed(start_token=-1), "chunk.start_token"),
        ("PushTokens", pushed(tokens=TokenIds(int32_le=b"123")), "chunk.tokens"),
        ("PushTokens", pushed(tokens=TokenIds()), "chunk.tokens"),
        ("PushTokens", pushed(tokens=TokenIds(int32_le=b"\xff" * 4)), "chunk.tokens"),
        ("PushTokens", pushed(loss_mask=b""), "chunk.loss_mask"),
        ("PushTokens", pushed(loss_mask=b"\2"), "chunk.loss_mask"),
        ("PushTokens", pushed(logprobs=Logprobs()), "chunk.logprobs"),
        ("PushTokens", pushed(logprobs=Logprobs(float32_le=NAN)), "chunk.logprobs"),
        ("PushTokens", pushed(start_token=3, **spans(("0", 2, 4))), "chunk.version_spans[0]"),
    ]
    await calls.create()
    for rpc, request, field in bad:
        error = await refusal(calls, rpc, request)
        assert (error.code, error.fields) == (INVALID, (field,)), request
    for fields, named in (
        ({"min_tokens": -1}, "min_tokens"),
        ({"part": 1}, "part"),
        ({"parts": -1}, "parts"),
    ):
        stream = pb.StreamTokensRequest(rollout_id="r", **fields)
        error = await refusal_of(calls.stub.StreamTokens(stream, timeout=CALL_S).read())
        assert (error.code, error.fields) == (INVALID, (named,)), stream


async def test_every_rpc_says_that_a_rollout_is_unknown_and_refuses_an_empty_id(
    calls: RolloutCalls,
) -> None:
    for rollout_id in ("nowhere", ""):
        errors = [
            await refusal(calls, "GetRollout", pb.GetRolloutRequest(rollout_id=rollout_id)),
            await refusal(
                calls,
                "CancelRollout",
                pb.CancelRolloutRequest(request_id="a", rollout_id=rollout_id),
            ),
            await refusal_of(RolloutCalls(calls.channel, rollout_id).submit(finished("a"))),
            await refusal(calls, "GetBatch", batch(rollout_id=rollout_id)),
            await refusal_of(
                calls.stub.StreamBatch(batch(rollout_id=rollout_id), timeout=CALL_S).read()
            ),
            await refusal(
                calls,
                "ConfirmBatch",
                pb.ConfirmBatchRequest(request_id="f", rollout_id=rollout_id, batch_request_id="b"),
            ),
            await refusal_of(
                calls.stub.WatchRollout(pb.WatchRolloutRequest(rollout_id=rollout_id)).read()
            ),
            await refusal(
                calls,
                "PushTokens",
                pb.PushTokensRequest(rollout_id=rollout_id, chunk=pushed().chunk),
            ),
            await refusal_of(
                calls.stub.StreamTokens(
                    pb.StreamTokensRequest(rollout_id=rollout_id), timeout=CALL_S
                ).read()
            ),
        ]
        said = {(error.code, error.reason, error.fields) for error in errors}
        unknown = (grpc.StatusCode.NOT_FOUND, "ROLLOUT_NOT_FOUND", ())
        assert said == {unknown if rollout_id else (INVALID, "INVALID_ARGUMENT", ("rollout_id",))}


def spans(*given: tuple[str, int, int]) -> dict[str, Any]:
    made = [
        VersionSpan(weight_version=version, start_token=start, end_token=end)
        for version, start, end in given
    ]
    return {"version_spans": made}


async def test_a_bad_field_of_a_trajectory_is_named(calls: RolloutCalls) -> None:
    """Three prompt tokens and four sampled ones, under a staleness bound, each time with one thing
    wrong."""
    bad: list[tuple[dict[str, Any], str]] = [
        ({"trajectory_id": "a b"}, "trajectory_id"),
        ({"prompt_id": "elsewhere"}, "prompt_id"),
        ({"sample": 2}, "sample"),
        ({"sample": -1}, "sample"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": float("inf")}, "reward"),
        ({"turns": -1}, "turns"),
        ({"tokens": TokenIds(int32_le=b"")}, "tokens"),
        ({"tokens": TokenIds(int32_le=b"\x01\x00\x00")}, "tokens"),
        ({"tokens": TokenIds(int32_le=b"\xff" * 28)}, "tokens"),
        ({"loss_mask": b"\x00\x00\x00\x01"}, "loss_mask"),
        ({"loss_mask": b"\x00\x00\x00\x01\x01\x01\x02"}, "loss_mask"),
        ({"logprobs": Logprobs(float32_le=b"\x00" * 24)}, "logprobs"),
        ({"logprobs": Logprobs(float32_le=b"\x00" * 24 + NAN)}, "logprobs"),
        ({"logprobs": Logprobs(float32_le=b"\x00\x00\x80\x3f" * 7)}, "logprobs"),
        (spans(("0", 3, 8)), "version_spans[0]"),
        (spans(("0", -1, 7)), "version_spans[0]"),
        (spans(("0", 5, 5)), "version_spans[0]"),
        (spans(("0", 3, 5), ("1", 4, 7)), "version_spans[1]"),
        (spans(("0", 2, 7)), "version_spans[0]"),
        (spans(("0", 3, 6)), "version_spans"),
        (spans(), "version_spans"),
        (spans(("step-12", 3, 7)), "version_spans[0].weight_version"),
        (spans(("-1", 3, 7)), "version_spans[0].weight_version"),
    ]
    await calls.create(samples=2, staleness=1)
    for number, (fields, field) in enumerate(bad):
        trajectory = finished("a")
        for name in fields:
            trajectory.ClearField(name)  # type: ignore[arg-type]
        trajectory.MergeFrom(pb.FinishedTrajectory(**fields))
        error = await refusal_of(calls.submit(trajectory, f"bad-{number}"))
        assert (error.code, error.fields) == (INVALID, (f"trajectory.{field}",)), fields
    assert (await calls.submit(finished("a"), "good")).kept


async def test_any_version_is_taken_where_staleness_is_not_bounded(calls: RolloutCalls) -> None:
    await calls.create()
    assert (await calls.submit(finished("a", versions=("step-12",)))).kept


async def test_launch_weights_that_nobody_named_count_as_version_0(calls: RolloutCalls) -> None:
    """SGLang calls them "default". The trainer is at 2: one version behind is allowed, and they are
    two behind."""
    await calls.create(samples=2, staleness=1)
    assert (await calls.submit(finished("fresh", sample=0, versions=("default", "1")))).kept
    assert (await calls.submit(finished("newer", sample=1, versions=("1",)))).kept
    batch = await calls.batch("b", version=2)
    assert [t.trajectory_id for t in batch.groups[0].trajectories] == ["newer"]


async def test_what_is_taken_by_another_request_is_refused(calls: RolloutCalls) -> None:
    """The id of a rollout, the sample of another trajectory, and the id of another GetBatch."""
    await calls.create(samples=2, keep=1)
    exists = await refusal_of(calls.create(request_id="another"))
    assert exists[:2] == (grpc.StatusCode.ALREADY_EXISTS, "ROLLOUT_EXISTS")
    await calls.submit(finished("a"))
    taken = await refusal_of(calls.submit(finished("b")))
    assert taken[:2] == (grpc.StatusCode.ALREADY_EXISTS, "SAMPLE_TAKEN")
    await calls.batch("b", 1)
    assert (await refusal_of(calls.batch("b", 2))).fields == ("request_id",)


async def test_more_sampled_tokens_than_the_cap_are_refused(calls: RolloutCalls) -> None:
    await calls.stub.CreateRollout(creation(rollout_id="r", max_total_tokens=4), timeout=CALL_S)
    assert (await refusal_of(calls.submit(finished("a", sampled=5)))).fields == (
        "trajectory.tokens",
    )
    assert (await calls.submit(finished("b", sampled=4))).kept
