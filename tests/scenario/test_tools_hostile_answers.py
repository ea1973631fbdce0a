"""Tools, functions and judges that answer whatever they like: the service stays up, and each call
ends by itself."""

import asyncio
import base64
import json
import math
import os
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from aiohttp import web
from support.conditions import until_said
from support.functions import function
from support.hostile import HOSTILE_CODE, HOSTILE_TOOLS, hostile_answer, hostile_body
from support.processes import StartService, free_port
from support.rewards import RewardCalls, rewards_of
from support.tools import ToolsCalls, calls_to, environment, limits, write_tools
from treadle.tools.v1 import rewards_pb2 as rewards
from treadle.tools.v1 import tools_pb2 as pb
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import Bus
from treadle_tools.rewards.reward import BUCKET, PART

ANSWERS = int(os.environ.get("TREADLE_TEST_HOSTILE_ANSWERS", "100"))  # of each kind
AT_ONCE = 16
ENDED = (rewards.REWARD_STATE_DONE, rewards.REWARD_STATE_FAILED)


def hostile(rng: Random, **more: Any) -> dict[str, Any]:
    """Arguments of a tool of support/hostile.py."""
    return {"bytes": base64.b64encode(zlib.compress(hostile_answer(rng))).decode(), **more}


async def ends_of(call: Callable[[], Awaitable[str]]) -> set[str]:
    """How ANSWERS calls end, AT_ONCE at a time."""
    found: set[str] = set()
    for begin in range(0, ANSWERS, AT_ONCE):
        found |= set(
            await asyncio.gather(*(call() for _ in range(begin, min(begin + AT_ONCE, ANSWERS))))
        )
    return found


async def result_of(call: Awaitable[pb.ToolResult]) -> str:
    """How a call of a hostile tool ends: a result that holds what it must, or a refusal of an
    argument."""
    try:
        result = await call
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return "refused"
    assert math.isfinite(result.reward)
    return pb.ResultStatus.Name(result.status).removeprefix("RESULT_STATUS_")


async def call(calls: ToolsCalls, rng: Random) -> str:
    return await result_of(calls.invoke(hostile(rng), tool="hostile_call"))


async def step(calls: ToolsCalls, rng: Random) -> str:
    opened = await calls.open("HostileWorld")
    session_id = opened.session.session_id
    arguments = hostile(rng, ends=rng.random() < 0.5)
    ended = await result_of(calls.step(session_id, arguments, limits=limits(0.3)))
    await calls.close(session_id)
    return ended


async def score(calls: RewardCalls, name: str, arguments: dict[str, Any]) -> str:
    ended = await calls.end(name, arguments)
    assert ended.state in ENDED
    assert not ended.HasField("score") or 0.0 <= ended.score <= 1.0
    return rewards.RewardState.Name(ended.state).removeprefix("REWARD_STATE_")


async def hostile_server(rng: Random, port: int) -> Any:
    """A function whose every answer is another one."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = hostile_body(rng)
        if request.path.endswith("completions") and rng.random() < 0.5:
            content = rng.choice(
                ["score: " + "9" * 500, "score: nan", "score: 1e999", "score: 5", None, 7, "x" * 99]
            )
            body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        return web.Response(
            body=body, content_type="application/json", status=rng.choice([200, 200, 200, 404])
        )

    return function(answer, port=port)


@pytest.mark.timeout(1800)
async def test_hostile_answers_leave_the_service_up_with_nothing_lost(
    start_service: StartService, bus: Bus, tmp_path: Path
) -> None:
    """Sandboxes, HTTP functions and judges. Result: every call ends; all slots, cells and sessions
    are free, no arguments are left in the journal, a call of an honest tool works; and a restart on
    the same store does."""
    rng, ports = Random(7), (free_port(), free_port())
    declared = {
        "function": [
            {
                "name": "far",
                "kind": "reward",
                "url": f"http://127.0.0.1:{ports[0]}/",
                "low": 0.0,
                "high": 1.0,
                "tries": 1,
            }
        ],
        "judge": [
            {
                "name": "judge",
                "prompt": "$answer",
                "endpoints": [f"http://127.0.0.1:{ports[1]}"],
                "tries": 1,
            }
        ],
    }
    (tmp_path / "functions.json").write_text(json.dumps(declared))
    own = write_tools(tmp_path, HOSTILE_TOOLS, HOSTILE_CODE)
    own |= {
        "REWARDS": "",
        "FUNCTIONS": str(tmp_path / "functions.json"),
        "FUNCTION_HOSTS": "127.0.0.1",
    }
    settings = environment(**own, WARM_SANDBOXES="4", REWARD_SLOTS=str(AT_ONCE))
    process = await start_service("treadle_tools", settings)
    async with (
        await hostile_server(rng, ports[0]),
        await hostile_server(rng, ports[1]),
        calls_to(process) as calls,
        rewards_of(process) as scores,
    ):
        before = await calls.resources()
        assert await ends_of(lambda: call(calls, rng)) >= {"OK", "CRASHED"}
        assert await ends_of(lambda: step(calls, rng)) >= {"OK", "CRASHED"}
        assert await ends_of(lambda: score(scores, "hostile_score", hostile(rng))) == {
            "DONE",
            "FAILED",
        }
        assert await ends_of(lambda: score(scores, "far", {})) == {"DONE", "FAILED"}
        assert await ends_of(lambda: score(scores, "judge", {"answer": "x"})) == {"DONE", "FAILED"}
        await until_said(
            calls.resources,
            lambda now: now.resources == before.resources and not now.actions_running,
        )
        stored = await entries_of(await bus.key_value(BUCKET), keys_only=True)
        assert [entry.key for entry in stored if f".{PART}." in entry.key] == []
        assert (await calls.invoke({}, tool="hostile_call")).output == "fine"
        assert (await scores.end("hostile_score", {})).score == 0.5
    process.terminate()
    assert await process.wait() == 0
    again = await start_service("treadle_tools", settings)
    async with calls_to(again) as calls, rewards_of(again) as scores:
        assert (await calls.invoke({}, tool="hostile_call")).output == "fine"
        assert (await scores.end("hostile_score", {})).score == 0.5
