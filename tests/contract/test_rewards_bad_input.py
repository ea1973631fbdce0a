"""Bad input to every RPC of RewardsService: the right code, naming the field or the reason."""

import json
from typing import Any

import grpc
from support.rewards import RewardCalls
from support.rpc import refusal_of, refused
from support.tools import CALL_S, serve
from treadle.tools.v1 import rewards_pb2 as pb

GOOD = json.dumps({"answer": "1", "expected": "1"})

service = serve(REWARDS="exact_match")


def score_request(**fields: Any) -> pb.ScoreTrajectoryRequest:
    return pb.ScoreTrajectoryRequest(
        **{
            "request_id": "r",
            "trajectory_id": "t",
            "reward": "exact_match",
            "arguments_json": GOOD,
            **fields,
        }
    )


SCORES = [
    (score_request(request_id=""), "request_id"),
    (score_request(trajectory_id=""), "trajectory_id"),
    (score_request(trajectory_id="t 1"), "trajectory_id"),
    (score_request(job="/"), "job"),
    (score_request(reward=""), "reward"),
    (score_request(arguments_json="{"), "arguments_json"),
    (score_request(arguments_json="[1]"), "arguments_json"),
    (
        score_request(arguments_json=json.dumps({"answer": "x" * 1024 * 1024, "expected": ""})),
        "arguments_json",
    ),
    (score_request(arguments_json=""), "arguments_json.answer"),
    (score_request(arguments_json='{"answer": 1, "expected": "1"}'), "arguments_json.answer"),
    (
        score_request(arguments_json='{"answer": "1", "expected": "1", "strict": true}'),
        "arguments_json.strict",
    ),
]
WATCHES = [
    pb.WatchRewardsRequest(),
    pb.WatchRewardsRequest(job="j", trajectory_id="t"),
    pb.WatchRewardsRequest(reward_ids=["w 1"]),
    pb.WatchRewardsRequest(reward_ids=["w"] * 4097),
]


async def test_a_bad_request_names_its_field(rewards: RewardCalls) -> None:
    for request, field in SCORES:
        error = await refusal_of(rewards.stub.ScoreTrajectory(request, timeout=CALL_S))
        assert error.fields == (field,), request
    for watch in WATCHES:
        error = await refusal_of(rewards.stub.WatchRewards(watch, timeout=CALL_S).read())
        assert error.fields == ("reward_ids",), watch


async def test_what_is_not_there_is_not_found(rewards: RewardCalls) -> None:
    for ask in (rewards.get, rewards.cancel):
        with refused("REWARD_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await ask("w-none")
    with refused("REWARD_FUNCTION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await rewards.score("python", {})


async def test_a_request_id_with_another_request_is_refused(rewards: RewardCalls) -> None:
    accepted = await rewards.score("exact_match", json.loads(GOOD), id="r")
    with refused("REQUEST_ID_REUSED"):
        await rewards.score("exact_match", json.loads(GOOD), id="r", job="other")
    assert (
        await rewards.score("exact_match", json.loads(GOOD), id="r")
    ).reward_id == accepted.reward_id
