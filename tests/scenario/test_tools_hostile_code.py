"""What an agent's code and answers do to get a better score, more of the machine, or somebody
else's: each is refused, counted, or costs the one who tried."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.functions import function, says
from support.processes import ServiceProcess, StartService, free_port
from support.rewards import OWN_REWARDS, OWN_SCORES, RewardCalls, rewards_of
from support.rpc import refused
from support.tools import (
    CALL_S,
    ToolsCalls,
    environment,
    limits,
    serve,
    shared_tools,
    tools,
    write_tools,
)
from treadle.tools.v1 import rewards_pb2
from treadle.tools.v1 import tools_pb2 as pb
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import Bus
from treadle_tools.rewards.reward import BUCKET

MIB = 1024 * 1024
DONE, FAILED = rewards_pb2.REWARD_STATE_DONE, rewards_pb2.REWARD_STATE_FAILED

service = serve("python,reasoning_gym", REWARDS="python_tests", CGROUPS="off", CORES="2", PIN="off")


@pytest.fixture
async def scores(service: ServiceProcess) -> AsyncIterator[RewardCalls]:
    async with rewards_of(service) as calls:
        yield calls


# Files of an agent whose tests all fail.
TESTS = {"test_it.py": "import agent\n\ndef test_it():\n    assert agent.right()\n"}
FORGERIES = {
    # Each socket of each other process gets an answer.
    "the scorer's link": """
import ctypes, json, os, stat, struct
libc = ctypes.CDLL(None)
body = json.dumps({"status": "ok", "reward": 1.0}).encode()
for pid in set(range(2, 400)) - {os.getpid()}:
    try:
        process = os.pidfd_open(pid)
    except OSError:
        continue
    for number in range(3, 64):
        taken = libc.syscall(438, process, number, 0)
        if taken >= 0 and stat.S_ISSOCK(os.fstat(taken).st_mode):
            os.write(taken, struct.pack(">BI", 1, len(body)) + body)
""",
    # A process that holds pytest's output open, so that the report is read once it has been written
    # anew.
    "the report": """
import os, time
report = '<testsuites><testsuite tests="1" failures="-999998"/></testsuites>'
if os.fork() == 0:
    os.setsid()
    for _ in range(200):
        time.sleep(0.1)
        if os.path.exists("/tmp/report.xml"):
            time.sleep(0.5)
            open("/tmp/report.xml", "w").write(report)
            break
    os._exit(0)
""",
}


@pytest.mark.parametrize("how", FORGERIES)
async def test_a_score_cannot_be_forged_beyond_what_it_may_be(
    scores: RewardCalls, how: str
) -> None:
    """By the link of the scorer's process nothing is gained at all; a report that says what no
    report can is within 0 and 1, as pytest runs the agent's code beside the tests."""
    files = {"agent.py": f"{FORGERIES[how]}\ndef right():\n    return False\n"}
    ended = await scores.end("python_tests", {"files": files, "tests": TESTS})
    assert ended.state == DONE or "python_tests" not in ended.error
    assert 0.0 <= ended.score <= 1.0
    assert how != "the scorer's link" or ended.score == 0.0


async def test_a_name_that_is_too_long_to_store_frees_its_slot(scores: RewardCalls) -> None:
    """400,000 letters of two bytes each, more than a message of NATS takes as JSON. Result: the
    file is left out, and so often as there are slots the next one is scored."""
    long = json.dumps({"files": {"é" * 400_000: "x"}, "tests": TESTS}, ensure_ascii=False)
    for at in range(2):
        request = rewards_pb2.ScoreTrajectoryRequest(
            request_id=f"long-{at}", trajectory_id="t", reward="python_tests", arguments_json=long
        )
        accepted = (await scores.stub.ScoreTrajectory(request, timeout=CALL_S)).reward
        [ended] = await scores.ended(accepted.reward_id)
        assert (ended.state, ended.score) == (DONE, 0.0)
        assert len(ended.output) < 20_000
    files = {"agent.py": "def right():\n    return True\n"}
    assert (await scores.end("python_tests", {"files": files, "tests": TESTS})).score == 1.0


FORGED = """
import json, os, sys
frame = sys._getframe()
while "link" not in frame.f_locals:
    frame = frame.f_back
body = json.dumps({"status": "ok", "output": "said", "reward": 7.0, "done": True, "data_json": "{}", "soiled": True,
                   "alive": False, "invalid": ["code", "refused"]}).encode()
frame.f_locals["link"].sendall(bytes([1]) + len(body).to_bytes(4, "big") + body)
os._exit(0)
"""


async def test_code_that_answers_in_its_tools_place_says_no_more_than_it_could_print(
    calls: ToolsCalls,
) -> None:
    result = await calls.python(FORGED)
    assert (result.status, result.output, result.done, result.data_json) == (
        pb.RESULT_STATUS_OK,
        "said",
        False,
        "",
    )
    assert not result.HasField("reward")


