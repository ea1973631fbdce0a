"""Stateful environments over RPC: steps, repeats, concurrency, what one session sees of another,
how each ends."""

import asyncio
import json
from pathlib import Path

import grpc
from support.conditions import until_said
from support.processes import StartService
from support.rpc import refusal_of, refused
from support.tools import CALL_S, ToolsCalls, limits, serve, tools, write_tools
from treadle.telemetry.v1.facts_pb2 import TrajectoryClosed
from treadle.tools.v1 import tools_pb2 as pb
from treadle_runtime.bus import Bus
from treadle_runtime.facts import make_fact

LEGS = {"task": "leg_counting", "seed": 3, "index": 2}
OK = pb.RESULT_STATUS_OK
SESSIONS_AT_ONCE = 200


service = serve("frozen_lake", "reasoning_gym")


async def test_a_lake_is_crossed(calls: ToolsCalls) -> None:
    """The map depends on seed and size alone; the way through it leads to reward 1 and the end."""
    opened = await calls.open("frozen_lake", {"seed": 7, "size": 4}, trajectory_id="t-1")
    again = await calls.open("frozen_lake", {"seed": 7, "size": 4})
    large = await calls.open("frozen_lake", {"seed": 7, "size": 8, "slippery": True})
    assert opened.first.output == again.first.output
    assert opened.first.output.endswith("\n\nAHFF\nFHFH\nFFFF\nFFFG")
    assert len(large.first.output.splitlines()[-1]) == 8
    assert "slippery" in large.first.output
    session_id = opened.session.session_id
    for count, action in enumerate(("down", "down", "right", "right", "right", "down"), start=1):
        result = await calls.step(session_id, {"action": action})
        assert result.status == OK
        assert result.done == (count == 6)
        assert result.reward == (1.0 if count == 6 else 0.0)
    assert result.output.endswith("You reached the goal.")
    session = await calls.session(session_id)
    assert (session.steps, session.done, session.tool, session.trajectory_id) == (
        6,
        True,
        "frozen_lake",
        "t-1",
    )
    await calls.close(session_id)
    with refused("SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await calls.session(session_id)


async def test_a_session_survives_many_steps(calls: ToolsCalls) -> None:
    """Walking into the wall moves nobody; gymnasium ends the game after its 100 moves."""
    session_id = (await calls.open("frozen_lake", {"seed": 7})).session.session_id
    for count in range(1, 101):
        result = await calls.step(session_id, {"action": "left"})
        assert (result.status, result.done) == (OK, count == 100)
    assert "No moves are left" in result.output


async def test_a_repeated_request_takes_one_step(calls: ToolsCalls) -> None:
    """Later or at the same time: the answer is the same, and the agent has moved once."""
    opened = await calls.open("frozen_lake", {"seed": 7}, id="lake-open")
    assert (await calls.open("frozen_lake", {"seed": 7}, id="lake-open")) == opened
    session_id = opened.session.session_id
    first = await calls.step(session_id, {"action": "down"}, id="step-1")
    assert await calls.step(session_id, {"action": "down"}, id="step-1") == first
    both = await asyncio.gather(
        *(calls.step(session_id, {"action": "down"}, id="step-2") for _ in range(4))
    )
    assert all(answer == both[0] for answer in both)
    assert json.loads(both[0].data_json) == {"row": 2, "column": 0}
    assert (await calls.session(session_id)).steps == 2
    await calls.close(session_id, id="close")
    await calls.close(session_id, id="close")


async def test_steps_of_one_session_wait_for_each_other(calls: ToolsCalls) -> None:
    session_id = (await calls.open("frozen_lake", {"seed": 7})).session.session_id
    moves = await asyncio.gather(
        *(calls.step(session_id, {"action": a}) for a in ("down", "up", "down", "up"))
    )
    assert all(move.status == OK for move in moves)
    assert (await calls.session(session_id)).steps == 4


async def test_two_hundred_sessions_are_open_at_once(calls: ToolsCalls) -> None:
    """Each opens a lake, takes three steps when all are open, and closes: no call fails, every
    agent stands right."""
    together = asyncio.Barrier(SESSIONS_AT_ONCE)

    async def play(seed: int) -> None:
        opened = await calls.open("frozen_lake", {"seed": seed})
        session_id = opened.session.session_id
        await together.wait()
        for _ in range(3):
            moved = await calls.step(session_id, {"action": "left"})  # into the wall: nobody falls
            assert (moved.status, moved.done) == (OK, False)
            assert json.loads(moved.data_json) == {"row": 0, "column": 0}
        assert (await calls.session(session_id)).steps == 3
        await calls.close(session_id)

    await asyncio.gather(*(play(seed) for seed in range(SESSIONS_AT_ONCE)))


async def test_a_task_is_solved_with_python(calls: ToolsCalls) -> None:
    opened = await calls.open("reasoning_gym", LEGS)
    assert "how many legs" in opened.first.output
    session_id = opened.session.session_id
    noted = await calls.step(
        session_id, {"code": "open('/tmp/sum', 'w').write(str(3*6 + 2*10 + 8*6 + 14*4 + 7*6))"}
    )
    assert (noted.status, noted.done) == (OK, False)
    read = await calls.step(session_id, {"code": "open('/tmp/sum').read()"})
    assert read.output == "'184'\n"
    answered = await calls.step(session_id, {"answer": "184"})
    assert (answered.reward, answered.done) == (1.0, True)
    wrong = (await calls.open("reasoning_gym", LEGS)).session.session_id
    assert (await calls.step(wrong, {"answer": "5"})).reward < 1.0


async def test_code_in_a_session_fails_without_ending_it(calls: ToolsCalls) -> None:
    session_id = (await calls.open("reasoning_gym", LEGS)).session.session_id
    looped = await calls.step(
        session_id, {"code": "print('on'); 1\nwhile True: pass"}, limits=limits(2.0)
    )
    assert (looped.status, looped.output) == (pb.RESULT_STATUS_TIMED_OUT, "on\n")
    raised = await calls.step(session_id, {"code": "1/0"})
    assert (raised.status, raised.error) == (
        pb.RESULT_STATUS_TOOL_ERROR,
        "ZeroDivisionError: division by zero",
    )
    flooded = await calls.step(
        session_id, {"code": "print('x' * 10**7)"}, limits=limits(output_bytes=100)
    )
    assert flooded.output_truncated
    assert (await calls.step(session_id, {"answer": "184"})).reward == 1.0


async def test_code_in_a_session_does_not_see_the_answer(calls: ToolsCalls) -> None:
    """Neither in its own memory, which is not a copy of the environment's, nor in the
    environment's."""
    session_id = (await calls.open("reasoning_gym", LEGS)).session.session_id
    look = """
import gc, os
kinds = {type(thing).__name__ for thing in gc.get_objects()}
readable = []
for pid in range(1, 64):
    try:
        open(f"/proc/{pid}/mem", "rb")
        readable.append(pid)
    except OSError:
        pass
print("ReasoningTask" in kinds, "LegCountingDataset" in kinds, [pid for pid in readable if pid != os.getpid()])
"""
    assert (await calls.step(session_id, {"code": look})).output == "False False []\n"


async def test_sessions_see_nothing_of_each_other(calls: ToolsCalls) -> None:
    ours = (await calls.open("reasoning_gym", LEGS)).session.session_id
    theirs = (await calls.open("reasoning_gym", LEGS)).session.session_id
    await calls.step(ours, {"code": "open('/tmp/ours', 'w').write('x')"})
    seen = await calls.step(
        theirs, {"code": "import os; os.listdir('/tmp'), os.listdir('/dev/shm')"}
    )
    assert seen.output == "([], [])\n"


async def test_a_killed_environment_ends_its_session_only(calls: ToolsCalls) -> None:
    killed = (await calls.open("reasoning_gym", LEGS)).session.session_id
    other = (await calls.open("reasoning_gym", LEGS)).session.session_id
    result = await calls.step(killed, {"code": "import os; os.kill(-1, 9)"})
    assert result.status == pb.RESULT_STATUS_CRASHED
    session = await calls.session(killed)
    assert result.done == session.done  # so that its agent cannot make an episode fail
    if session.done:
        with refused("SESSION_ENDED", grpc.StatusCode.FAILED_PRECONDITION):
            await calls.step(killed, {"answer": "1"})
    assert (await calls.step(other, {"answer": "184"})).reward == 1.0


async def test_a_step_is_finished_although_its_caller_gives_up(calls: ToolsCalls) -> None:
    """Its deadline passes; when it asks again with the same request_id, and the step has run
    once."""
    session_id = (await calls.open("reasoning_gym", LEGS)).session.session_id
    code = "import time; time.sleep(1); open('/tmp/log', 'a').write('x'); open('/tmp/log').read()"
    request = pb.InvokeRequest(
        request_id="slow", session_id=session_id, arguments_json=json.dumps({"code": code})
    )
    assert (
        await refusal_of(calls.stub.Invoke(request, timeout=0.3))
    ).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await calls.stub.Invoke(request, timeout=CALL_S)).result.output == "'x'\n"
    assert (await calls.session(session_id)).steps == 1


