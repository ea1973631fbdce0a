"""Stateful environments over RPC: steps, repeats, concurrency, what one session sees of another, how each ends; and
snapshots: branches start where one was taken and see nothing of each other."""

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
    assert (session.steps, session.done, session.tool, session.trajectory_id) == (6, True, "frozen_lake", "t-1")
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
    both = await asyncio.gather(*(calls.step(session_id, {"action": "down"}, id="step-2") for _ in range(4)))
    assert all(answer == both[0] for answer in both)
    assert json.loads(both[0].data_json) == {"row": 2, "column": 0}
    assert (await calls.session(session_id)).steps == 2
    await calls.close(session_id, id="close")
    await calls.close(session_id, id="close")


async def test_steps_of_one_session_wait_for_each_other(calls: ToolsCalls) -> None:
    session_id = (await calls.open("frozen_lake", {"seed": 7})).session.session_id
    moves = await asyncio.gather(*(calls.step(session_id, {"action": a}) for a in ("down", "up", "down", "up")))
    assert all(move.status == OK for move in moves)
    assert (await calls.session(session_id)).steps == 4


async def test_two_hundred_sessions_are_open_at_once(calls: ToolsCalls) -> None:
    """Each opens a lake, takes three steps when all are open, and closes: no call fails, every agent stands right."""
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
    noted = await calls.step(session_id, {"code": "open('/tmp/sum', 'w').write(str(3*6 + 2*10 + 8*6 + 14*4 + 7*6))"})
    assert (noted.status, noted.done) == (OK, False)
    read = await calls.step(session_id, {"code": "open('/tmp/sum').read()"})
    assert read.output == "'184'\n"
    answered = await calls.step(session_id, {"answer": "184"})
    assert (answered.reward, answered.done) == (1.0, True)
    wrong = (await calls.open("reasoning_gym", LEGS)).session.session_id
    assert (await calls.step(wrong, {"answer": "5"})).reward < 1.0


async def test_code_in_a_session_fails_without_ending_it(calls: ToolsCalls) -> None:
    session_id = (await calls.open("reasoning_gym", LEGS)).session.session_id
    looped = await calls.step(session_id, {"code": "print('on'); 1\nwhile True: pass"}, limits=limits(2.0))
    assert (looped.status, looped.output) == (pb.RESULT_STATUS_TIMED_OUT, "on\n")
    raised = await calls.step(session_id, {"code": "1/0"})
    assert (raised.status, raised.error) == (pb.RESULT_STATUS_TOOL_ERROR, "ZeroDivisionError: division by zero")
    flooded = await calls.step(session_id, {"code": "print('x' * 10**7)"}, limits=limits(output_bytes=100))
    assert flooded.output_truncated
    assert (await calls.step(session_id, {"answer": "184"})).reward == 1.0


async def test_code_in_a_session_does_not_see_the_answer(calls: ToolsCalls) -> None:
    """Neither in its own memory, which is not a copy of the environment's, nor in the environment's."""
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
    seen = await calls.step(theirs, {"code": "import os; os.listdir('/tmp'), os.listdir('/dev/shm')"})
    assert seen.output == "([], [])\n"


async def test_a_killed_environment_ends_its_session_only(calls: ToolsCalls) -> None:
    killed = (await calls.open("reasoning_gym", LEGS)).session.session_id
    other = (await calls.open("reasoning_gym", LEGS)).session.session_id
    result = await calls.step(killed, {"code": "import os; os.kill(-1, 9)"})
    assert result.status == pb.RESULT_STATUS_CRASHED
    session = await calls.session(killed)
    if session.done:
        with refused("SESSION_ENDED", grpc.StatusCode.FAILED_PRECONDITION):
            await calls.step(killed, {"answer": "1"})
    assert (await calls.step(other, {"answer": "184"})).reward == 1.0


async def test_a_step_is_finished_although_its_caller_gives_up(calls: ToolsCalls) -> None:
    """Its deadline passes; when it asks again with the same request_id, and the step has run once."""
    session_id = (await calls.open("reasoning_gym", LEGS)).session.session_id
    code = "import time; time.sleep(1); open('/tmp/log', 'a').write('x'); open('/tmp/log').read()"
    request = pb.InvokeRequest(request_id="slow", session_id=session_id, arguments_json=json.dumps({"code": code}))
    assert (await refusal_of(calls.stub.Invoke(request, timeout=0.3))).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await calls.stub.Invoke(request, timeout=CALL_S)).result.output == "'x'\n"
    assert (await calls.session(session_id)).steps == 1