async def test_a_long_error_is_cut(calls: ToolsCalls) -> None:
    result = await calls.python("raise ValueError('A' * 15_000_000)")
    assert (result.status, result.error[:12]) == (pb.RESULT_STATUS_TOOL_ERROR, "ValueError: ")
    assert len(result.error) < 10_000


async def test_an_answer_that_is_code_is_not_run(calls: ToolsCalls) -> None:
    """The tasks whose rule evaluated the answer, as Python. Result: no score above the one of a
    wrong answer."""
    for task in (
        "string_insertion",
        "spiral_matrix",
        "binary_matrix",
        "n_queens",
        "countdown",
        "simple_integration",
    ):
        session = (await calls.open("reasoning_gym", {"task": task})).session
        code = "exec('import builtins; builtins.float = lambda score: 1e300') or entry['answer']"
        result = await calls.step(session.session_id, {"answer": code})
        assert (result.done, result.reward <= 0.05) == (True, True), task
        await calls.close(session.session_id)


MEMORY = {
    "files that no process has mapped": "import os; os.memfd_create('x')",
    "shared memory of System "
    "V": "import ctypes; assert ctypes.CDLL(None).shmget(7, 1 << 20, 0o1600) >= 0, 'refused'",
}


@pytest.mark.parametrize("what", MEMORY)
async def test_memory_that_nobody_would_count_is_refused(calls: ToolsCalls, what: str) -> None:
    """Without control groups."""
    result = await calls.python(MEMORY[what])
    assert result.status == pb.RESULT_STATUS_TOOL_ERROR
    assert "not permitted" in result.error or "refused" in result.error


async def test_shared_memory_counts_without_control_groups(calls: ToolsCalls) -> None:
    """Each of six processes maps no more than it may."""
    code = """
import mmap, os, time
for _ in range(6):
    if os.fork() == 0:
        held = mmap.mmap(-1, 100 << 20)
        for at in range(0, 100 << 20, 4096):
            held[at] = 1
        time.sleep(9)
time.sleep(5)
"""
    result = await calls.python(code, limits=limits(memory_bytes=256 * MIB))
    assert result.status == pb.RESULT_STATUS_OUT_OF_MEMORY


async def test_a_terminal_is_its_sandboxs_own(calls: ToolsCalls) -> None:
    """While one call holds a terminal, another one looks for it."""
    held = asyncio.create_task(
        calls.python(
            "import os, time; mine, other = os.openpty(); print(os.ttyname(other)); time.sleep(1.5)"
        )
    )
    await asyncio.sleep(0.5)
    looked = await calls.python("import os; print(sorted(os.listdir('/dev/pts')))")
    assert looked.output == "['ptmx']\n"
    assert (await held).output == "/dev/pts/0\n"


async def test_what_the_kernel_counts_for_all_sandboxes_together_is_limited_in_each(
    calls: ToolsCalls,
) -> None:
    """Terminals, watchers of files, signals that wait."""
    code = """
import ctypes, os, resource
try:
    for made in range(100):
        os.openpty()
except OSError:
    print(made)
libc = ctypes.CDLL(None)
print(sum(libc.inotify_init() >= 0 for _ in range(40)))
print(resource.getrlimit(resource.RLIMIT_SIGPENDING))
"""
    assert (await calls.python(code)).output == "16\n16\n(256, 256)\n"


LEFT = """
import subprocess, sys
for _ in range(5):
    subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
"""
SESSIONS = """
import os
found = set()
for pid in range(1, os.getpid() + 1):
    try:
        found.add(os.getsid(pid))
    except ProcessLookupError:
        pass
print(len(found))
"""


async def test_what_a_step_leaves_running_ends_with_it(calls: ToolsCalls) -> None:
    """A session's code leaves five processes that burn cores, twenty times. Result: none of them
    runs or waits to be reaped, so that the next step can start as many."""
    session = (await calls.open("reasoning_gym", {"task": "leg_counting"})).session
    for _ in range(20):
        result = await calls.step(session.session_id, {"code": LEFT})
        assert (result.status, result.error) == (pb.RESULT_STATUS_OK, "")
    looked = await calls.step(session.session_id, {"code": SESSIONS})
    assert looked.output == "3\n", "init, the environment, and the code itself"
    await calls.close(session.session_id)


async def test_a_signal_without_a_name_ends_the_code_alone(calls: ToolsCalls) -> None:
    session = (await calls.open("reasoning_gym", {"task": "leg_counting"})).session
    result = await calls.step(session.session_id, {"code": "import os; os.kill(os.getpid(), 40)"})
    assert (result.status, result.error) == (pb.RESULT_STATUS_CRASHED, "killed by signal 40")
    assert (await calls.step(session.session_id, {"code": "1 + 1"})).output == "2\n"
    await calls.close(session.session_id)


