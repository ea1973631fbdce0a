"""What actions are granted, for real: cores of their own, more of them where that helps, and turns at a provider."""

import asyncio
import json
import os
import time
import uuid
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from support.conditions import until_said
from support.processes import StartService
from support.rpc import error_of
from support.tools import ToolsCalls, own_tools, tools
from treadle.tools.v1 import tools_pb2 as pb

TOOLS = """
from treadle_tools.tool import Kind, Limits, Scaling, Tool

ANYTHING = {"type": "object"}
TOOLS = [
    Tool("spread", Kind.STATELESS, "", "own_code:spread", ANYTHING, limits=Limits(cpu_cores=2),
         scaling=Scaling((1, 2), serial_share=0.1, single_core_s=1.0)),
    Tool("room", Kind.ENVIRONMENT, "", "own_code:Room", ANYTHING, limits=Limits(cpu_cores=2),
         scaling=Scaling((1, 2), single_core_s=1.0)),
    Tool("search", Kind.STATELESS, "", "own_code:search", ANYTHING, provider="web"),
]
"""

CODE = """
import json, os, time
from treadle_tools.tool import Outcome, Status


def spread(arguments):
    time.sleep(arguments.get("for_s", 0.0))
    return Outcome(output=f"{os.environ['TREADLE_CORES']} {sorted(os.sched_getaffinity(0))}")


class Room:
    def __init__(self, arguments, sandbox):
        self.sandbox = sandbox

    def first(self):
        return Outcome(output=str(self.sandbox.cores))

    def step(self, arguments):
        inside = self.sandbox.python("import os; print(os.environ['TREADLE_CORES'])").output
        return Outcome(output=f"{self.sandbox.cores} {inside}")


def search(arguments):
    if arguments.get("fail"):
        raise ConnectionError("no route to the provider")
    left = arguments.get("until", 0.0) - time.time()
    return Outcome(retry_after_s=left) if left > 0 else Outcome(output=str(time.time()))
"""

PINS = Path("/sys/fs/cgroup/cpuset").is_dir() and os.access("/sys/fs/cgroup/cpuset", os.W_OK)
pins = pytest.mark.skipif(not PINS or len(os.sched_getaffinity(0)) < 2, reason="needs two cores and cpuset to write")


def elastic_tools(
    start_service: StartService, folder: Path, *builtin: str, **settings: str
) -> AbstractAsyncContextManager[ToolsCalls]:
    (folder / "providers.toml").write_text(
        "[[provider]]\nname = 'web'\nconcurrency = 1\nquota = [{ count = 5, period_s = 3600 }]\n"
        "breaker = { failures = 2, cooldown_s = 600, longest_cooldown_s = 600 }\n"
    )
    providers = str(folder / "providers.toml")
    return own_tools(start_service, folder, TOOLS, CODE, *builtin, PROVIDERS_FILE=providers, **settings)


async def dimension(calls: ToolsCalls, name: str) -> pb.Resource:
    return next(each for each in (await calls.resources()).resources if each.dimension == name)


@pins
async def test_an_action_sees_the_cores_that_are_its_own(start_service: StartService) -> None:
    """
    WHEN    two snippets run at a time on a node of two cores
    Result: each sees one core, and not the other's
    """
    code = "import os, time; print(sorted(os.sched_getaffinity(0)), os.environ['TREADLE_CORES']); time.sleep({})"
    async with tools(start_service, "python", CORES="2") as calls:
        long = asyncio.create_task(calls.python(code.format(3)))
        await until_said(calls.resources, lambda said: said.actions_running == 1)
        both = [await calls.python(code.format(0)), await long]
        first, second = sorted(os.sched_getaffinity(0))[:2]
        assert sorted(result.output for result in both) == [f"[{first}] 1\n", f"[{second}] 1\n"]


async def test_without_pinning_an_action_may_run_anywhere(start_service: StartService) -> None:
    async with tools(start_service, "python", PIN="off") as calls:
        result = await calls.python("import os; print(sorted(os.sched_getaffinity(0)))")
        assert json.loads(result.output) == sorted(os.sched_getaffinity(0))


@pins
async def test_an_elastic_action_gets_all_cores_alone_and_fewer_among_others(
    start_service: StartService, tmp_path: Path
) -> None:
    """
    WHEN    an action that scales is alone; then two come together; then one comes while a core is held
    Result: it gets both cores; one each; the one that is free. Its program is told how many, and sees no others.
    """
    first, second = sorted(os.sched_getaffinity(0))[:2]
    async with elastic_tools(start_service, tmp_path, "python", CORES="2") as calls:
        assert (await calls.invoke({}, tool="spread")).output == f"2 {[first, second]}"
        both = await asyncio.gather(*(calls.invoke({"for_s": 0.5}, tool="spread") for _ in range(2)))
        assert sorted(result.output for result in both) in (
            [f"1 [{first}]", f"1 [{second}]"],
            [f"2 {[first, second]}"] * 2,  # the second came when the first had its turn already, and waited for it
        )
        held = asyncio.create_task(calls.python("import time; time.sleep(8)"))
        await until_said(calls.resources, lambda said: said.actions_running == 1)
        assert (await calls.invoke({}, tool="spread")).output in (f"1 [{first}]", f"1 [{second}]")
        held.cancel()


async def test_an_environment_is_told_its_cores_at_each_step(start_service: StartService, tmp_path: Path) -> None:
    async with elastic_tools(start_service, tmp_path, CORES="2") as calls:
        opened = await calls.open("room")
        assert opened.first.output == "2"
        assert (await calls.step(opened.session.session_id, {})).output == "2 2\n"


