"""What actions are granted, for real: cores of their own, more of them where that helps, and turns
at a provider."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from support.conditions import until_said
from support.processes import ServiceProcess
from support.rpc import refusal_of
from support.tools import ToolsCalls, calls_to, shared_tools, write_tools
from treadle.tools.v1 import tools_pb2 as pb

PROVIDERS = ("idle", "resting", "away", "failing")  # the tests have one each
TOOLS = f"""
from treadle_tools.tool import Kind, Limits, Scaling, Tool

ANYTHING = {{"type": "object"}}
TOOLS = [
    Tool("spread", Kind.STATELESS, "", "own_code:spread", ANYTHING, limits=Limits(cpu_cores=2),
         scaling=Scaling((1, 2), serial_share=0.1, single_core_s=1.0)),
    Tool("room", Kind.ENVIRONMENT, "", "own_code:Room", ANYTHING, limits=Limits(cpu_cores=2),
         scaling=Scaling((1, 2), single_core_s=1.0)),
    *(Tool(name, Kind.STATELESS, "", "own_code:search", ANYTHING, provider=name) for name in {PROVIDERS}),
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
pins = pytest.mark.skipif(
    not PINS or len(os.sched_getaffinity(0)) < 2, reason="needs two cores and cpuset to write"
)
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """Two cores, memory for one lake, and a provider for each test."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "providers.toml").write_text(
        "\n".join(
            f"[[provider]]\nname = '{name}'\nconcurrency = 1\nquota = [{{ count = 5, period_s = "
            f"3600 }}]\n"
            "breaker = { failures = 2, cooldown_s = 600, longest_cooldown_s = 600 }"
            for name in PROVIDERS
        )
    )
    settings = {
        "CORES": "2",
        "MEMORY_BYTES": str(24 * MIB),
        "PROVIDERS_FILE": str(folder / "providers.toml"),
    }
    with shared_tools(
        folder, "python", "frozen_lake", **write_tools(folder, TOOLS, CODE), **settings
    ) as process:
        yield process


@pytest.fixture
async def calls(service: ServiceProcess) -> AsyncIterator[ToolsCalls]:
    """Calls to it, once nothing of an earlier test runs."""
    async with calls_to(service) as made:
        await until_said(
            made.resources, lambda said: said.actions_running + said.actions_waiting == 0
        )
        yield made


async def dimension(calls: ToolsCalls, name: str) -> pb.Resource:
    return next(each for each in (await calls.resources()).resources if each.dimension == name)


def provider(said: pb.GetResourcesResponse, name: str) -> pb.Provider:
    return next(each for each in said.providers if each.name == name)


@pins
async def test_an_action_sees_the_cores_that_are_its_own(calls: ToolsCalls) -> None:
    """
    WHEN    two snippets run at a time on a node of two cores
    Result: each sees one core, and not the other's"""
    look = (
        "import os, time; print(sorted(os.sched_getaffinity(0)), os.environ['TREADLE_CORES']); "
        "time.sleep(0.9)"
    )
    both = await asyncio.gather(*(calls.python(look) for _ in range(2)))
    first, second = sorted(os.sched_getaffinity(0))[:2]
    assert sorted(result.output for result in both) == [f"[{first}] 1\n", f"[{second}] 1\n"]


@pins
async def test_an_elastic_action_gets_all_cores_alone_and_fewer_among_others(
    calls: ToolsCalls,
) -> None:
    """WHEN    an action that scales is alone; then two come together; then one comes while a core
    is held Result: it gets both cores; one each; the one that is free. Its program is told how
    many, and sees no others."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    assert (await calls.invoke({}, tool="spread")).output == f"2 {[first, second]}"
    both = await asyncio.gather(*(calls.invoke({"for_s": 0.5}, tool="spread") for _ in range(2)))
    assert sorted(result.output for result in both) in (
        [f"1 [{first}]", f"1 [{second}]"],
        [f"2 {[first, second]}"]
        * 2,  # the second came when the first had its turn already, and waited for it
    )
    held = asyncio.create_task(calls.python("import time; time.sleep(8)"))
    await until_said(calls.resources, lambda said: said.actions_running == 1)
    assert (await calls.invoke({}, tool="spread")).output in (f"1 [{first}]", f"1 [{second}]")
    held.cancel()


async def test_an_environment_is_told_its_cores_at_each_step(calls: ToolsCalls) -> None:
    opened = await calls.open("room")
    assert opened.first.output == "2"
    assert (await calls.step(opened.session.session_id, {})).output == "2 2\n"
    await calls.close(opened.session.session_id)


async def test_a_session_keeps_memory_until_it_is_closed(calls: ToolsCalls) -> None:
    """GIVEN   memory for one session WHEN    a second is opened Result: it waits, and opens when
    the first is closed; steps of the first and calls of other tools do not wait"""
    first = (await calls.open("frozen_lake")).session.session_id
    assert (await dimension(calls, "memory_bytes")).held == 16 * MIB
    second = asyncio.create_task(calls.open("frozen_lake"))
    await until_said(calls.resources, lambda said: said.actions_waiting == 1)
    for action in ("left", "up"):  # against the walls: it goes on
        await calls.step(first, {"action": action})
    assert (await calls.python("1 + 1")).output == "2\n"
    assert not second.done()
    await calls.close(first)
    await calls.close((await second).session.session_id)
    assert (await dimension(calls, "memory_bytes")).held == 0


async def test_resources_tell_what_is_held_and_who_waits(calls: ToolsCalls) -> None:
    idle = await calls.resources()
    figures = {each.dimension: (each.capacity, each.held, each.free) for each in idle.resources}
    assert figures["memory_bytes"] == (24 * MIB, 0, 24 * MIB)
    assert figures["cpu_cores"] == (2, 0, 2)
    assert (figures["api_concurrency:idle"], figures["api_quota:idle"]) == ((1, 0, 1), (5, 0, 5))
    assert [each.name for each in idle.providers] == list(PROVIDERS)
    assert (provider(idle, "idle").breaker, provider(idle, "idle").rests.seconds) == (
        pb.BREAKER_STATE_CLOSED,
        0,
    )
    calling = [asyncio.create_task(calls.python("import time; time.sleep(8)")) for _ in range(4)]
    busy = await until_said(calls.resources, lambda said: said.actions_waiting == 2)
    assert busy.actions_running == 2
    cores = next(each for each in busy.resources if each.dimension == "cpu_cores")
    assert (cores.held, cores.free, cores.waiting) == (2, 0, 2)
    calling[3].cancel()
    await until_said(calls.resources, lambda said: said.actions_waiting == 1)
    for call in calling:
        call.cancel()
    await until_said(calls.resources, lambda said: said.actions_waiting + said.actions_running == 0)


async def test_a_refused_call_is_made_again_when_the_provider_allows_it(calls: ToolsCalls) -> None:
    """
    WHEN    a provider refuses a call for some seconds, and another call comes meanwhile
    Result: both are answered, after that time; the refused one took two of the quota"""
    await calls.invoke({}, tool="resting")  # the worker is there
    refused_until = time.time() + 3.0
    first = asyncio.create_task(calls.invoke({"until": refused_until}, tool="resting"))
    await until_said(calls.resources, lambda said: provider(said, "resting").rests.nanos)
    assert (await dimension(calls, "api_concurrency:resting")).free == 0
    second = await calls.invoke({}, tool="resting")
    for result in (await first, second):
        assert result.status == pb.RESULT_STATUS_OK
        assert float(result.output) >= refused_until
    assert (await dimension(calls, "api_quota:resting")).held == 4


async def test_a_call_that_is_refused_beyond_its_callers_time_says_so(calls: ToolsCalls) -> None:
    """WHEN    a provider refuses for longer than the callers have Result: the refused one reads
    that it was; the next is not made: UNAVAILABLE, with the time to retry after"""
    refused = await calls.invoke({"until": time.time() + 600}, tool="away")
    assert refused.status == pb.RESULT_STATUS_TOOL_ERROR
    assert refused.error.startswith("the provider refuses for ")
    error = await refusal_of(calls.invoke({}, tool="away"))
    assert error[:2] == (grpc.StatusCode.UNAVAILABLE, "PROVIDER_UNAVAILABLE")
    assert error.retry_after_s is not None
    assert (await calls.invoke({}, tool="spread")).status == pb.RESULT_STATUS_OK


async def test_a_provider_that_fails_is_left_alone(calls: ToolsCalls) -> None:
    for _ in range(2):
        failed = await calls.invoke({"fail": True}, tool="failing")
        assert (failed.status, failed.error) == (
            pb.RESULT_STATUS_TOOL_ERROR,
            "ConnectionError: no route to the provider",
        )
    assert provider(await calls.resources(), "failing").breaker == pb.BREAKER_STATE_OPEN
    assert (await refusal_of(calls.invoke({}, tool="failing"))).reason == "PROVIDER_UNAVAILABLE"