def place(result: pb.ToolResult) -> tuple[int, int]:
    at = json.loads(result.data_json)
    return at["row"], at["column"]


async def test_branches_start_where_the_snapshot_was_taken(calls: ToolsCalls) -> None:
    """
    GIVEN   a lake after two steps
    WHEN    it is snapshot, goes on, is closed, and two sessions are opened from the snapshot
    Result: both show the observation of the second step first and go their own ways from there"""
    trunk = (await calls.open("frozen_lake", {"seed": 7}, trajectory_id="t-1")).session.session_id
    for _ in range(2):
        seen = await calls.step(trunk, {"action": "down"})
    snapshot = await calls.snapshot(trunk)
    assert (snapshot.tool, snapshot.session_id, snapshot.steps) == ("frozen_lake", trunk, 2)
    assert snapshot.size_bytes > 0
    assert place(await calls.step(trunk, {"action": "down"})) == (3, 0)
    await calls.close(trunk)
    left, right = [await calls.open_from(snapshot.snapshot_id, trajectory_id=f"t-{n}") for n in (2, 3)]
    for branch in (left, right):
        assert (branch.first.output, place(branch.first), branch.first.reward) == (seen.output, (2, 0), 0.0)
        assert (branch.session.tool, branch.session.steps) == ("frozen_lake", 0)
    assert left.session.trajectory_id == "t-2"
    assert place(await calls.step(left.session.session_id, {"action": "down"})) == (3, 0)
    assert place(await calls.step(right.session.session_id, {"action": "right"})) == (2, 1)
    assert place(await calls.step(left.session.session_id, {"action": "up"})) == (2, 0)


async def test_chance_goes_on_from_where_it_was(calls: ToolsCalls) -> None:
    """On slippery ice the environment's own generator is part of its state: both slip the same way."""
    opened = await calls.open("frozen_lake", {"seed": 5, "size": 8, "slippery": True})
    assert all(row[0] in "AF" for row in opened.first.output.splitlines()[-8:])  # to the left no step is the last
    trunk = opened.session.session_id
    for _ in range(3):
        await calls.step(trunk, {"action": "left"})
    snapshot = await calls.snapshot(trunk)
    branch = (await calls.open_from(snapshot.snapshot_id)).session.session_id
    walks = [[place(await calls.step(session, {"action": "left"})) for _ in range(12)] for session in (trunk, branch)]
    assert walks[0] == walks[1]
    assert len(set(walks[0])) > 1


async def test_the_files_of_a_session_go_along_and_stay_apart(calls: ToolsCalls) -> None:
    trunk = (await calls.open("reasoning_gym", LEGS)).session.session_id
    make = "import os; os.makedirs('/tmp/a/b'); open('/tmp/a/b/c', 'w').write('kept'); os.symlink('a/b/c', '/tmp/link')"
    assert (await calls.step(trunk, {"code": make})).status == OK
    snapshot = await calls.snapshot(trunk)
    await calls.step(trunk, {"code": "open('/tmp/link', 'w').write('changed later')"})
    branch = (await calls.open_from(snapshot.snapshot_id)).session.session_id
    read = {"code": "open('/tmp/link').read()"}
    assert (await calls.step(branch, read)).output == "'kept'\n"
    assert (await calls.step(trunk, read)).output == "'changed later'\n"
    for session_id in (branch, trunk):
        assert (await calls.step(session_id, {"answer": "184"})).reward == 1.0


async def test_a_repeated_snapshot_is_one(calls: ToolsCalls) -> None:
    session_id = (await calls.open("frozen_lake")).session.session_id
    first = await calls.snapshot(session_id, id="snap-1")
    assert await calls.snapshot(session_id, id="snap-1") == first
    opened = await calls.open_from(first.snapshot_id, id="branch-1")
    assert await calls.open_from(first.snapshot_id, id="branch-1") == opened


