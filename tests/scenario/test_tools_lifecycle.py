"""The service's own life: it leaves no process behind, recovers from what it loses, and takes tools
from a module."""

import asyncio
import json
import time
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
from support.conditions import until_said
from support.processes import StartService
from support.rpc import error_of, refusal_of, refused
from support.tools import (
    CALL_S,
    GONE_WITHIN_S,
    ToolsCalls,
    daemon_of,
    gone,
    groups_of,
    tools,
    write_tools,
)
from treadle.tools.v1 import tools_pb2 as pb


async def sandboxed(calls: ToolsCalls) -> list[psutil.Process]:
    """Every process below the service, once there is a snippet and a session to be killed with
    it."""
    await calls.open("frozen_lake")
    await calls.python("1")
    running = psutil.Process(calls.process.pid).children(recursive=True)
    assert any(process.name() == "bwrap" for process in running)
    assert len(running) > 6
    return running


async def test_sigterm_lets_the_call_in_flight_finish_and_leaves_nothing_behind(
    start_service: StartService, tmp_path: Path
) -> None:
    async with tools(
        start_service, "python", "frozen_lake", STATE_DIR=str(tmp_path / "state")
    ) as calls:
        running = await sandboxed(calls)
        daemon = daemon_of(calls)
        in_flight = asyncio.create_task(calls.python("import time; time.sleep(0.8); print('done')"))
        await until_said(calls.resources, lambda said: said.actions_running == 1)
        calls.process.terminate()
        assert (await in_flight).output == "done\n"
        assert await calls.process.wait() == 0
        await gone(running)
        assert groups_of(daemon) == []
        assert not (tmp_path / "state").exists()


async def test_sigkill_leaves_nothing_behind_once_nobody_has_come(
    start_service: StartService, tmp_path: Path
) -> None:
    """
    GIVEN   a service whose sessions wait half a second for it to come back
    WHEN    it is killed with a snippet running and a session open, and does not come back
    Result: no process, no control group and no folder is left"""
    state = tmp_path / "state"
    async with tools(
        start_service, "python", "frozen_lake", STATE_DIR=str(state), KEEP_S="0.5"
    ) as calls:
        running = await sandboxed(calls)
        daemon = daemon_of(calls)
        busy = asyncio.create_task(calls.python("while True: pass"))
        await asyncio.sleep(0.3)
        running += psutil.Process(calls.process.pid).children(recursive=True)
        assert state.exists()
        calls.process.kill()
        await gone(running)
        with pytest.raises(grpc.aio.AioRpcError):
            await busy
        assert groups_of(daemon) == []
        assert not state.exists()


@pytest.mark.parametrize("lost", ["worker", "daemon"])
async def test_what_is_lost_takes_its_sandboxes_with_it_and_is_replaced(
    start_service: StartService, lost: str
) -> None:
    """WHEN    bubblewrap, or the sandbox daemon, is killed from outside Result: everything in its
    sandboxes dies at once; its session has crashed; snippets run again in a new one"""
    async with tools(start_service, "python", "frozen_lake") as calls:
        session_id = (await calls.open("frozen_lake")).session.session_id
        await calls.python("1")
        daemon = daemon_of(calls)
        running = daemon.children(recursive=True)
        for process in daemon.children() if lost == "worker" else [daemon]:
            process.kill()
        await gone(running)
        assert (await calls.step(session_id, {"action": "left"})).status == pb.RESULT_STATUS_CRASHED
        assert (await calls.session(session_id)).done
        await runs_again(calls)
        assert (daemon_of(calls) == daemon) is (lost == "worker")
        # or the service's port would be taken after its end
        assert daemon_of(calls).net_connections("inet") == []


async def runs_again(calls: ToolsCalls) -> None:
    """Return once a snippet has run; until then the service says to try later."""
    ends_at = time.monotonic() + GONE_WITHIN_S
    while True:
        try:
            if (await calls.python("1 + 1")).output == "2\n":
                return
        except grpc.aio.AioRpcError as error:
            assert error_of(error)[:2] == (grpc.StatusCode.UNAVAILABLE, "TOOL_NOT_READY")
        assert time.monotonic() < ends_at
        await asyncio.sleep(0.05)