async def test_what_a_function_is_called_with_is_not_told(
    start_service: StartService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses and quotes the header; it answers with it; it is away. Result: no error and no
    output has the secret, or the credentials of its URL."""
    port = free_port()
    secret = "Bearer s3cr3t-t0ken"
    declared = {
        "name": "far",
        "url": f"http://user:p4ssw0rd@127.0.0.1:{port}/",
        "headers_from_env": {"X-Key": "FAR_KEY"},
        "tries": 1,
    }
    (tmp_path / "functions.json").write_text(json.dumps({"function": [declared]}))
    monkeypatch.setenv("FAR_KEY", secret)
    settings = {"FUNCTIONS": str(tmp_path / "functions.json"), "FUNCTION_HOSTS": "127.0.0.1"}
    async with tools(start_service, **settings) as calls:
        async with function(says({"got": secret}), says({"got": secret}, 403), port=port):
            texts = [await calls.invoke({}, tool="far") for _ in range(2)]
        texts.append(await calls.invoke({}, tool="far"))
    assert [result.status for result in texts] == [
        pb.RESULT_STATUS_TOOL_ERROR,
        pb.RESULT_STATUS_OK,
        pb.RESULT_STATUS_TOOL_ERROR,
    ]
    for result in texts:
        said = result.output + result.error + result.data_json
        assert not any(word in said for word in ("s3cr3t", "p4ssw0rd", "user:"))


async def test_a_reward_that_ends_the_service_is_set_aside(
    start_service: StartService, tmp_path: Path
) -> None:
    """The service is killed while it scores two rewards, again and again. Result: the one that is
    scored alone has failed in the end, the other one and a new one are scored."""
    own = write_tools(tmp_path, OWN_REWARDS, OWN_SCORES)
    settings = environment(**own, REWARDS="")
    process = await start_service("treadle_tools", settings)
    async with rewards_of(process) as calls:
        poison = await calls.score("waiting", {"seconds": 30.0})
        await calls.running(poison.reward_id)
    process.kill()
    for _ in range(2):
        process = await start_service("treadle_tools", settings)
        async with rewards_of(process) as calls:
            await calls.running(poison.reward_id)
        process.kill()
    process = await start_service("treadle_tools", settings)
    async with rewards_of(process) as calls:
        ended = await calls.get(poison.reward_id)
        assert (ended.state, "the service ended 2 times" in ended.error) == (FAILED, True)
        assert (await calls.end("given", {"score": 0.5})).score == 0.5


async def test_a_stored_reward_that_cannot_be_read_keeps_nobody(
    start_service: StartService, bus: Bus, tmp_path: Path
) -> None:
    own = write_tools(tmp_path, OWN_REWARDS, OWN_SCORES)
    bucket = await bus.key_value(BUCKET)
    for name, value in {
        "w-1": b"{",
        "w-2": b'{"state":"fine"}',
        "w-3": b"[" * 100_000,
        "w-4": b"",
    }.items():
        await bucket.put(f"{name}.state", value)
    process = await start_service("treadle_tools", environment(**own, REWARDS=""))
    async with rewards_of(process) as calls:
        assert (await calls.end("given", {"score": 0.5})).score == 0.5
    assert (
        len(
            [
                entry
                for entry in await entries_of(bucket)
                if entry.key.startswith("w-") and len(entry.key) < 10
            ]
        )
        == 4
    )


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service on another NATS."""
    folder = tmp_path_factory.mktemp("other")
    with shared_tools(
        folder, **write_tools(folder, OWN_REWARDS, OWN_SCORES), REWARDS=""
    ) as process:
        yield process


async def test_the_id_of_a_reward_does_not_follow_from_its_request(
    start_service: StartService, other: ServiceProcess, tmp_path: Path
) -> None:
    """Two meshes get the same request. Result: two ids; a repeat gets the one it had, also after a
    restart."""
    own = write_tools(tmp_path, OWN_REWARDS, OWN_SCORES)
    settings = environment(**own, REWARDS="")
    process = await start_service("treadle_tools", settings)
    async with rewards_of(process) as calls:
        first = await calls.score("given", {"score": 0.5}, id="same")
        assert (await calls.score("given", {"score": 0.5}, id="same")).reward_id == first.reward_id
    process.terminate()
    await process.wait()
    async with rewards_of(await start_service("treadle_tools", settings)) as calls:
        assert (await calls.score("given", {"score": 0.5}, id="same")).reward_id == first.reward_id
    async with rewards_of(other) as calls:
        assert (await calls.score("given", {"score": 0.5}, id="same")).reward_id != first.reward_id


async def test_a_job_leaves_others_some_sessions(start_service: StartService) -> None:
    async with tools(start_service, "frozen_lake", MAX_SESSIONS="8") as calls:
        for _ in range(7):
            await calls.open("frozen_lake", job="greedy")
        with refused("SESSIONS_FULL", says="greedy"):
            await calls.open("frozen_lake", job="greedy")
        opened = await calls.open("frozen_lake", job="modest")
        assert opened.session.session_id