async def test_what_is_too_large_is_refused_and_the_session_goes_on(calls: ToolsCalls) -> None:
    session_id = (await calls.open("reasoning_gym", LEGS)).session.session_id
    fill = "import os; f = open('/tmp/x', 'wb'); [f.write(os.urandom(1 << 20)) for _ in range(63)]; f.close()"
    assert (await calls.step(session_id, {"code": fill})).status == OK
    more = "import os; f = open('/tmp/y', 'wb'); f.write(os.urandom(1 << 19)); f.close(); os.listdir('/tmp')"
    assert (await calls.step(session_id, {"code": more})).output == "['y', 'x']\n"
    first = await calls.snapshot(session_id)
    assert first.size_bytes > 63 << 20
    sparse = "[os.truncate(open(f'/tmp/{n}', 'w').name, 60 << 20) for n in range(3)]"
    assert (await calls.step(session_id, {"code": f"import os; {sparse}"})).status == OK
    with refused("SNAPSHOT_REFUSED", grpc.StatusCode.FAILED_PRECONDITION):
        await calls.snapshot(session_id)
    assert (await calls.step(session_id, {"answer": "184"})).reward == 1.0


async def test_bad_input_is_named(calls: ToolsCalls) -> None:
    session_id = (await calls.open("frozen_lake")).session.session_id
    snapshot_id = (await calls.snapshot(session_id)).snapshot_id
    fallen = (await calls.open("frozen_lake", {"seed": 7})).session.session_id
    assert (await calls.step(fallen, {"action": "right"})).done
    no_request_id = pb.SnapshotSessionRequest(session_id=session_id)
    for call, reason, fields in (
        (calls.snapshot("s-none"), "SESSION_NOT_FOUND", ()),
        (calls.step(fallen, {"action": "up"}), "SESSION_ENDED", ()),
        (calls.snapshot(fallen), "SESSION_ENDED", ()),
        (calls.open_from("snap-none"), "SNAPSHOT_NOT_FOUND", ()),
        (calls.open_from("no id"), "INVALID_ARGUMENT", ("snapshot_id",)),
        (calls.open_from(snapshot_id, tool="reasoning_gym"), "INVALID_ARGUMENT", ("tool",)),
        (calls.open_from(snapshot_id, arguments_json="{}"), "INVALID_ARGUMENT", ("arguments_json",)),
        (calls.open_from(snapshot_id, limits=limits(3600.0)), "INVALID_ARGUMENT", ("limits.wall_time",)),
        (calls.stub.SnapshotSession(no_request_id, timeout=10), "INVALID_ARGUMENT", ("request_id",)),
    ):
        assert (await refusal_of(call))[1:3] == (reason, fields)
    assert (await calls.open_from(snapshot_id, tool="frozen_lake")).first.status == OK


