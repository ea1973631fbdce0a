"""Sessions that outlive the service: it is killed in the middle, comes back, and goes on where its
callers stand."""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from support.conditions import until, until_said
from support.nats_server import NatsServer
from support.processes import StartService
from support.rpc import answer_of, refusal_of, refused
from support.scheduler import scheduler_client
from support.tools import ToolsCalls, daemon_of, gone, groups_of, tools, write_tools
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle.tools.v1 import tools_pb2 as pb
from treadle_runtime.bus import open_bus

LEGS = {"task": "leg_counting", "seed": 3, "index": 2}
OK = pb.RESULT_STATUS_OK
BEGAN = "/tmp/began"
BEGIN = f"open('{BEGAN}', 'w').close(); import time; time.sleep(3)"
R = TypeVar("R")


@pytest.fixture
def state(tmp_path: Path) -> str:
    """A state folder for several runs of one service."""
    return str(tmp_path / "state")


def run(
    start_service: StartService, state: str, *builtin: str, **settings: str
) -> AbstractAsyncContextManager[ToolsCalls]:
    """One run of the service of that folder."""
    return tools(start_service, *builtin, STATE_DIR=state, **settings)


def has_begun(calls: ToolsCalls) -> bool:
    """Return whether the code of an action in some sandbox has made the file BEGAN."""
    sandboxed = daemon_of(calls).children(recursive=True)
    return any(Path(f"/proc/{process.pid}/root{BEGAN}").exists() for process in sandboxed)


async def kill(calls: ToolsCalls, in_flight: asyncio.Task[Any]) -> None:
    """Kill the service while an action runs, once its code has made the file BEGAN."""
    await until(lambda: has_begun(calls))
    calls.process.kill()
    assert (await refusal_of(in_flight)).code is grpc.StatusCode.UNAVAILABLE


async def test_a_killed_service_goes_on_where_it_was(
    start_service: StartService, state: str, nats_url: str
) -> None:
    """GIVEN   five lakes after 0 to 4 steps, one of them ended, one that was closed, a riddle with a
    file in its /tmp
    WHEN    the service is killed in the middle of a step of the riddle, and started again
    Result: every session is as its callers know it; steps that were answered are answered the same
    again and not
            taken twice; the step in flight is answered to its repeat and was taken once, and its
            end is published,
            since somebody may wait for the trajectory's tool; what was closed stays closed; all
            others go on"""
    append = f"{BEGIN}; open('/tmp/log', 'a').write('x'); open('/tmp/log').read()"
    trajectory_id, published = f"t-{uuid.uuid4().hex}", []

    async def receive(fact: Fact) -> None:
        if trajectory_id in (fact.tool_started.trajectory_id, fact.tool_finished.trajectory_id):
            published.append(fact.WhichOneof("fact"))

    async with run(start_service, state, "frozen_lake", "reasoning_gym") as calls:
        lakes = [
            (await calls.open("frozen_lake", {"seed": 7}, trajectory_id=f"t-{n}")).session
            for n in range(5)
        ]
        answers = {}
        for count, lake in enumerate(lakes):
            for step in range(count):
                action = "right" if count == 4 else "down"  # seed 7 has a hole to the right
                if step == 0 or count != 4:
                    id = f"{count}-{step}"
                    answers[id] = await calls.step(lake.session_id, {"action": action}, id=id)
        closed = (await calls.open("frozen_lake")).session.session_id
        await calls.close(closed, id="close")
        riddle = (
            await calls.open("reasoning_gym", LEGS, trajectory_id=trajectory_id)
        ).session.session_id
        await calls.step(riddle, {"code": "open('/tmp/kept', 'w').write('kept')"})
        before = [await calls.session(lake.session_id) for lake in lakes]
        await kill(calls, asyncio.create_task(calls.step(riddle, {"code": append}, id="in-flight")))
    async with run(start_service, state, "frozen_lake", "reasoning_gym") as calls:
        async with open_bus(nats_url, "test") as bus:
            await bus.subscribe(["tool_started", "tool_finished"], receive, replay=True)
            # the opening's and two steps'
            await until(lambda: published.count("tool_finished") == 3)
        assert published.count("tool_started") == 3
        await calls.close(closed, id="close")
        with refused("SESSION_NOT_FOUND"):
            await calls.session(closed)
        assert [await calls.session(lake.session_id) for lake in lakes] == before
        assert [session.steps for session in before] == [0, 1, 2, 3, 1]
        assert [session.done for session in before] == [False, False, False, False, True]
        again = await calls.step(riddle, {"code": append}, id="in-flight")
        assert (again.status, again.output) == (OK, "'x'\n")
        assert await calls.step(riddle, {"code": append}, id="in-flight") == again
        for count, lake in enumerate(lakes[1:4], start=1):
            last = f"{count}-{count - 1}"
            assert await calls.step(lake.session_id, {"action": "down"}, id=last) == answers[last]
            moved = await calls.step(lake.session_id, {"action": "up"})
            assert json.loads(moved.data_json) == {"row": count - 1, "column": 0}
            assert (await calls.session(lake.session_id)).steps == count + 1
        with refused("SESSION_ENDED"):
            await calls.step(lakes[4].session_id, {"action": "down"})
        looked = await calls.step(
            riddle, {"code": "open('/tmp/kept').read(), open('/tmp/log').read()"}
        )
        assert looked.output == "('kept', 'x')\n"
        assert (await calls.session(riddle)).steps == 3
        assert (await calls.step(riddle, {"answer": "184"})).reward == 1.0