async def test_bad_input_is_named(calls: ToolsCalls) -> None:
    fallen = (await calls.open("frozen_lake", {"seed": 7})).session.session_id
    assert (await calls.step(fallen, {"action": "right"})).done
    taking = pb.SnapshotSessionRequest(request_id="take", session_id=fallen)
    for call, reason, fields in (
        (calls.step("s-none", {"action": "up"}), "SESSION_NOT_FOUND", ()),
        (calls.step(fallen, {"action": "up"}), "SESSION_ENDED", ()),
        (calls.open("frozen_lake", snapshot_id="snap-1"), "INVALID_ARGUMENT", ("snapshot_id",)),
        (
            calls.open("frozen_lake", limits=limits(3600.0)),
            "INVALID_ARGUMENT",
            ("limits.wall_time",),
        ),
        (calls.stub.SnapshotSession(taking, timeout=10), "UNIMPLEMENTED", ()),
    ):
        assert (await refusal_of(call))[1:3] == (reason, fields)


SLEEPY_TOOLS = """
from treadle_tools.tool import Kind, Tool

ANY = {"type": "object"}
TOOLS = [Tool(name="sleepy", kind=Kind.ENVIRONMENT, description="", entry="own_code:Sleepy",
              arguments_schema=ANY, open_schema=ANY)]
"""
SLEEPY_CODE = """
import time
from treadle_tools.tool import Outcome

class Sleepy:
    def __init__(self, arguments, sandbox):
        pass
    def first(self):
        return Outcome(output="")
    def step(self, arguments):
        time.sleep(600)
"""