async def test_a_session_keeps_memory_until_it_is_closed(start_service: StartService) -> None:
    """
    GIVEN   memory for one session
    WHEN    a second is opened
    Result: it waits, and opens when the first is closed; steps of the first and calls of other tools do not wait
    """
    mib = 1024 * 1024
    async with tools(start_service, "python", "frozen_lake", MEMORY_BYTES=str(24 * mib)) as calls:
        first = (await calls.open("frozen_lake")).session.session_id
        assert (await dimension(calls, "memory_bytes")).held == 16 * mib
        second = asyncio.create_task(calls.open("frozen_lake"))
        await until_said(calls.resources, lambda said: said.actions_waiting == 1)
        for action in ("left", "up"):  # against the walls: it goes on
            await calls.step(first, {"action": action})
        assert (await calls.python("1 + 1")).output == "2\n"
        assert not second.done()
        await calls.close(first)
        await calls.close((await second).session.session_id)
        assert (await dimension(calls, "memory_bytes")).held == 0


async def test_resources_tell_what_is_held_and_who_waits(start_service: StartService, tmp_path: Path) -> None:
    async with elastic_tools(start_service, tmp_path, "python", CORES="1") as calls:
        idle = await calls.resources()
        figures = {each.dimension: (each.capacity, each.held, each.free) for each in idle.resources}
        memory_bytes, held, free = figures.pop("memory_bytes")
        assert (held, free) == (0, memory_bytes)
        assert figures == {"cpu_cores": (1, 0, 1), "api_concurrency:web": (1, 0, 1), "api_quota:web": (5, 0, 5)}
        assert [(each.name, each.breaker, each.rests.seconds) for each in idle.providers] == [
            ("web", pb.BREAKER_STATE_CLOSED, 0)
        ]
        calling = [asyncio.create_task(calls.python("import time; time.sleep(8)")) for _ in range(3)]
        busy = await until_said(calls.resources, lambda said: said.actions_waiting == 2)
        assert (busy.actions_running, busy.actions_waiting) == (1, 2)
        cores = next(each for each in busy.resources if each.dimension == "cpu_cores")
        assert (cores.held, cores.free, cores.waiting) == (1, 0, 2)
        calling[2].cancel()
        await until_said(calls.resources, lambda said: said.actions_waiting == 1)
        for call in calling:
            call.cancel()
        await until_said(calls.resources, lambda said: said.actions_waiting + said.actions_running == 0)


async def test_a_refused_call_is_made_again_when_the_provider_allows_it(
    start_service: StartService, tmp_path: Path
) -> None:
    """
    WHEN    a provider refuses a call for some seconds, and another call comes meanwhile
    Result: both are answered, after that time; the refused one took two of the quota
    """
    async with elastic_tools(start_service, tmp_path, CORES="2") as calls:
        await calls.invoke({}, tool="search")  # the worker is there
        refused_until = time.time() + 3.0
        first = asyncio.create_task(calls.invoke({"until": refused_until}, tool="search"))
        resting = await until_said(calls.resources, lambda said: said.providers[0].rests.nanos)
        assert {each.dimension: each.free for each in resting.resources}["api_concurrency:web"] == 0
        second = await calls.invoke({}, tool="search")
        for result in (await first, second):
            assert result.status == pb.RESULT_STATUS_OK
            assert float(result.output) >= refused_until
        assert (await dimension(calls, "api_quota:web")).held == 4


async def test_a_call_that_is_refused_beyond_its_callers_time_says_so(
    start_service: StartService, tmp_path: Path
) -> None:
    """
    WHEN    a provider refuses for a minute, and the callers have a few seconds
    Result: the refused one reads that it was; the next is not made: UNAVAILABLE, with the time to retry after
    """
    async with elastic_tools(start_service, tmp_path, CORES="2") as calls:
        request = pb.InvokeRequest(request_id=uuid.uuid4().hex, tool="search")
        request.arguments_json = json.dumps({"until": time.time() + 60})
        refused = (await calls.stub.Invoke(request, timeout=20)).result
        assert refused.status == pb.RESULT_STATUS_TOOL_ERROR
        assert refused.error.startswith("the provider refuses for ")
        with pytest.raises(grpc.aio.AioRpcError) as unavailable:
            await calls.stub.Invoke(
                pb.InvokeRequest(request_id=uuid.uuid4().hex, tool="search", arguments_json="{}"), timeout=20
            )
        error = error_of(unavailable.value)
        assert error[:2] == (grpc.StatusCode.UNAVAILABLE, "PROVIDER_UNAVAILABLE")
        assert (await calls.invoke({}, tool="spread")).status == pb.RESULT_STATUS_OK


async def test_a_provider_that_fails_is_left_alone(start_service: StartService, tmp_path: Path) -> None:
    async with elastic_tools(start_service, tmp_path, CORES="2") as calls:
        for _ in range(2):
            failed = await calls.invoke({"fail": True}, tool="search")
            assert (failed.status, failed.error) == (
                pb.RESULT_STATUS_TOOL_ERROR,
                "ConnectionError: no route to the provider",
            )
        assert (await calls.resources()).providers[0].breaker == pb.BREAKER_STATE_OPEN
        with pytest.raises(grpc.aio.AioRpcError) as unavailable:
            await calls.invoke({}, tool="search")
        assert error_of(unavailable.value)[1] == "PROVIDER_UNAVAILABLE"
