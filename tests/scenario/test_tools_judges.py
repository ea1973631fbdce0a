"""LLM judges of a real service: asked over OpenAI's chat API, at several endpoints, until there is a score."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.fake_chat import asked, base_of, function, judge_says
from support.functions import FunctionServer, says, start_declared
from support.processes import StartService
from support.rewards import RewardCalls
from support.rpc import error_of
from treadle.tools.v1 import rewards_pb2 as pb

DONE, FAILED = pb.REWARD_STATE_DONE, pb.REWARD_STATE_FAILED
PROMPT = "Question: $question\nAnswer: $answer\nEnd with `Score: N`, from 0 to 10."
ARGUMENTS = {"question": "1+1?", "answer": "2"}


@asynccontextmanager
async def judged(
    start_service: StartService, folder: Path, *servers: FunctionServer, **fields: Any
) -> AsyncIterator[RewardCalls]:
    """A tools service with one judge at these endpoints."""
    judge = {"name": "judge", "prompt": PROMPT, "endpoints": [base_of(server) for server in servers], **fields}
    process = await start_declared(start_service, folder, {"judge": [judge]}, JUDGE_KEY="Bearer k")
    async with grpc.aio.insecure_channel(process.address) as channel:
        yield RewardCalls(channel)


async def test_a_judge_reads_the_trajectory_and_its_score_is_the_reward(
    start_service: StartService, tmp_path: Path
) -> None:
    async with (
        function(judge_says("It is right.\nScore: 8")) as server,
        judged(
            start_service, tmp_path, server, authorization_from_env="JUDGE_KEY", model="big", max_tokens=99
        ) as calls,
    ):
        [ended] = await calls.ended((await calls.score("judge", ARGUMENTS)).reward_id)
        assert (ended.state, ended.score, ended.output) == (DONE, 0.8, "It is right.\nScore: 8")
        assert ended.timing.execution.ToNanoseconds() > 0
        assert asked(server) == [
            [{"role": "user", "content": "Question: 1+1?\nAnswer: 2\nEnd with `Score: N`, from 0 to 10."}]
        ]
        assert (server.bodies[0]["model"], server.bodies[0]["max_tokens"]) == ("big", 99)
        assert server.requests[0].headers["Authorization"] == "Bearer k"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.score("judge", {"question": "1+1?"})
        assert error_of(refused.value).fields == ("arguments_json.answer",)


async def test_a_judge_without_a_score_is_asked_again_and_otherwise(
    start_service: StartService, tmp_path: Path
) -> None:
    """WHEN it never gives one. Result: the reward has failed, and says what the judge said."""
    async with (
        function(judge_says("Score: eleven"), judge_says("hm"), judge_says(None), judge_says("Score: 2")) as server,
        judged(start_service, tmp_path, server) as calls,
    ):
        [ended] = await calls.ended((await calls.score("judge", ARGUMENTS)).reward_id)
        assert (ended.state, ended.score) == (DONE, 0.2)
        assert [body["temperature"] for body in server.bodies] == [0.0, 0.7, 0.7]
        [ended] = await calls.ended((await calls.score("judge", ARGUMENTS)).reward_id)
        assert ended.state == FAILED
        assert "gave no score: 'Score: eleven' (3 tries)" in ended.error


async def test_an_endpoint_that_is_down_is_not_waited_for(start_service: StartService, tmp_path: Path) -> None:
    async with (
        function(judge_says("Score: 10")) as alive,
        function(judge_says("Score: 0")) as dead,
        judged(start_service, tmp_path, dead, alive) as calls,
    ):
        await dead.stop()
        accepted = [await calls.score("judge", ARGUMENTS) for _ in range(6)]
        ended = await calls.ended(*(one.reward_id for one in accepted))
        assert [(one.state, one.score) for one in ended] == [(DONE, 1.0)] * 6


async def test_a_judge_that_refuses_the_question_fails_its_reward(start_service: StartService, tmp_path: Path) -> None:
    async with (
        function(says({"error": {"message": "prompt too long"}}, 400)) as server,
        judged(start_service, tmp_path, server) as calls,
    ):
        [ended] = await calls.ended((await calls.score("judge", ARGUMENTS)).reward_id)
        assert ended.state == FAILED
        assert "prompt too long" in ended.error
        assert len(server.requests) == 1
