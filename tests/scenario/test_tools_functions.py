"""Tools and rewards that are HTTP functions: real servers on loopback that start from zero, refuse,
and die; and LLM judges, asked over OpenAI's chat API at several endpoints until there is a score.
"""

import asyncio
import contextlib
import itertools
import json
import uuid
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc.aio
import pytest
from aiohttp import web
from support.conditions import until_said
from support.functions import FunctionServer, Handler, breaks_off, function, is_silent, says
from support.processes import ServiceProcess, free_port
from support.rewards import RewardCalls
from support.rpc import refusal_of
from support.tools import ToolsCalls, limits, shared_tools
from treadle.tools.v1 import rewards_pb2, tools_pb2
from treadle.tools.v1.rewards_pb2 import REWARD_STATE_DONE as DONE
from treadle.tools.v1.rewards_pb2 import REWARD_STATE_FAILED as FAILED
from treadle_core.tools.dispatcher import Dispatcher, Resources
from treadle_tools.actions import ActionScheduler
from treadle_tools.remote import HttpFunction, functions
from treadle_tools.remote.functions import Caller

OK, ERROR, TIMED_OUT = (
    tools_pb2.RESULT_STATUS_OK,
    tools_pb2.RESULT_STATUS_TOOL_ERROR,
    tools_pb2.RESULT_STATUS_TIMED_OUT,
)
# Each test has functions of its own, as the service learns how long each takes.
FUNCTIONS: dict[str, dict[str, Any]] = {
    "search": {
        "headers": {"X-Job": "math"},
        "headers_from_env": {"Authorization": "SEARCH_KEY"},
        "arguments_schema": {
            "type": "object",
            "properties": {"q": {"type": "string"}},
            "required": ["q"],
        },
    },
    "get": {"method": "GET"},
    "asleep": {"connect_s": 0.2},
    "refusing_for_long": {},
    "silent": {},
    "idempotent": {},
    "not_idempotent": {"idempotent": False},
    "down": {"tries": 100, "idempotent": False},
    "short": {"response_bytes": 4096},
    "long": {},
    "narrow": {"at_once": 3},
    "graded": {"kind": "reward", "tries": 1},
    "with_quota": {"provider": "with_quota"},
    "with_a_pause": {"provider": "with_a_pause"},
    "with_a_long_pause": {"provider": "with_a_long_pause"},
}
PORTS = {name: free_port() for name in (*FUNCTIONS, "one", "down for good")}
JUDGES = [
    {
        "name": name,
        "prompt": "Question: $question\nAnswer: $answer\nEnd with `Score: N`, from 0 to 10.",
        "endpoints": [f"http://127.0.0.1:{PORTS[server]}" for server in servers],
        "authorization_from_env": "SEARCH_KEY",
        "model": "big",
        "max_tokens": 99,
    }
    for name, servers in {"judge": ["one"], "either": ["down for good", "one"]}.items()
]
QUESTION = {"question": "1+1?", "answer": "2"}
PROVIDERS = """
[[provider]]
name = "with_quota"
concurrency = 2
quota = [{ count = 4, period_s = 1.0, slack_s = 0.9 }]
[[provider]]
name = "with_a_pause"
[[provider]]
name = "with_a_long_pause"
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A tools service with all FUNCTIONS and JUDGES."""
    folder = tmp_path_factory.mktemp("functions")
    declared = [
        {"name": name, "url": f"http://127.0.0.1:{PORTS[name]}/", **more}
        for name, more in FUNCTIONS.items()
    ]
    (folder / "functions.json").write_text(json.dumps({"function": declared, "judge": JUDGES}))
    (folder / "providers.toml").write_text(PROVIDERS)
    files = {
        "FUNCTIONS": str(folder / "functions.json"),
        "PROVIDERS_FILE": str(folder / "providers.toml"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEARCH_KEY", "Bearer s3cret")
        with shared_tools(folder, FUNCTION_HOSTS="127.0.0.1", REWARDS="", **files) as process:
            yield process


def served(
    name: str, last: Handler, *answers: Handler, cold_s: float = 0.0
) -> AbstractAsyncContextManager[FunctionServer]:
    """The function of FUNCTIONS, or the server of a judge, up."""
    return function(last, *answers, cold_s=cold_s, port=PORTS[name])


def noted(came: list[float], answer: Handler) -> Handler:
    """The same, and when it was asked."""

    async def handle(request: web.Request) -> web.StreamResponse:
        came.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.02)
        return await answer(request)

    return handle


async def test_arguments_go_as_a_body_and_the_answer_is_the_output(calls: ToolsCalls) -> None:
    async with served(
        "search", says({"output": "42", "data": {"pages": 3}}), says("plain"), says([1, 2])
    ) as server:
        plain = await calls.invoke({"q": "a"}, tool="search", trajectory_id="t-1")
        listed = await calls.invoke({"q": "b"}, tool="search")
        outcome = await calls.invoke({"q": "c"}, tool="search")
        assert (plain.status, plain.output, plain.data_json) == (OK, "plain", "")
        assert (listed.output, listed.data_json) == ("[1, 2]", "[1, 2]")
        assert (outcome.output, json.loads(outcome.data_json)) == ("42", {"pages": 3})
        assert outcome.timing.execution.ToNanoseconds() > 0
        assert server.bodies == [{"q": "a"}, {"q": "b"}, {"q": "c"}]
        assert {request.headers["Authorization"] for request in server.requests} == {
            "Bearer s3cret"
        }
        assert {request.headers["X-Job"] for request in server.requests} == {"math"}
        assert len({request.headers["Idempotency-Key"] for request in server.requests}) == 3
        assert (await refusal_of(calls.invoke({}, tool="search"))).fields == ("arguments_json.q",)
        listed_tools = (await calls.stub.ListTools(tools_pb2.ListToolsRequest(), timeout=9)).tools
        assert {tool.name for tool in listed_tools} == set(FUNCTIONS) - {"graded"}


async def test_a_get_has_its_arguments_in_the_query(calls: ToolsCalls) -> None:
    async with served("get", says("found")) as server:
        assert (await calls.invoke({"q": "a&b=c", "n": 2}, tool="get")).output == "found"
        assert server.bodies == [{"q": "a&b=c", "n": "2"}]


async def test_a_function_that_starts_from_zero_is_waited_for(calls: ToolsCalls) -> None:
    """Its start takes longer than a connection may; it is asked once, not again while it starts."""
    async with served("asleep", says("up"), cold_s=0.5) as server:
        for _ in range(2):
            server.sleep()
            assert (await calls.invoke({}, tool="asleep")).output == "up"
        assert len(server.requests) == 2


async def test_a_proxy_that_refuses_for_a_function_does_not_make_it_a_warm_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """WHEN 503 comes at once, twice, and then the function starts slowly. Result: it is waited for,
    and once."""
    monkeypatch.setattr(functions, "SHORTEST_WARM_S", 0.1)

    async def starting(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return web.Response(text="up")

    caller = Caller(ActionScheduler(Dispatcher(Resources([]), 0.0), 0), {}, itertools.count(), {})
    async with function(starting, says({}, 503), says({}, 503)) as server:
        assert (await caller.call(HttpFunction(name="ask", url=server.url), {}, 60.0)).body == b"up"
        assert len(server.requests) == 3
    await caller.close()


async def test_a_wait_beyond_the_callers_time_is_not_begun(calls: ToolsCalls) -> None:
    async with served(
        "refusing_for_long", says({"message": "slow down"}, 429, Retry_After="3600")
    ) as server:
        result = await calls.invoke({}, tool="refusing_for_long", limits=limits(5.0))
        assert result.status == ERROR
        assert all(
            words in result.error for words in ("HTTP 429", "slow down", "retry after 3600 s")
        )
        assert len(server.requests) == 1


async def test_a_silent_function_ends_with_the_callers_time(calls: ToolsCalls) -> None:
    async with served("silent", is_silent()):
        result = await calls.invoke({}, tool="silent", limits=limits(0.2))
        assert (result.status, result.error) == (TIMED_OUT, "no answer within 0.2 s")

        async def asked() -> tools_pb2.ToolResult | None:
            request = tools_pb2.InvokeRequest(
                request_id=uuid.uuid4().hex, tool="silent", arguments_json="{}"
            )
            with contextlib.suppress(grpc.aio.AioRpcError):
                return (await calls.stub.Invoke(request, timeout=1.0)).result
            return None

        # before a deadline; a busy machine may be too late for one
        told = await until_said(asked, lambda said: said)
        assert told is not None and told.status == TIMED_OUT


@pytest.mark.parametrize(
    ("name", "wanted", "asked"),
    [("idempotent", (OK, "second"), 2), ("not_idempotent", (ERROR, ""), 1)],
)
async def test_a_lost_answer_is_asked_for_again_only_where_that_is_harmless(
    calls: ToolsCalls, name: str, wanted: tuple[int, str], asked: int
) -> None:
    async with served(name, says("second"), breaks_off()) as server:
        result = await calls.invoke({}, tool=name)
        assert (result.status, result.output) == wanted
        assert len(server.requests) == asked


async def test_one_that_is_down_is_tried_until_it_is_back(calls: ToolsCalls) -> None:
    waiting = asyncio.create_task(calls.invoke({}, tool="down"))
    await asyncio.sleep(0.5)
    async with served("down", says("back")):
        assert (await waiting).output == "back"
    result = await calls.invoke({}, tool="down", limits=limits(1.0))
    assert result.status in (ERROR, TIMED_OUT)


REFUSALS = [
    (says({"error": "no such page"}, 404), "HTTP 404"),
    (says({}, 500), "HTTP 500"),
    (says({}, 302, Location="http://127.0.0.1:1/"), "HTTP 302"),
    (says("x" * 5000), "more than 4096 bytes"),
]


async def test_what_is_no_answer_is_an_error_and_not_tried_again(calls: ToolsCalls) -> None:
    async with served("short", says("never"), *(handler for handler, _ in REFUSALS)) as server:
        for count, (_, words) in enumerate(REFUSALS, 1):
            result = await calls.invoke({}, tool="short")
            assert result.status == ERROR
            assert words in result.error
            assert len(server.requests) == count


async def test_a_long_output_is_cut_and_said_to_be(calls: ToolsCalls) -> None:
    async with served("long", says("x" * 5000)):
        result = await calls.invoke({}, tool="long", limits=tools_pb2.Limits(output_bytes=100))
        assert result.output_truncated
        assert result.output == "x" * 100 + "\n[output cut at 100 bytes]"


async def test_no_more_calls_than_allowed_are_under_way(calls: ToolsCalls) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return web.Response(text="ok")

    async with served("narrow", slow) as server:
        await asyncio.gather(*(calls.invoke({}, tool="narrow") for _ in range(12)))
        assert server.most_at_once == 3
        assert len(server.requests) == 12


async def test_rewards_say_whether_they_run_behind_a_url(rewards: RewardCalls) -> None:
    listed = await rewards.stub.ListRewards(rewards_pb2.ListRewardsRequest(), timeout=9)
    assert {one.name: one.serverless for one in listed.rewards} == {
        "graded": True,
        **{j["name"]: True for j in JUDGES},
    }


async def test_a_reward_that_is_a_function_is_asked_until_it_answers(rewards: RewardCalls) -> None:
    """A refusal is no score: the reward stays, and is asked again when its own tries are used
    up."""
    async with served("graded", says({"score": 0.75}), says({}, 503), says(0.5)) as server:
        ended = await rewards.end("graded", {"answer": "a"})
        assert (ended.state, ended.score, ended.tries) == (DONE, 0.5, 1)
        ended = await rewards.end("graded", {"answer": "b"})
        assert (ended.score, server.bodies[-1]) == (0.75, {"answer": "b"})
        assert len(server.requests) == 3


async def test_calls_of_all_keep_within_what_their_provider_allows(calls: ToolsCalls) -> None:
    came: list[float] = []
    async with served("with_quota", noted(came, says("ok"))) as server:
        results = await asyncio.gather(*(calls.invoke({}, tool="with_quota") for _ in range(10)))
        assert [result.status for result in results] == [OK] * 10
        assert server.most_at_once <= 2
        assert all(later - earlier >= 1.0 for earlier, later in zip(came, came[4:], strict=False))


async def test_a_refused_call_is_sent_again_and_a_provider_is_left_alone_by_all(
    calls: ToolsCalls,
) -> None:
    """WHEN    a function answers a call with 429 and Retry-After, 503 and 502, and another call is
    made after the first
    Result: nothing reaches its provider before the time that it asked for is over; both callers see
    the answer
            alone; all tries of a call have one Idempotency-Key"""
    came: list[float] = []
    refusals = (says({}, 429, Retry_After="2"), says({}, 503), says({}, 502))
    handlers = (noted(came, answer) for answer in (says("at last"), *refusals))
    async with served("with_a_pause", *handlers) as server:
        first = asyncio.create_task(calls.invoke({"call": 1}, tool="with_a_pause"))
        await until_said(
            calls.resources,
            lambda said: "with_a_pause" in {p.name for p in said.providers if p.rests.nanos},
        )
        second = asyncio.create_task(calls.invoke({"call": 2}, tool="with_a_pause"))
        results = [await first, await second]
        assert [(result.status, result.output) for result in results] == [(OK, "at last")] * 2
        assert len(came) == 5
        assert min(came[1:]) - came[0] >= 2.0
        assert results[0].timing.queue.ToNanoseconds() >= 2e9
        keys = [request.headers["Idempotency-Key"] for request in server.requests]
        assert (
            len({(body["call"], key) for body, key in zip(server.bodies, keys, strict=True)})
            == len(set(keys))
            == 2
        )


async def test_a_provider_that_is_left_alone_for_too_long_is_not_waited_for(
    calls: ToolsCalls,
) -> None:
    async with served("with_a_long_pause", says({}, 429, Retry_After="600")) as server:
        for words in ("HTTP 429", "provider 'with_a_long_pause' is left alone for another"):
            result = await calls.invoke({}, tool="with_a_long_pause", limits=limits(5.0))
            assert result.status == ERROR
            assert words in result.error
        assert len(server.requests) == 1


def judge_says(text: str | None) -> Handler:
    """A chat completion with this content, where the test is of what is asked and what is made of
    the answer."""
    message = {"role": "assistant", "content": text}
    return says({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


async def test_a_judge_reads_the_trajectory_and_its_score_is_the_reward(
    rewards: RewardCalls,
) -> None:
    async with served("one", judge_says("It is right.\nScore: 8")) as server:
        ended = await rewards.end("judge", QUESTION)
        assert (ended.state, ended.score, ended.output) == (DONE, 0.8, "It is right.\nScore: 8")
        assert ended.timing.execution.ToNanoseconds() > 0
        [body] = server.bodies
        assert body["messages"] == [
            {
                "role": "user",
                "content": "Question: 1+1?\nAnswer: 2\nEnd with `Score: N`, from 0 to 10.",
            }
        ]
        assert (body["model"], body["max_tokens"]) == ("big", 99)
        [request] = server.requests
        assert (request.path, request.headers["Authorization"]) == (
            "/v1/chat/completions",
            "Bearer s3cret",
        )
        refused = await refusal_of(rewards.score("judge", {"question": "1+1?"}))
        assert refused.fields == ("arguments_json.answer",)


async def test_a_judge_without_a_score_is_asked_again_and_otherwise(rewards: RewardCalls) -> None:
    """WHEN it never gives one. Result: the reward has failed, and says what the judge said."""
    answers = [
        judge_says("Score: eleven"),
        judge_says("hm"),
        judge_says(None),
        judge_says("Score: 2"),
    ]
    async with served("one", *answers) as server:
        ended = await rewards.end("judge", QUESTION)
        assert (ended.state, ended.score) == (DONE, 0.2)
        assert [body["temperature"] for body in server.bodies] == [0.0, 0.7, 0.7]
        ended = await rewards.end("judge", QUESTION)
        assert ended.state == FAILED
        assert "gave no score: 'Score: eleven' (3 tries)" in ended.error


async def test_an_endpoint_that_is_down_is_not_waited_for(rewards: RewardCalls) -> None:
    async with served("one", judge_says("Score: 10")):
        accepted = [await rewards.score("either", QUESTION) for _ in range(6)]
        ended = await rewards.ended(*(one.reward_id for one in accepted))
        assert [(one.state, one.score) for one in ended] == [(DONE, 1.0)] * 6


async def test_a_judge_that_refuses_the_question_fails_its_reward(rewards: RewardCalls) -> None:
    async with served("one", says({"error": {"message": "prompt too long"}}, 400)) as server:
        ended = await rewards.end("judge", QUESTION)
        assert ended.state == FAILED
        assert "prompt too long" in ended.error
        assert len(server.requests) == 1
