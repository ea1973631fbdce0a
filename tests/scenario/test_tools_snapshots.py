"""Snapshots of sessions over RPC: branches start where the snapshot was taken and see nothing of each other."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from support.conditions import until_said
from support.processes import ServiceProcess, StartService
from support.rpc import error_of, refused
from support.tools import ToolsCalls, calls_to, limits, own_tools, shared_tools, tools
from treadle.tools.v1 import tools_pb2 as pb

LEGS = {"task": "leg_counting", "seed": 3, "index": 2}
OK = pb.RESULT_STATUS_OK


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with shared_tools(tmp_path_factory.mktemp("tools"), "frozen_lake", "reasoning_gym", "python") as process:
        yield process


@pytest.fixture
async def calls(served: ServiceProcess) -> AsyncIterator[ToolsCalls]:
    async with calls_to(served) as made:
        yield made


def place(result: pb.ToolResult) -> tuple[int, int]:
    at = json.loads(result.data_json)
    return at["row"], at["column"]


async def test_branches_start_where_the_snapshot_was_taken(calls: ToolsCalls) -> None:
    """
    GIVEN   a lake after two steps
    WHEN    it is snapshot, goes on, is closed, and two sessions are opened from the snapshot
    Result: both show the observation of the second step first and go their own ways from there
    """
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
        (calls.snapshot(fallen), "SESSION_ENDED", ()),
        (calls.open_from("snap-none"), "SNAPSHOT_NOT_FOUND", ()),
        (calls.open_from("no id"), "INVALID_ARGUMENT", ("snapshot_id",)),
        (calls.open_from(snapshot_id, tool="reasoning_gym"), "INVALID_ARGUMENT", ("tool",)),
        (calls.open_from(snapshot_id, arguments_json="{}"), "INVALID_ARGUMENT", ("arguments_json",)),
        (calls.open_from(snapshot_id, limits=limits(3600.0)), "INVALID_ARGUMENT", ("limits.wall_time",)),
        (calls.stub.SnapshotSession(no_request_id, timeout=10), "INVALID_ARGUMENT", ("request_id",)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as named:
            await call
        assert error_of(named.value)[1:3] == (reason, fields)
    assert (await calls.open_from(snapshot_id, tool="frozen_lake")).first.status == OK


async def test_snapshots_are_few_and_end(start_service: StartService) -> None:
    async with tools(start_service, "frozen_lake", MAX_SNAPSHOTS="2", SNAPSHOT_KEPT_S="3") as calls:
        session_id = (await calls.open("frozen_lake")).session.session_id
        first, _ = [await calls.snapshot(session_id) for _ in range(2)]
        with refused("SNAPSHOTS_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED):
            await calls.snapshot(session_id)
        with refused("SNAPSHOT_NOT_FOUND"):
            await until_said(lambda: calls.open_from(first.snapshot_id), lambda said: False)
        assert (await calls.snapshot(session_id)).snapshot_id


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
from treadle_tools.tool import Kind, Limits, Tool

ANY = {"type": "object"}
TOOLS = [Tool(name="stubborn", kind=Kind.ENVIRONMENT, description="", entry="own_code:Stubborn",
              arguments_schema=ANY, open_schema=ANY, limits=Limits(wall_s=2.0))]
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
    async with own_tools(start_service, tmp_path, STUBBORN_TOOLS, STUBBORN_CODE) as calls:
        for how, says in (("lock", "cannot pickle"), ("die", "killed"), ("well", "")):
            session_id = (await calls.open("stubborn", {"how": how})).session.session_id
            if says:
                with pytest.raises(grpc.aio.AioRpcError, match=says) as unwritten:
                    await calls.snapshot(session_id)
                assert error_of(unwritten.value).reason == "SNAPSHOT_REFUSED"
            else:
                snapshot = await calls.snapshot(session_id)
                branch = (await calls.open_from(snapshot.snapshot_id)).session.session_id
                assert (await calls.step(branch, {})).output == "101"
            assert (await calls.step(session_id, {})).output == "1"
        hanging = (await calls.open("stubborn", {"how": "hang"})).session.session_id
        with pytest.raises(grpc.aio.AioRpcError, match="stopped after 2 s"):
            await calls.snapshot(hanging)
        assert (await calls.session(hanging)).done