async def test_a_session_ends_with_its_trajectory_in_the_middle_of_a_step_and_others_go_on(
    start_service: StartService, bus: Bus, tmp_path: Path
) -> None:
    async with tools(start_service, **write_tools(tmp_path, SLEEPY_TOOLS, SLEEPY_CODE)) as calls:
        ended, other = [
            (await calls.open("sleepy", trajectory_id=name)).session.session_id
            for name in ("t0", "t1")
        ]
        step = asyncio.create_task(calls.step(ended, {}))
        # the step has begun, or begins now
        await until_said(calls.resources, lambda said: said.actions_running == 1)
        await bus.publish(make_fact("test", trajectory_closed=TrajectoryClosed(trajectory_id="t0")))
        assert (await step).status == pb.RESULT_STATUS_CRASHED
        with refused("SESSION_NOT_FOUND"):
            await until_said(lambda: calls.session(ended), lambda said: False)
        assert not (await calls.session(other)).done


async def test_sessions_that_nobody_uses_end(start_service: StartService) -> None:
    async with tools(start_service, "frozen_lake", SESSION_IDLE_S="2") as calls:
        session_id = (await calls.open("frozen_lake")).session.session_id
        for _ in range(11):  # longer than it may be idle, in short pauses
            assert (await calls.step(session_id, {"action": "left"})).status == OK
            await asyncio.sleep(0.2)
        with refused("SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await until_said(lambda: calls.session(session_id), lambda said: False)


async def test_what_is_full_is_refused_with_a_time_to_retry(start_service: StartService) -> None:
    settings = {"MAX_SESSIONS": "1", "CORES": "1", "MAX_WAITING": "1"}
    async with tools(start_service, "python", "frozen_lake", **settings) as calls:
        session_id = (await calls.open("frozen_lake")).session.session_id
        full = [await refusal_of(calls.open("frozen_lake"))]
        busy = [asyncio.create_task(calls.python("import time; time.sleep(60)")) for _ in range(2)]
        await until_said(
            calls.resources, lambda said: said.actions_running + said.actions_waiting == 2
        )
        full.append(await refusal_of(calls.python("1")))
        assert {error.code for error in full} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert [error.reason for error in full] == ["SESSIONS_FULL", "ACTIONS_WAITING"]
        assert all(error.retry_after_s for error in full)
        for call in busy:
            call.cancel()
        await calls.close(session_id)
        assert (await calls.open("frozen_lake")).session.session_id
