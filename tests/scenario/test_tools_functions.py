"""Tools and rewards that are HTTP functions: real servers on loopback that start from zero, refuse, and die."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import web
from support.functions import FunctionServer, Handler, breaks_off, function, is_silent, says, says_text, start_declared
from support.processes import StartService
from support.rewards import RewardCalls
from support.rpc import error_of
from support.tools import ToolsCalls, calls_to, limits
from treadle.tools.v1 import rewards_pb2, tools_pb2
from treadle_tools.functions import SHORTEST_WARM_S

OK, ERROR, TIMED_OUT = (
    tools_pb2.RESULT_STATUS_OK,
    tools_pb2.RESULT_STATUS_TOOL_ERROR,
    tools_pb2.RESULT_STATUS_TIMED_OUT,
)


@asynccontextmanager
async def asking(
    start_service: StartService, folder: Path, server: FunctionServer, env: dict[str, str] | None = None, **fields: Any
) -> AsyncIterator[ToolsCalls]:
    """A tools service with one function, `ask`."""
    document = {"function": [{"name": "ask", "url": server.url, **fields}]}
    process = await start_declared(start_service, folder, document, **(env or {}))
    async with calls_to(process) as calls:
        yield calls


def noted(came: list[float], answer: Handler) -> Handler:
    """The same, and when it was asked."""

    async def handle(request: web.Request) -> web.StreamResponse:
        came.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.02)
        return await answer(request)

    return handle


async def test_arguments_go_as_a_body_and_the_answer_is_the_output(start_service: StartService, tmp_path: Path) -> None:
    async with (
        function(says({"output": "42", "data": {"pages": 3}}), says_text("plain"), says([1, 2])) as server,
        asking(
            start_service,
            tmp_path,
            server,
            {"SEARCH_KEY": "Bearer s3cret"},
            headers={"X-Job": "math"},
            headers_from_env={"Authorization": "SEARCH_KEY"},
            arguments_schema={"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        ) as calls,
    ):
        plain = await calls.invoke({"q": "a"}, tool="ask", trajectory_id="t-1")
        listed = await calls.invoke({"q": "b"}, tool="ask")
        outcome = await calls.invoke({"q": "c"}, tool="ask")
        assert (plain.status, plain.output, plain.data_json) == (OK, "plain", "")
        assert (listed.output, listed.data_json) == ("[1, 2]", "[1, 2]")
        assert (outcome.output, json.loads(outcome.data_json)) == ("42", {"pages": 3})
        assert outcome.timing.execution.ToNanoseconds() > 0
        assert server.bodies == [{"q": "a"}, {"q": "b"}, {"q": "c"}]
        assert {request.headers["Authorization"] for request in server.requests} == {"Bearer s3cret"}
        assert {request.headers["X-Job"] for request in server.requests} == {"math"}
        assert len({request.headers["Idempotency-Key"] for request in server.requests}) == 3
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.invoke({}, tool="ask")
        assert error_of(refused.value).fields == ("arguments_json.q",)
        assert [tool.name for tool in (await calls.stub.ListTools(tools_pb2.ListToolsRequest(), timeout=9)).tools] == [
            "ask"
        ]


async def test_a_get_has_its_arguments_in_the_query(start_service: StartService, tmp_path: Path) -> None:
    async with (
        function(says_text("found")) as server,
        asking(start_service, tmp_path, server, method="GET") as calls,
    ):
        assert (await calls.invoke({"q": "a&b=c", "n": 2}, tool="ask")).output == "found"
        assert server.bodies == [{"q": "a&b=c", "n": "2"}]


async def test_a_function_that_starts_from_zero_is_waited_for(start_service: StartService, tmp_path: Path) -> None:
    """Its start takes longer than a connection may; it is asked once, not again while it starts."""
    async with (
        function(says_text("up"), cold_s=0.8) as server,
        asking(start_service, tmp_path, server, connect_s=0.3) as calls,
    ):
        for _ in range(2):
            server.sleep()
            assert (await calls.invoke({}, tool="ask")).output == "up"
        assert len(server.requests) == 2


async def test_a_refused_call_is_sent_again_and_not_before_it_may(start_service: StartService, tmp_path: Path) -> None:
    """
    WHEN    a function answers 429 with Retry-After, 503, 502, and then the answer
    Result: the caller sees the answer alone; no call came earlier than was asked; all had one Idempotency-Key
    """
    came: list[float] = []

    refusals = (says({}, 429, Retry_After="1"), says({}, 503), says({}, 502))
    async with (
        function(noted(came, says_text("at last")), *(noted(came, one) for one in refusals)) as server,
        asking(start_service, tmp_path, server) as calls,
    ):
        result = await calls.invoke({}, tool="ask")
        assert (result.status, result.output) == (OK, "at last")
        assert len(came) == 4
        assert came[1] - came[0] >= 1.0
        assert result.timing.queue.ToNanoseconds() >= 1e9
        assert len({request.headers["Idempotency-Key"] for request in server.requests}) == 1


async def test_a_proxy_that_refuses_for_a_function_does_not_make_it_a_warm_one(
    start_service: StartService, tmp_path: Path
) -> None:
    """WHEN 503 comes at once, twice, and then the function starts for seconds. Result: it is waited for, and once."""

    async def starting(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(SHORTEST_WARM_S + 1.0)
        return web.Response(text="up")

    async with (
        function(starting, says({}, 503), says({}, 503)) as server,
        asking(start_service, tmp_path, server) as calls,
    ):
        assert (await calls.invoke({}, tool="ask")).output == "up"
        assert len(server.requests) == 3


async def test_a_wait_beyond_the_callers_time_is_not_begun(start_service: StartService, tmp_path: Path) -> None:
    async with (
        function(says({"message": "slow down"}, 429, Retry_After="3600")) as server,
        asking(start_service, tmp_path, server) as calls,
    ):
        result = await calls.invoke({}, tool="ask", limits=limits(5.0))
        assert result.status == ERROR
        assert "HTTP 429" in result.error
        assert "slow down" in result.error
        assert "retry after 3600 s" in result.error
        assert len(server.requests) == 1


async def test_a_silent_function_ends_with_the_callers_time(start_service: StartService, tmp_path: Path) -> None:
    async with function(is_silent()) as server, asking(start_service, tmp_path, server) as calls:
        result = await calls.invoke({}, tool="ask", limits=limits(0.5))
        assert (result.status, result.error) == (TIMED_OUT, "no answer within 0.5 s")
        request = tools_pb2.InvokeRequest(request_id="r", tool="ask", arguments_json="{}")
        result = (await calls.stub.Invoke(request, timeout=1.5)).result  # told before the deadline, not cut by it
        assert result.status == TIMED_OUT


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_lost_answer_is_asked_for_again_only_where_that_is_harmless(
    start_service: StartService, tmp_path: Path, idempotent: bool
) -> None:
    async with (
        function(says_text("second"), breaks_off()) as server,
        asking(start_service, tmp_path, server, idempotent=idempotent) as calls,
    ):
        result = await calls.invoke({}, tool="ask")
        assert (result.status, result.output) == ((OK, "second") if idempotent else (ERROR, ""))
        assert len(server.requests) == (2 if idempotent else 1)


async def test_one_that_is_down_is_tried_until_it_is_back(start_service: StartService, tmp_path: Path) -> None:
    async with (
        function(says_text("back")) as server,
        asking(start_service, tmp_path, server, tries=100, idempotent=False) as calls,
    ):
        await server.stop()
        waiting = asyncio.create_task(calls.invoke({}, tool="ask"))
        await asyncio.sleep(0.5)
        await server.start()
        assert (await waiting).output == "back"
        await server.stop()
        result = await calls.invoke({}, tool="ask", limits=limits(1.0))
        assert result.status in (ERROR, TIMED_OUT)


REFUSALS = [
    (says({"error": "no such page"}, 404), "HTTP 404"),
    (says({}, 500), "HTTP 500"),
    (says({}, 302, Location="http://127.0.0.1:1/"), "HTTP 302"),
    (says_text("x" * 5000), "more than 4096 bytes"),
]


async def test_what_is_no_answer_is_an_error_and_not_tried_again(start_service: StartService, tmp_path: Path) -> None:
    async with (
        function(says_text("never"), *(handler for handler, _ in REFUSALS)) as server,
        asking(start_service, tmp_path, server, response_bytes=4096) as calls,
    ):
        for count, (_, words) in enumerate(REFUSALS, 1):
            result = await calls.invoke({}, tool="ask")
            assert result.status == ERROR
            assert words in result.error
            assert len(server.requests) == count


async def test_a_long_output_is_cut_and_said_to_be(start_service: StartService, tmp_path: Path) -> None:
    async with function(says_text("x" * 5000)) as server, asking(start_service, tmp_path, server) as calls:
        result = await calls.invoke({}, tool="ask", limits=tools_pb2.Limits(output_bytes=100))
        assert result.output_truncated
        assert result.output == "x" * 100 + "\n[output cut at 100 bytes]"


async def test_no_more_calls_than_allowed_are_under_way(start_service: StartService, tmp_path: Path) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return web.Response(text="ok")

    async with function(slow) as server, asking(start_service, tmp_path, server, at_once=3) as calls:
        await asyncio.gather(*(calls.invoke({}, tool="ask") for _ in range(12)))
        assert server.most_at_once == 3
        assert len(server.requests) == 12


async def test_a_reward_that_is_a_function_is_asked_until_it_answers(
    start_service: StartService, tmp_path: Path
) -> None:
    """A refusal is no score: the reward stays, and is asked again when its own tries are used up."""
    async with (
        function(says({"score": 0.75}), says({}, 503), says({}, 503), says(0.5)) as server,
        asking(start_service, tmp_path, server, kind="reward", tries=1) as calls,
        grpc.aio.insecure_channel(calls.process.address) as channel,
    ):
        rewards = RewardCalls(channel)
        first = await rewards.score("ask", {"answer": "a"})
        [ended] = await rewards.ended(first.reward_id)
        assert (ended.state, ended.score, ended.tries) == (rewards_pb2.REWARD_STATE_DONE, 0.5, 1)
        [ended] = await rewards.ended((await rewards.score("ask", {"answer": "b"})).reward_id)
        assert (ended.score, server.bodies[-1]) == (0.75, {"answer": "b"})
        assert len(server.requests) == 4


async def test_a_bad_declaration_ends_the_service_with_one_line(start_service: StartService, tmp_path: Path) -> None:
    for fields, words in (({"url": "http://example.org/"}, "FUNCTION_HOSTS"), ({"name": "a b"}, "a b")):
        declared = {"name": "ask", "url": "http://127.0.0.1:1/", **fields}
        with pytest.raises(AssertionError) as refused:
            await start_declared(start_service, tmp_path, {"function": [declared]})
        assert words in str(refused.value).splitlines()[-1]


def provider_file(folder: Path, text: str) -> dict[str, str]:
    """The setting that describes the provider `search`."""
    path = folder / "providers.toml"
    path.write_text(f'[[provider]]\nname = "search"\n{text}\n')
    return {"TREADLE_TOOLS_PROVIDERS_FILE": str(path)}


async def test_calls_of_all_keep_within_what_their_provider_allows(start_service: StartService, tmp_path: Path) -> None:
    came: list[float] = []
    env = provider_file(tmp_path, "concurrency = 2\nquota = [{ count = 4, period_s = 1.0, slack_s = 0.2 }]")
    async with (
        function(noted(came, says_text("ok"))) as server,
        asking(start_service, tmp_path, server, env, provider="search") as calls,
    ):
        results = await asyncio.gather(*(calls.invoke({}, tool="ask", trajectory_id=f"t-{n}") for n in range(10)))
        assert [result.status for result in results] == [OK] * 10
        assert server.most_at_once <= 2
        assert all(later - earlier >= 1.0 for earlier, later in zip(came, came[4:], strict=False))


async def test_a_provider_that_refuses_one_is_left_alone_by_all(start_service: StartService, tmp_path: Path) -> None:
    """
    WHEN    one call is refused for a second, while another call is made
    Result: neither reaches the provider before the second is over; both are answered
    """
    came: list[float] = []
    env = provider_file(tmp_path, "concurrency = 8")
    refusal = noted(came, says({}, 429, Retry_After="1"))
    async with (
        function(noted(came, says_text("ok")), refusal) as server,
        asking(start_service, tmp_path, server, env, provider="search") as calls,
    ):
        first = asyncio.create_task(calls.invoke({}, tool="ask"))
        while not came:  # noqa: ASYNC110 - it is another process that asks
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        second = asyncio.create_task(calls.invoke({}, tool="ask"))
        assert [(await first).output, (await second).output] == ["ok", "ok"]
        assert len(came) == 3
        assert min(came[1:]) - came[0] >= 1.0


async def test_a_provider_that_is_left_alone_for_too_long_is_not_waited_for(
    start_service: StartService, tmp_path: Path
) -> None:
    env = provider_file(tmp_path, "concurrency = 8")
    async with (
        function(says({}, 429, Retry_After="600")) as server,
        asking(start_service, tmp_path, server, env, provider="search") as calls,
    ):
        for words in ("HTTP 429", "provider 'search' is left alone for another"):
            result = await calls.invoke({}, tool="ask", limits=limits(5.0))
            assert result.status == ERROR
            assert words in result.error
        assert len(server.requests) == 1
