"""Every RPC of the scheduler refuses what is wrong, naming the field or the reason."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from support.rpc import refusal_of
from support.scheduler import SchedulerClient, scheduler
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
FAILED, EXISTS = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS

INFO: dict[str, Any] = {"engine_id": "e9", "address": "127.0.0.1:9", "slot_limit": 1}
POLICY: dict[str, Any] = {"ordering": pb.ORDERING_FCFS, "placement": pb.PLACEMENT_RULE_PINNED}
MANY_ROLLOUTS = pb.RolloutIds(rollout_ids=["r"] * 1001)
NAN, INFINITE = float("nan"), float("inf")

# Each makes a request that is right but for the fields it is given.
Make = Callable[..., Any]
opening: Make = partial(pb.OpenTrajectoryRequest, request_id="r", prompt_id="p", prompt_tokens=1)
step: Make = partial(
    pb.ScheduleStepRequest,
    request_id="r",
    trajectory_id="open",
    turn=0,
    context_tokens=1,
    max_new_tokens=1,
)
closing: Make = partial(
    pb.CloseTrajectoryRequest, request_id="r", trajectory_id="open", outcome=pb.OUTCOME_FINISHED
)
switch: Make = partial(
    pb.SwitchEngineRequest,
    request_id="r",
    trajectory_id="open",
    expected_revision=1,
    target_engine_id="e1",
)
leaving: Make = pb.DeregisterEngineRequest


def registration(**fields: Any) -> pb.RegisterEngineRequest:
    return pb.RegisterEngineRequest(
        request_id="r", info=engine_pb2.EngineInfo(**{**INFO, **fields})
    )


def curve(**fields: float) -> pb.RegisterEngineRequest:
    return registration(decode_curve=engine_pb2.DecodeCurve(**fields))


def renewal(**load: Any) -> pb.RenewEngineLeaseRequest:
    return pb.RenewEngineLeaseRequest(lease_id="l", engine_id="e0", load=engine_pb2.Load(**load))


def policy(**fields: Any) -> pb.SetPolicyRequest:
    return pb.SetPolicyRequest(request_id="r", policy=pb.Policy(**{**POLICY, **fields}))


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[SchedulerClient]:
    """Engines e0 and e1; trajectories `open`, `stepping` (ticket out), `pinned`, and `closed`."""
    async with scheduler(nats_url) as client:
        await client.register("e0", max_context_tokens=1000)
        await client.register("e1", max_context_tokens=1000)
        for name in ("open", "stepping", "closed"):
            await client.open(name, request_id=f"open-{name}")
        await client.open("pinned", pinned_engine_id="e0")
        await client.step("stepping", 0, request_id="step-stepping")
        await client.call(
            "CloseTrajectory", closing(trajectory_id="closed", request_id="close-closed")
        )
        yield client


MALFORMED: list[tuple[str, Any, str]] = [
    ("OpenJob", pb.OpenJobRequest(), "request_id"),
    ("OpenJob", pb.OpenJobRequest(request_id="r", job="no spaces"), "job"),
    ("OpenJob", pb.OpenJobRequest(request_id="r", resume=True), "job"),
    ("OpenJob", pb.OpenJobRequest(request_id="r", job="run", weight=-1.0), "weight"),
    ("OpenJob", pb.OpenJobRequest(request_id="r", job="run", weight=NAN), "weight"),
    ("OpenJob", pb.OpenJobRequest(request_id="r", job="run", weight=INFINITE), "weight"),
    ("OpenJob", pb.OpenJobRequest(request_id="r", job="run", weight=1e300), "weight"),
    ("OpenJob", pb.OpenJobRequest(request_id="r", weight=2.0), "job"),
    ("OpenJob", pb.OpenJobRequest(request_id="r", policy=pb.Policy()), "policy.ordering"),
    (
        "OpenJob",
        pb.OpenJobRequest(request_id="r", policy=pb.Policy(**{**POLICY, "placement": 77})),
        "policy.placement",
    ),
    ("RenewJob", pb.RenewJobRequest(), "job_id"),
    (
        "RenewJob",
        pb.RenewJobRequest(job_id="j", rollouts=pb.RolloutIds(rollout_ids=["?"])),
        "rollouts.rollout_ids[0]",
    ),
    ("RenewJob", pb.RenewJobRequest(job_id="j", rollouts=MANY_ROLLOUTS), "rollouts.rollout_ids"),
    ("CloseJob", pb.CloseJobRequest(job_id="j"), "request_id"),
    ("CloseJob", pb.CloseJobRequest(request_id="r"), "job_id"),
    ("OpenTrajectory", opening(job_id="?"), "job_id"),
    ("OpenTrajectory", opening(request_id=""), "request_id"),
    ("OpenTrajectory", opening(request_id="no spaces"), "request_id"),
    ("OpenTrajectory", opening(trajectory_id="no/slash"), "trajectory_id"),
    ("OpenTrajectory", opening(trajectory_id="x" * 97), "trajectory_id"),
    ("OpenTrajectory", opening(rollout_id="?"), "rollout_id"),
    ("OpenTrajectory", opening(prompt_id=""), "prompt_id"),
    ("OpenTrajectory", opening(prompt_id="x" * 257), "prompt_id"),
    ("OpenTrajectory", opening(sample=-1), "sample"),
    ("OpenTrajectory", opening(prompt_tokens=0), "prompt_tokens"),
    ("OpenTrajectory", opening(prompt_tokens=-5), "prompt_tokens"),
    ("OpenTrajectory", opening(max_total_tokens=-1), "max_total_tokens"),
    ("OpenTrajectory", opening(deadline=Timestamp(seconds=-1)), "deadline"),
    ("OpenTrajectory", opening(deadline=Timestamp(nanos=-1)), "deadline"),
    ("OpenTrajectory", opening(hardware_tags=["fine", ""]), "hardware_tags[1]"),
    ("OpenTrajectory", opening(hardware_tags=["x"] * 33), "hardware_tags"),
    ("OpenTrajectory", opening(pinned_engine_id="a b"), "pinned_engine_id"),
    (
        "OpenTrajectory",
        opening(request_id="open-open", trajectory_id="open", sample=7),
        "request_id",
    ),
    ("ScheduleStep", step(request_id=""), "request_id"),
    ("ScheduleStep", step(trajectory_id=""), "trajectory_id"),
    ("ScheduleStep", step(turn=-1), "turn"),
    ("ScheduleStep", step(context_tokens=0), "context_tokens"),
    ("ScheduleStep", step(context_tokens=1000), "context_tokens"),
    ("ScheduleStep", step(max_new_tokens=0), "max_new_tokens"),
    ("ScheduleStep", step(replaces_ticket_id="?"), "replaces_ticket_id"),
    ("ScheduleStep", step(replaces_ticket_id="none-was-out"), "replaces_ticket_id"),
    ("ScheduleStep", step(resumed_tokens=-1), "resumed_tokens"),
    ("ScheduleStep", step(resumed_tokens=1), "resumed_tokens"),
    ("ScheduleStep", step(tool_time=Duration(seconds=-1)), "tool_time"),
    ("ScheduleStep", step(times=pb.ClientTimes(tool=Duration(seconds=-1))), "times.tool"),
    (
        "ScheduleStep",
        step(request_id="step-stepping", trajectory_id="stepping", max_new_tokens=9),
        "request_id",
    ),
    ("CloseTrajectory", closing(request_id=""), "request_id"),
    ("CloseTrajectory", closing(trajectory_id=""), "trajectory_id"),
    ("CloseTrajectory", closing(outcome=pb.OUTCOME_UNSPECIFIED), "outcome"),
    ("CloseTrajectory", closing(outcome=99), "outcome"),
    ("CloseTrajectory", closing(reward=NAN), "reward"),
    (
        "CloseTrajectory",
        closing(times=pb.ClientTimes(lost_decode=Duration(nanos=-1))),
        "times.lost_decode",
    ),
    (
        "CloseTrajectory",
        closing(trajectory_id="closed", request_id="close-closed", reward=1.0),
        "request_id",
    ),
    ("GetTrajectory", pb.GetTrajectoryRequest(), "trajectory_id"),
    ("ListTrajectories", pb.ListTrajectoriesRequest(page_size=-1), "page_size"),
    ("ListTrajectories", pb.ListTrajectoriesRequest(page_size=1001), "page_size"),
    ("ListTrajectories", pb.ListTrajectoriesRequest(page_token="guessed"), "page_token"),
    ("ListTrajectories", pb.ListTrajectoriesRequest(rollout_id="?"), "rollout_id"),
    ("SwitchEngine", switch(request_id=""), "request_id"),
    ("SwitchEngine", switch(trajectory_id=""), "trajectory_id"),
    ("SwitchEngine", switch(expected_revision=-1), "expected_revision"),
    ("SwitchEngine", switch(target_engine_id=""), "target_engine_id"),
    ("SwitchEngine", switch(target_engine_id="e0"), "target_engine_id"),
    ("RegisterEngine", pb.RegisterEngineRequest(request_id="r"), "info"),
    ("RegisterEngine", pb.RegisterEngineRequest(info=engine_pb2.EngineInfo(**INFO)), "request_id"),
    ("RegisterEngine", registration(engine_id=""), "info.engine_id"),
    ("RegisterEngine", registration(address=""), "info.address"),
    ("RegisterEngine", registration(address="nowhere"), "info.address"),
    ("RegisterEngine", registration(slot_limit=0), "info.slot_limit"),
    ("RegisterEngine", registration(kv_tokens_capacity=-1), "info.kv_tokens_capacity"),
    ("RegisterEngine", registration(max_context_tokens=-1), "info.max_context_tokens"),
    ("RegisterEngine", registration(tensor_parallel=-1), "info.tensor_parallel"),
    ("RegisterEngine", registration(kv_bytes_per_token=-1), "info.kv_bytes_per_token"),
    ("RegisterEngine", registration(hardware_tags=["?"]), "info.hardware_tags[0]"),
    ("RegisterEngine", curve(base_s=NAN), "info.decode_curve.base_s"),
    ("RegisterEngine", curve(base_s=-1), "info.decode_curve.base_s"),
    ("RegisterEngine", curve(per_sequence_s=INFINITE), "info.decode_curve.per_sequence_s"),
    ("RegisterEngine", curve(per_kv_token_s=-1), "info.decode_curve.per_kv_token_s"),
    ("RegisterEngine", curve(prefill_tokens_per_s=-1), "info.decode_curve.prefill_tokens_per_s"),
    ("RenewEngineLease", pb.RenewEngineLeaseRequest(engine_id="e0"), "lease_id"),
    ("RenewEngineLease", pb.RenewEngineLeaseRequest(lease_id="l"), "engine_id"),
    ("RenewEngineLease", renewal(running_steps=-1), "load.running_steps"),
    ("RenewEngineLease", renewal(decode_tokens_per_s=NAN), "load.decode_tokens_per_s"),
    ("RenewEngineLease", renewal(measured_at=Timestamp(seconds=-1)), "load.measured_at"),
    (
        "RenewEngineLease",
        pb.RenewEngineLeaseRequest(
            lease_id="l", engine_id="e0", decode_curve=engine_pb2.DecodeCurve(base_s=-1)
        ),
        "decode_curve.base_s",
    ),
    ("DeregisterEngine", leaving(lease_id="l", engine_id="e0"), "request_id"),
    ("DeregisterEngine", leaving(request_id="r", engine_id="e0"), "lease_id"),
    ("DeregisterEngine", leaving(request_id="r", lease_id="l"), "engine_id"),
    ("DrainEngine", pb.DrainEngineRequest(engine_id="e0"), "request_id"),
    ("DrainEngine", pb.DrainEngineRequest(request_id="r"), "engine_id"),
    ("SetWeights", pb.SetWeightsRequest(weight_version="v", model_path="/m"), "request_id"),
    ("SetWeights", pb.SetWeightsRequest(request_id="r", model_path="/m"), "weight_version"),
    ("SetPolicy", pb.SetPolicyRequest(request_id="r"), "policy"),
    ("SetPolicy", pb.SetPolicyRequest(policy=pb.Policy(**POLICY)), "request_id"),
    ("SetPolicy", policy(ordering=pb.ORDERING_UNSPECIFIED), "policy.ordering"),
    ("SetPolicy", policy(ordering=77), "policy.ordering"),
    ("SetPolicy", policy(placement=pb.PLACEMENT_RULE_UNSPECIFIED), "policy.placement"),
    ("SetPolicy", policy(objective=77), "policy.objective"),
    ("SetPolicy", policy(replanning=pb.REPLANNING_RANK_SCALING), "policy.replanning"),
    ("SetPolicy", policy(replanning=77), "policy.replanning"),
]

REFUSED: list[tuple[str, Any, grpc.StatusCode, str]] = [
    ("RenewJob", pb.RenewJobRequest(job_id="none"), NOT_FOUND, "JOB_NOT_FOUND"),
    ("OpenTrajectory", opening(job_id="none"), NOT_FOUND, "JOB_NOT_FOUND"),
    ("OpenTrajectory", opening(trajectory_id="open"), EXISTS, "TRAJECTORY_EXISTS"),
    ("OpenTrajectory", opening(pinned_engine_id="e9"), NOT_FOUND, "ENGINE_NOT_FOUND"),
    ("ScheduleStep", step(trajectory_id="unknown"), NOT_FOUND, "TRAJECTORY_NOT_FOUND"),
    ("ScheduleStep", step(trajectory_id="closed"), FAILED, "TRAJECTORY_CLOSED"),
    ("ScheduleStep", step(turn=3), FAILED, "TURN_OUT_OF_ORDER"),
    ("ScheduleStep", step(trajectory_id="stepping"), FAILED, "STEP_IN_FLIGHT"),
    (
        "ScheduleStep",
        step(trajectory_id="stepping", replaces_ticket_id="x"),
        FAILED,
        "STEP_IN_FLIGHT",
    ),
    ("CloseTrajectory", closing(trajectory_id="unknown"), NOT_FOUND, "TRAJECTORY_NOT_FOUND"),
    ("CloseTrajectory", closing(trajectory_id="closed"), FAILED, "TRAJECTORY_CLOSED"),
    (
        "GetTrajectory",
        pb.GetTrajectoryRequest(trajectory_id="unknown"),
        NOT_FOUND,
        "TRAJECTORY_NOT_FOUND",
    ),
    ("SwitchEngine", switch(trajectory_id="unknown"), NOT_FOUND, "TRAJECTORY_NOT_FOUND"),
    ("SwitchEngine", switch(trajectory_id="closed"), FAILED, "TRAJECTORY_CLOSED"),
    ("SwitchEngine", switch(trajectory_id="pinned"), FAILED, "TRAJECTORY_PINNED"),
    ("SwitchEngine", switch(trajectory_id="stepping"), FAILED, "STEP_IN_FLIGHT"),
    ("SwitchEngine", switch(expected_revision=9), FAILED, "REVISION_MISMATCH"),
    ("SwitchEngine", switch(target_engine_id="e9"), NOT_FOUND, "ENGINE_NOT_FOUND"),
    (
        "DrainEngine",
        pb.DrainEngineRequest(request_id="r", engine_id="e9"),
        NOT_FOUND,
        "ENGINE_NOT_FOUND",
    ),
    ("RenewEngineLease", renewal(), NOT_FOUND, "LEASE_NOT_FOUND"),
    (
        "DeregisterEngine",
        leaving(request_id="r", lease_id="l", engine_id="e0"),
        NOT_FOUND,
        "LEASE_NOT_FOUND",
    ),
]


async def test_what_is_wrong_is_refused_by_field_or_reason_and_changes_nothing(
    client: SchedulerClient,
) -> None:
    async def state() -> tuple[Any, Any, Any]:
        return (
            await client.call("ListTrajectories", pb.ListTrajectoriesRequest()),
            [
                engine.info
                for engine in (await client.call("ListEngines", pb.ListEnginesRequest())).engines
            ],
            await client.call("GetPolicy", pb.GetPolicyRequest()),
        )

    before = await state()
    for rpc, request, field in MALFORMED:
        error = await refusal_of(client.call(rpc, request))
        assert (error.code, error.fields) == (INVALID, (field,)), f"{rpc} {request}"
    for rpc, request, code, reason in REFUSED:
        error = await refusal_of(client.call(rpc, request))
        assert (error.code, error.reason) == (code, reason), f"{rpc} {request}"
    assert await state() == before


async def test_a_call_without_a_deadline_is_refused(client: SchedulerClient) -> None:
    """These requests have no field; every RPC needs a deadline."""
    for call in (
        client.stub.ListEngines(pb.ListEnginesRequest()),
        client.stub.GetPolicy(pb.GetPolicyRequest()),
        client.stub.GetDirectory(pb.GetDirectoryRequest()),
        client.stub.ListJobs(pb.ListJobsRequest()),
    ):
        assert (await refusal_of(call)).reason == "DEADLINE_REQUIRED"


async def test_without_an_engine_a_step_is_unavailable_and_says_when_to_try_again(
    nats_url: str,
) -> None:
    async with scheduler(nats_url) as client:
        await client.open("t")
        error = await refusal_of(client.step("t", 0))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
        assert error.retry_after_s
        await client.register("e0")
        assert (await client.step("t", 0)).engine_id == "e0"


def test_every_rpc_has_a_case() -> None:
    rpcs = {method.name for method in pb.DESCRIPTOR.services_by_name["SchedulerService"].methods}
    cases = {case[0] for case in MALFORMED} | {case[0] for case in REFUSED}
    assert rpcs == cases | {"ListEngines", "ListJobs", "GetPolicy", "GetWeights", "GetDirectory"}