async def test_the_last_step_of_a_session_is_answered_again(
    start_service: StartService, state: str
) -> None:
    """
    WHEN    the step in flight at the kill ends its session
    Result: its repeat gets the reward; the session is done"""
    thinking = {"code": BEGIN}
    async with run(start_service, state, "reasoning_gym") as calls:
        riddle = (await calls.open("reasoning_gym", LEGS)).session.session_id
        answering = asyncio.create_task(calls.step(riddle, thinking, id="think"))
        last = asyncio.create_task(calls.step(riddle, {"answer": "184"}, id="answer"))
        await kill(calls, answering)
        await asyncio.gather(last, return_exceptions=True)
    async with run(start_service, state, "reasoning_gym") as calls:
        assert (await calls.step(riddle, thinking, id="think")).status == OK
        result = await calls.step(riddle, {"answer": "184"}, id="answer")
        assert (result.reward, result.done) == (1.0, True)
        calls.process.kill()
    async with run(start_service, state, "reasoning_gym") as calls:
        assert await calls.step(riddle, {"answer": "184"}, id="answer") == result
        session = await calls.session(riddle)
        assert (session.steps, session.done) == (2, True)
        await calls.close(riddle)


OWN_TOOLS = """
from treadle_tools.tool import Kind, Limits, Tool

ANY = {"type": "object"}
TOOLS = [Tool(name="count", kind=Kind.ENVIRONMENT, description="", entry="own_code:Count", arguments_schema=ANY,
              open_schema=ANY, limits=Limits(wall_s=20.0)),
         Tool(name="dies", kind=Kind.ENVIRONMENT, description="", entry="own_code:Dies", arguments_schema=ANY),
         Tool(name="hoards", kind=Kind.ENVIRONMENT, description="", entry="own_code:Hoards", arguments_schema=ANY,
              limits=Limits(wall_s=60.0, memory_bytes=64 << 20))]
"""
OWN_CODE = """
import os, time
from treadle_tools.tool import Outcome

class Count:
    def __init__(self, arguments, sandbox):
        open("/tmp/began", "w").close()
        time.sleep(arguments.get("opening_s", 0))
        self.count = 0
    def first(self):
        return Outcome(output="open")
    def step(self, arguments):
        time.sleep(0.02)
        self.count += 1
        return Outcome(output=str(self.count))

class Dies:
    def __init__(self, arguments, sandbox):
        os._exit(7)

class Hoards:
    def __init__(self, arguments, sandbox):
        pass
    def first(self):
        return Outcome(output="open")
    def step(self, arguments):
        open("/tmp/began", "w").close()
        time.sleep(3.0)
        for _ in range(4):
            if os.fork() == 0:
                held = b"x" * (40 << 20)
                time.sleep(60)
                os._exit(0)
        time.sleep(60)
"""


def run_own(
    start_service: StartService, state: str, folder: Path, **settings: str
) -> AbstractAsyncContextManager[ToolsCalls]:
    """One run of a service with tools that count, die and hoard."""
    return tools(
        start_service, **write_tools(folder, OWN_TOOLS, OWN_CODE), STATE_DIR=state, **settings
    )


