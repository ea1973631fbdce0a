"""Stateful environments over RPC: steps, repeats, concurrency, what one session sees of another, how each ends."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
import pytest
from support.conditions import until, until_said
from support.processes import ServiceProcess, StartService
from support.rpc import error_of, refused
from support.tools import CALL_S, ToolsCalls, calls_to, limits, shared_tools, tools
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle.tools.v1 import tools_pb2 as pb
from treadle_runtime.bus import open_bus

LEGS = {"task": "leg_counting", "seed": 3, "index": 2}
OK = pb.RESULT_STATUS_OK
SESSIONS_AT_ONCE = 200


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with shared_tools(tmp_path_factory.mktemp("tools"), "frozen_lake", "reasoning_gym") as process:
        yield process


@pytest.fixture
async def calls(served: ServiceProcess) -> AsyncIterator[ToolsCalls]:
    async with calls_to(served) as made:
        yield made


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


async def test_two_hundred_sessions_are_open_at_once(start_service: StartService) -> None:
    """Each opens a lake, takes three steps when all are open, and closes: no call fails, every agent stands right."""
    together = asyncio.Barrier(SESSIONS_AT_ONCE)

    async def play(calls: ToolsCalls, seed: int) -> None:
        opened = await calls.open("frozen_lake", {"seed": seed})
        session_id = opened.session.session_id
        await together.wait()
        for _ in range(3):
            moved = await calls.step(session_id, {"action": "left"})  # into the wall: nobody falls
            assert (moved.status, moved.done) == (OK, False)
            assert json.loads(moved.data_json) == {"row": 0, "column": 0}
        assert (await calls.session(session_id)).steps == 3
        await calls.close(session_id)

    async with tools(start_service, "frozen_lake") as calls:
        await asyncio.gather(*(play(calls, seed) for seed in range(SESSIONS_AT_ONCE)))


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
    looped = await calls.step(session_id, {"code": "print('on'); 1\nwhile True: pass"}, limits=limits(1.0))
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
    with pytest.raises(grpc.aio.AioRpcError) as gave_up:
        await calls.stub.Invoke(request, timeout=0.3)
    assert gave_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await calls.stub.Invoke(request, timeout=CALL_S)).result.output == "'x'\n"
    assert (await calls.session(session_id)).steps == 1


async def test_an_idle_session_is_closed(start_service: StartService) -> None:
    async with tools(start_service, "frozen_lake", SESSION_IDLE_S="0.4") as calls:
        session_id = (await calls.open("frozen_lake")).session.session_id
        for _ in range(6):
            assert (await calls.step(session_id, {"action": "left"})).status == OK
            await asyncio.sleep(0.1)
        with refused("SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await until_said(lambda: calls.session(session_id), lambda said: False)


async def test_actions_are_published_on_the_bus_with_their_times(start_service: StartService, nats_url: str) -> None:
    """
    GIVEN   one core
    WHEN    two snippets of 0.3 s run at the same time
    Result: each is published as started and finished with its queue, overhead and execution times, and one waited
    """
    trajectory_id = f"t-{uuid.uuid4().hex}"
    async with tools(start_service, "python", CORES="1") as calls:
        await calls.python("1", trajectory_id=trajectory_id)
        code = "import time; time.sleep(0.3)"
        results = await asyncio.gather(*(calls.python(code, trajectory_id=trajectory_id) for _ in range(2)))
    published: list[Fact] = []

    async def receive(fact: Fact) -> None:
        published.append(fact)

    async with open_bus(nats_url, "test") as bus:
        await bus.subscribe(["tool_started", "tool_finished"], receive, replay=True)
        await until(lambda: len(published) >= 6)
    started = [fact.tool_started for fact in published if fact.HasField("tool_started")]
    finished = [fact.tool_finished for fact in published if fact.HasField("tool_finished")]
    assert [fact.trajectory_id for fact in started] == [trajectory_id] * 3
    assert [fact.status for fact in finished] == [OK] * 3
    assert started[0].expected_time.ToNanoseconds() == 0
    assert started[1].expected_time.ToNanoseconds() > 0
    queued = sorted(result.timing.queue.ToTimedelta().total_seconds() for result in results)
    assert queued[0] < 0.29 < queued[1]
    assert all(result.timing.execution.ToTimedelta().total_seconds() >= 0.3 for result in results)
    assert finished[-1].timing in [result.timing for result in results]


async def test_a_full_queue_is_refused_with_a_time_to_retry(start_service: StartService) -> None:
    async with tools(start_service, "python", CORES="1", MAX_WAITING="1") as calls:
        await calls.python("1")
        code = "import time; time.sleep(1)"
        answers = await asyncio.gather(*(calls.python(code) for _ in range(4)), return_exceptions=True)
        refused = [error_of(answer) for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert [error[:2] for error in refused] == [(grpc.StatusCode.RESOURCE_EXHAUSTED, "ACTIONS_WAITING")] * 2
        assert all(error.retry_after_s for error in refused)