async def test_snapshots_outlive_the_service(start_service: StartService, tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with tools(start_service, "frozen_lake", STATE_DIR=str(state)) as calls:
        session_id = (await calls.open("frozen_lake", {"seed": 7})).session.session_id
        await calls.step(session_id, {"action": "down"})
        snapshot = await calls.snapshot(session_id)
        (state / "snapshots" / "snap-half.tar").write_bytes(b"half")
        calls.process.kill()
    async with tools(start_service, "frozen_lake", STATE_DIR=str(state)) as calls:
        assert not (state / "snapshots" / "snap-half.tar").exists()
        branch = await calls.open_from(snapshot.snapshot_id)
        assert place(branch.first) == (1, 0)
        assert place(await calls.step(branch.session.session_id, {"action": "down"})) == (2, 0)
        again = await calls.snapshot(branch.session.session_id)
        assert place((await calls.open_from(again.snapshot_id)).first) == (2, 0)
        calls.process.terminate()
        assert await calls.process.wait() == 0
    assert not state.exists()


STUBBORN_TOOLS = """
from treadle_tools.tool import Kind, Tool

ANY = {"type": "object"}
TOOLS = [Tool(name="stubborn", kind=Kind.ENVIRONMENT, description="", entry="own_code:Stubborn",
              arguments_schema=ANY, open_schema=ANY)]
"""
STUBBORN_CODE = """
import os, threading, time
from treadle_tools.tool import Outcome

class Stubborn:
    def __init__(self, arguments, sandbox):
        self.how, self.count = arguments["how"], 0
        self.held = threading.Lock() if self.how == "lock" else None
    def first(self):
        return Outcome(output="0")
    def step(self, arguments):
        self.count += 1
        return Outcome(output=str(self.count))
    def __getstate__(self):
        self.count += 100
        if self.how == "die":
            os._exit(9)
        if self.how == "hang":
            time.sleep(60)
        return self.__dict__
"""


async def test_an_environment_that_cannot_be_written_down_goes_on_unharmed(
    start_service: StartService, tmp_path: Path
) -> None:
    """The refusal says why; the environment is as it was, also where pickling changes it or kills its process."""
    async with tools(start_service, **write_tools(tmp_path, STUBBORN_TOOLS, STUBBORN_CODE)) as calls:
        for how, says in (("lock", "cannot pickle"), ("die", "killed"), ("well", "")):
            session_id = (await calls.open("stubborn", {"how": how})).session.session_id
            if says:
                with refused("SNAPSHOT_REFUSED", says=says):
                    await calls.snapshot(session_id)
            else:
                snapshot = await calls.snapshot(session_id)
                branch = (await calls.open_from(snapshot.snapshot_id)).session.session_id
                assert (await calls.step(branch, {})).output == "101"
            assert (await calls.step(session_id, {})).output == "1"
        hanging = (await calls.open("stubborn", {"how": "hang"}, limits=limits(3.0))).session.session_id
        with refused("SNAPSHOT_REFUSED", says="stopped after 3 s"):
            await calls.snapshot(hanging)
        assert (await calls.session(hanging)).done


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
        ended, other = [(await calls.open("sleepy", trajectory_id=name)).session.session_id for name in ("t0", "t1")]
        step = asyncio.create_task(calls.step(ended, {}))
        await until_said(calls.resources, lambda said: said.actions_running == 1)  # the step has begun, or begins now
        await bus.publish(make_fact("test", trajectory_closed=TrajectoryClosed(trajectory_id="t0")))
        assert (await step).status == pb.RESULT_STATUS_CRASHED
        with refused("SESSION_NOT_FOUND"):
            await until_said(lambda: calls.session(ended), lambda said: False)
        assert not (await calls.session(other)).done


async def test_sessions_and_snapshots_that_nobody_uses_end(start_service: StartService) -> None:
    async with tools(
        start_service, "frozen_lake", SESSION_IDLE_S="2", SNAPSHOT_KEPT_S="0.4", MAX_SNAPSHOTS="1"
    ) as calls:
        session_id = (await calls.open("frozen_lake")).session.session_id
        snapshot = await calls.snapshot(session_id)
        for _ in range(11):  # longer than it may be idle, in short pauses
            assert (await calls.step(session_id, {"action": "left"})).status == OK
            await asyncio.sleep(0.2)
        with refused("SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await until_said(lambda: calls.session(session_id), lambda said: False)
        with refused("SNAPSHOT_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await until_said(lambda: calls.open_from(snapshot.snapshot_id), lambda said: False)
        assert (await calls.snapshot((await calls.open("frozen_lake")).session.session_id)).snapshot_id


async def test_what_is_full_is_refused_with_a_time_to_retry(start_service: StartService) -> None:
    settings = {"MAX_SESSIONS": "1", "MAX_SNAPSHOTS": "1", "CORES": "1", "MAX_WAITING": "1"}
    async with tools(start_service, "python", "frozen_lake", **settings) as calls:
        session_id = (await calls.open("frozen_lake")).session.session_id
        assert (await calls.snapshot(session_id)).snapshot_id
        full = [await refusal_of(calls.open("frozen_lake")), await refusal_of(calls.snapshot(session_id))]
        busy = [asyncio.create_task(calls.python("import time; time.sleep(60)")) for _ in range(2)]
        await until_said(calls.resources, lambda said: said.actions_running + said.actions_waiting == 2)
        full.append(await refusal_of(calls.python("1")))
        assert {error.code for error in full} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert [error.reason for error in full] == ["SESSIONS_FULL", "SNAPSHOTS_FULL", "ACTIONS_WAITING"]
        assert all(error.retry_after_s for error in full)
        for call in busy:
            call.cancel()
        await calls.close(session_id)
        assert (await calls.open("frozen_lake")).session.session_id