async def test_an_opening_in_flight_is_the_one_that_its_repeat_gets(
    start_service: StartService, state: str, tmp_path: Path
) -> None:
    """
    WHEN    the service is killed while an environment opens
    Result: the repeat gets the session that the first call began"""
    async with run_own(start_service, state, tmp_path) as first:
        await kill(first, asyncio.create_task(first.open("count", {"opening_s": 3.0}, id="one")))
        killed_at = time.time()
    async with run_own(start_service, state, tmp_path) as second:
        opened = await second.open("count", {"opening_s": 3.0}, id="one")
        assert opened.first.output == "open"
        assert opened.session.opened_at.ToNanoseconds() / 1e9 < killed_at
        assert (await second.step(opened.session.session_id, {}, id="one")).output == "1"
        assert (await second.session(opened.session.session_id)).steps == 1


async def test_callers_that_repeat_what_was_not_answered_count_each_step_once(
    start_service: StartService, state: str, tmp_path: Path
) -> None:
    """
    GIVEN   twelve callers that take forty steps each and repeat a call until it is answered
    WHEN    the service is killed twice meanwhile, and comes back
    Result: every answer is the number of its step; nothing was stepped twice or lost"""
    lives: list[ToolsCalls] = []
    steps, kills = 0, {at_steps: asyncio.Event() for at_steps in (100, 300)}

    async def answered(call: Callable[[ToolsCalls], Awaitable[R]]) -> R:
        while True:
            try:
                return await call(lives[-1])
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(0.05)

    async def play(name: int) -> None:
        nonlocal steps
        opened = await answered(lambda calls: calls.open("count", id=f"open-{name}"))
        session_id = opened.session.session_id
        for number in range(1, 41):
            result = await answered(
                partial(ToolsCalls.step, session_id=session_id, arguments={}, id=f"{name}-{number}")
            )
            assert (result.status, result.output) == (OK, str(number))
            steps += 1
            if steps in kills:
                kills[steps].set()
        await answered(lambda calls: calls.close(session_id, id=f"close-{name}"))

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        lives.append(await stack.enter_async_context(run_own(start_service, state, tmp_path)))
        for name in range(12):
            group.create_task(play(name))
        for now in kills.values():
            await now.wait()
            lives[-1].process.kill()
            lives.append(await stack.enter_async_context(run_own(start_service, state, tmp_path)))
    assert steps == 12 * 40


async def test_a_session_takes_each_step_once_while_nats_is_away_and_ends_with_its_trajectory_once_it_is_back(
    start_service: StartService, state: str, nats_server: NatsServer
) -> None:
    """GIVEN   a session on a lake, of a trajectory of a real scheduler WHEN    NATS is killed, a
    step is taken and the trajectory is closed, both unanswered, and NATS is started again Result:
    the repeated step gets its answer and was taken once; the repeated closing ends the session"""
    scheduler = await start_service("treadle_scheduler")
    async with (
        scheduler_client(scheduler.address) as control,
        run(start_service, state, "frozen_lake") as calls,
    ):
        await control.open("t")
        lake = (await calls.open("frozen_lake", {"seed": 7}, trajectory_id="t")).session.session_id
        step = partial(calls.step, lake, {"action": "down"}, id="step")
        nats_server.kill()
        with refused("BUS_UNAVAILABLE"):
            await step()
        nats_server.start()
        assert json.loads((await answer_of(step)).data_json) == {"row": 1, "column": 0}
        assert (await calls.session(lake)).steps == 1
        nats_server.kill()
        close = partial(control.close, "t", request_id="close")
        # by when its lease was renewed
        assert (await refusal_of(close())).reason in ("BUS_UNAVAILABLE", "NOT_LEADER")
        assert (await calls.session(lake)).steps == 1
        nats_server.start()
        await answer_of(close)
        with refused("SESSION_NOT_FOUND"):
            await until_said(lambda: calls.session(lake), lambda said: False)


async def test_an_environment_that_dies_while_it_opens_is_tried_again(
    start_service: StartService, state: str, tmp_path: Path
) -> None:
    """It always dies here: three times in a fresh sandbox each, then the caller gets the reason."""
    async with run_own(start_service, state, tmp_path) as calls:
        opened = await calls.open("dies")
        assert opened.first.status == pb.RESULT_STATUS_CRASHED
        assert opened.session.done
        assert calls.process.stderr_text().count("an environment is opened again") == 2


