"""Bad input to every RPC of RewardsService: the right code, naming the field or the reason."""

import json
from typing import Any

import grpc
import grpc.aio
import pytest
from support.processes import StartService
from support.rewards import RewardCalls
from support.rpc import error_of
from support.tools import CALL_S
from treadle.tools.v1 import rewards_pb2 as pb

GOOD = json.dumps({"answer": "1", "expected": "1"})


def score_request(**fields: Any) -> pb.ScoreTrajectoryRequest:
    return pb.ScoreTrajectoryRequest(
        **{"request_id": "r", "trajectory_id": "t", "reward": "exact_match", "arguments_json": GOOD, **fields}
    )


SCORES = [
    (score_request(request_id=""), "request_id"),
    (score_request(trajectory_id=""), "trajectory_id"),
    (score_request(trajectory_id="t 1"), "trajectory_id"),
    (score_request(job="/"), "job"),
    (score_request(reward=""), "reward"),
    (score_request(arguments_json="{"), "arguments_json"),
    (score_request(arguments_json="[1]"), "arguments_json"),
    (score_request(arguments_json=json.dumps({"answer": "x" * 1024 * 1024, "expected": ""})), "arguments_json"),
    (score_request(arguments_json=""), "arguments_json.answer"),
    (score_request(arguments_json='{"answer": 1, "expected": "1"}'), "arguments_json.answer"),
    (score_request(arguments_json='{"answer": "1", "expected": "1", "strict": true}'), "arguments_json.strict"),
]
WATCHES = [
    pb.WatchRewardsRequest(),
    pb.WatchRewardsRequest(job="j", trajectory_id="t"),
    pb.WatchRewardsRequest(reward_ids=["w 1"]),
    pb.WatchRewardsRequest(reward_ids=["w"] * 4097),
]


async def test_a_bad_request_names_its_field(start_service: StartService) -> None:
    process = await start_service(
        "treadle_tools", {"TREADLE_TOOLS_BUILTIN": "", "TREADLE_TOOLS_REWARDS": "exact_match"}
    )
    async with grpc.aio.insecure_channel(process.address) as channel:
        calls = RewardCalls(channel)
        for request, field in SCORES:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await calls.stub.ScoreTrajectory(request, timeout=CALL_S)
            assert error_of(refused.value).fields == (field,), request
        for watch in WATCHES:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await calls.stub.WatchRewards(watch, timeout=CALL_S).read()
            assert error_of(refused.value).fields == ("reward_ids",), watch
        for ask in (calls.get, calls.cancel):
            with pytest.raises(grpc.aio.AioRpcError) as missing:
                await ask("w-none")
            assert error_of(missing.value)[:2] == (grpc.StatusCode.NOT_FOUND, "REWARD_NOT_FOUND")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await calls.score("python", {})
        assert error_of(unknown.value)[:2] == (grpc.StatusCode.NOT_FOUND, "REWARD_FUNCTION_NOT_FOUND")
        accepted = await calls.score("exact_match", json.loads(GOOD), id="r")
        with pytest.raises(grpc.aio.AioRpcError) as reused:
            await calls.score("exact_match", json.loads(GOOD), id="r", job="other")
        assert error_of(reused.value).reason == "REQUEST_ID_REUSED"
        assert (await calls.score("exact_match", json.loads(GOOD), id="r")).reward_id == accepted.reward_id
