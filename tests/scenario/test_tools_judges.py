"""LLM judges of a real service: asked over OpenAI's chat API, at several endpoints, until there is a score."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
from aiohttp import web
from support.functions import Handler, function, says
from support.processes import ServiceProcess
from support.rewards import RewardCalls
from support.rpc import error_of
from support.tools import shared_tools
from treadle.tools.v1 import rewards_pb2 as pb
from treadle_cli.mesh.services import free_port

DONE, FAILED = pb.REWARD_STATE_DONE, pb.REWARD_STATE_FAILED
PROMPT = "Question: $question\nAnswer: $answer\nEnd with `Score: N`, from 0 to 10."
ARGUMENTS = {"question": "1+1?", "answer": "2"}
ONE, OTHER = free_port(), free_port()  # of the judges' servers


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A tools service with a judge at one endpoint, and one at two."""
    folder: Path = tmp_path_factory.mktemp("judges")
    judges = [
        {
            "name": name,
            "prompt": PROMPT,
            "endpoints": [f"http://127.0.0.1:{port}" for port in ports],
            "authorization_from_env": "JUDGE_KEY",
            "model": "big",
            "max_tokens": 99,
        }
        for name, ports in {"judge": [ONE], "either": [OTHER, ONE]}.items()
    ]
    (folder / "judges.json").write_text(json.dumps({"judge": judges}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_KEY", "Bearer k")
        settings = {"FUNCTIONS": str(folder / "judges.json"), "FUNCTION_HOSTS": "127.0.0.1", "REWARDS": ""}
        with shared_tools(folder, **settings) as process:
            yield process


@pytest.fixture
async def calls(service: ServiceProcess) -> AsyncIterator[RewardCalls]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield RewardCalls(channel)


def judge_says(text: str | None) -> Handler:
    """A chat completion with this content, where the test is of what is asked and what is made of the answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/chat/completions"
        message = {"role": "assistant", "content": text}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    return answer


async def test_a_judge_reads_the_trajectory_and_its_score_is_the_reward(calls: RewardCalls) -> None:
    async with function(judge_says("It is right.\nScore: 8"), port=ONE) as server:
        [ended] = await calls.ended((await calls.score("judge", ARGUMENTS)).reward_id)
        assert (ended.state, ended.score, ended.output) == (DONE, 0.8, "It is right.\nScore: 8")
        assert ended.timing.execution.ToNanoseconds() > 0
        [body] = server.bodies
        assert body["messages"] == [
            {"role": "user", "content": "Question: 1+1?\nAnswer: 2\nEnd with `Score: N`, from 0 to 10."}
        ]
        assert (body["model"], body["max_tokens"]) == ("big", 99)
        assert server.requests[0].headers["Authorization"] == "Bearer k"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.score("judge", {"question": "1+1?"})
        assert error_of(refused.value).fields == ("arguments_json.answer",)


async def test_a_judge_without_a_score_is_asked_again_and_otherwise(calls: RewardCalls) -> None:
    """WHEN it never gives one. Result: the reward has failed, and says what the judge said."""
    answers = [judge_says("Score: eleven"), judge_says("hm"), judge_says(None), judge_says("Score: 2")]
    async with function(*answers, port=ONE) as server:
        [ended] = await calls.ended((await calls.score("judge", ARGUMENTS)).reward_id)
        assert (ended.state, ended.score) == (DONE, 0.2)
        assert [body["temperature"] for body in server.bodies] == [0.0, 0.7, 0.7]
        [ended] = await calls.ended((await calls.score("judge", ARGUMENTS)).reward_id)
        assert ended.state == FAILED
        assert "gave no score: 'Score: eleven' (3 tries)" in ended.error


async def test_an_endpoint_that_is_down_is_not_waited_for(calls: RewardCalls) -> None:
    async with function(judge_says("Score: 10"), port=ONE):
        accepted = [await calls.score("either", ARGUMENTS) for _ in range(6)]
        ended = await calls.ended(*(one.reward_id for one in accepted))
        assert [(one.state, one.score) for one in ended] == [(DONE, 1.0)] * 6


async def test_a_judge_that_refuses_the_question_fails_its_reward(calls: RewardCalls) -> None:
    async with function(says({"error": {"message": "prompt too long"}}, 400), port=ONE) as server:
        [ended] = await calls.ended((await calls.score("judge", ARGUMENTS)).reward_id)
        assert ended.state == FAILED
        assert "prompt too long" in ended.error
        assert len(server.requests) == 1