OWN_TOOLS = """
from treadle_tools.tool import Kind, Limits, Tool

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    Tool(name="shout", kind=Kind.STATELESS, description="louder", entry="own_code:shout", arguments_schema=TEXT),
    Tool(name="count", kind=Kind.ENVIRONMENT, description="counts", entry="own_code:Counter", arguments_schema=TEXT,
         limits=Limits(wall_s=2.0)),
    Tool(name="broken", kind=Kind.STATELESS, description="", entry="own_code:nothing", arguments_schema=TEXT),
    Tool(name="elsewhere", kind=Kind.STATELESS, description="", entry="own_code:shout", arguments_schema=TEXT,
         backend="docker", image="python"),
]
"""
OWN_CODE = """
import time
from treadle_tools.tool import InvalidArguments, Outcome

def shout(arguments):
    assert open(__file__).read()  # a file of its own, looked for in the sandbox: this one lies under the host's /tmp
    print("heard", arguments["text"])
    if arguments["text"] == "LOUD":
        raise InvalidArguments("text", "is loud already")
    return Outcome(output=arguments["text"].upper(), reward=0.5, data={"length": len(arguments["text"])})

class Counter:
    def __init__(self, arguments, sandbox):
        self.count = 0
    def first(self):
        return Outcome(output="0")
    def step(self, arguments):
        if arguments["text"] == "hang":
            time.sleep(60)
        if arguments["text"] == "raise":
            raise RuntimeError("as asked")
        self.count += 1
        return Outcome(output=str(self.count))
"""


async def test_own_tools_come_from_a_module(start_service: StartService, tmp_path: Path) -> None:
    """GIVEN   a module with TOOLS beside the code that they name
    Result: a stateless tool and an environment run, fail and time out like the built-in ones; one
    that cannot be
            imported is unavailable and says why, and so is one whose backend is not there, without
            harm to the others
    """
    settings = write_tools(tmp_path, OWN_TOOLS, OWN_CODE) | {
        "DOCKER_HOSTS": f"unix://{tmp_path}/nobody.sock"
    }
    async with tools(start_service, **settings) as calls:
        listed = await calls.stub.ListTools(pb.ListToolsRequest(), timeout=CALL_S)
        assert [tool.name for tool in listed.tools] == ["shout", "count", "broken", "elsewhere"]
        shouted = await calls.invoke({"text": "hey"}, tool="shout")
        assert (shouted.output, shouted.reward, shouted.data_json) == (
            "heard hey\nHEY",
            0.5,
            '{"length": 3}',
        )
        assert (await refusal_of(calls.invoke({"text": "LOUD"}, tool="shout"))).fields == (
            "arguments_json.text",
        )
        session_id = (await calls.open("count")).session.session_id
        failed = await calls.step(session_id, {"text": "raise"})
        assert (failed.status, failed.error) == (
            pb.RESULT_STATUS_TOOL_ERROR,
            "RuntimeError: as asked",
        )
        assert (await calls.step(session_id, {"text": "go on"})).output == "1"
        hung = await calls.step(session_id, {"text": "hang"})
        assert hung.status == pb.RESULT_STATUS_TIMED_OUT
        assert (await calls.session(session_id)).done
        with refused("TOOL_NOT_READY", grpc.StatusCode.UNAVAILABLE, says="nothing"):
            await calls.invoke({"text": "x"}, tool="broken")
        with refused("SANDBOX_UNAVAILABLE"):
            await calls.invoke({"text": "x"}, tool="elsewhere")


HTTP = {"function": [{"name": "ask", "url": "http://example.org/"}]}
SERVER = {"node": "n", "first": 0, "degree": 1, "url": "http://gpu-0/"}
SMALL_GPU = {
    "gpus": {"gpu_bytes": 50, "nodes": {"n": [0]}},
    "gpu_service": [{"name": "s", "bytes_per_gpu": {"1": 60}, "servers": [SERVER]}],
}


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("MODULES", "no_such_module", "no_such_module"),
        ("BUILTIN", "python,oracle", "python,frozen_lake,reasoning_gym"),
        ("STATE_DIR", "/proc/nowhere", "cannot be used"),
        ("BWARP", "x", "TREADLE_TOOLS_BWRAP"),
        ("FUNCTIONS", HTTP, "FUNCTION_HOSTS"),
        ("FUNCTIONS", SMALL_GPU, "bytes_per_gpu"),
    ],
    ids=[
        "MODULES",
        "BUILTIN",
        "STATE_DIR",
        "BWARP",
        "a host that is not allowed",
        "a GPU that is too small",
    ],
)
async def test_a_bad_setting_ends_the_start_with_one_line(
    start_service: StartService,
    tmp_path: Path,
    variable: str,
    value: str | dict[str, object],
    says: str,
) -> None:
    if isinstance(value, dict):
        (tmp_path / "declared.json").write_text(json.dumps(value))
        value = str(tmp_path / "declared.json")
    with pytest.raises(AssertionError, match=r"the service ended with [12]") as ended:
        await start_service(
            "treadle_tools",
            {"TREADLE_TOOLS_FUNCTION_HOSTS": "gpu-0", f"TREADLE_TOOLS_{variable}": value},
        )
    line = str(ended.value).splitlines()[-1]
    assert f"TREADLE_TOOLS_{variable}" in line
    assert says in line