async def test_memory_is_watched_while_there_is_no_service(
    start_service: StartService, state: str, tmp_path: Path
) -> None:
    """
    GIVEN   no control groups, and a step whose children will hold 160 MiB where 64 are allowed
    WHEN    the service is killed before they do
    Result: the daemon kills the sandbox; the next service says that the session has ended"""
    async with run_own(start_service, state, tmp_path, CGROUPS="off") as calls:
        session_id = (await calls.open("hoards")).session.session_id
        daemon = daemon_of(calls)
        await kill(calls, asyncio.create_task(calls.step(session_id, {}, id="hoard")))
        await until(
            lambda: "a sandbox outgrew its memory" in (Path(state) / "daemon.log").read_text()
        )
        assert daemon.is_running()
    async with run_own(start_service, state, tmp_path, CGROUPS="off") as calls:
        with refused("SESSION_ENDED"):
            await calls.step(session_id, {}, id="hoard")


async def test_sessions_outlive_an_orderly_end_with_keep_on_exit(
    start_service: StartService, state: str
) -> None:
    async with run(start_service, state, "frozen_lake", KEEP_ON_EXIT="true") as calls:
        session_id = (await calls.open("frozen_lake", {"seed": 7})).session.session_id
        await calls.step(session_id, {"action": "down"})
        daemon = daemon_of(calls)
        calls.process.terminate()
        assert await calls.process.wait() == 0
        assert daemon.is_running()
    async with run(start_service, state, "frozen_lake") as calls:
        moved = await calls.step(session_id, {"action": "down"})
        assert json.loads(moved.data_json) == {"row": 2, "column": 0}
        inside = daemon.children(recursive=True)
        calls.process.terminate()
        assert await calls.process.wait() == 0
        await gone([daemon, *inside])
        assert groups_of(daemon) == []


async def test_a_session_that_cannot_go_on_says_so(start_service: StartService, state: str) -> None:
    """
    WHEN    a worker dies while there is no service
    Result: its session is there, with the steps that were acknowledged, and has ended

    WHEN    a session's tool is off in the next run
    Result: the session is closed; other tools run
    """
    async with run(start_service, state, "frozen_lake") as calls:
        session_id = (await calls.open("frozen_lake")).session.session_id
        await calls.step(session_id, {"action": "left"})
        daemon = daemon_of(calls)
        inside = daemon.children(recursive=True)
        calls.process.kill()
        for process in daemon.children():
            process.kill()
        await gone(inside)
    async with run(start_service, state, "frozen_lake") as calls:
        with refused("SESSION_ENDED"):
            await calls.step(session_id, {"action": "left"})
        session = await calls.session(session_id)
        assert (session.steps, session.done) == (1, True)
        session_id = (await calls.open("frozen_lake")).session.session_id
        calls.process.kill()
    async with run(start_service, state, "python") as calls:
        with refused("SESSION_NOT_FOUND"):
            await calls.session(session_id)
        assert (await calls.python("1 + 1")).output == "2\n"


async def test_what_a_killed_machine_leaves_in_the_folder_harms_nobody(
    start_service: StartService, state: str
) -> None:
    """WHEN    service and daemon are killed together Result: the next service finds a socket that
    nobody listens to, starts a daemon of its own and knows no session"""
    async with run(start_service, state, "frozen_lake") as calls:
        session_id = (await calls.open("frozen_lake")).session.session_id
        daemon = daemon_of(calls)
        inside = daemon.children(recursive=True)
        calls.process.kill()
        daemon.kill()
        await gone(inside)
        assert (Path(state) / "daemon.sock").exists()
    async with run(start_service, state, "frozen_lake") as calls:
        with refused("SESSION_NOT_FOUND"):
            await calls.session(session_id)
        assert (await calls.open("frozen_lake")).session.session_id
        assert groups_of(daemon) == []


async def test_a_second_service_on_one_folder_is_refused(
    start_service: StartService, state: str
) -> None:
    async with run(start_service, state, "python") as calls:
        with pytest.raises(AssertionError, match=r"TREADLE_TOOLS_STATE_DIR.*another tools service"):
            await start_service(
                "treadle_tools",
                {"TREADLE_TOOLS_STATE_DIR": state, "TREADLE_TOOLS_BUILTIN": "python"},
            )
        assert (await calls.python("1 + 1")).output == "2\n"
