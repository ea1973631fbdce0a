"""Rewards of a real service: accepted at once, scored in the sandbox, shared out among jobs, never lost."""

import asyncio
import base64
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService, import_path
from support.rewards import OWN_REWARDS, OWN_SCORES, RewardCalls
from support.rpc import error_of, refused
from support.tools import CALL_S, calls_to, environment, shared_tools
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle.tools.v1 import rewards_pb2 as pb
from treadle_runtime.bus import open_bus

DONE, FAILED, CANCELLED = pb.REWARD_STATE_DONE, pb.REWARD_STATE_FAILED, pb.REWARD_STATE_CANCELLED
RUNNING = pb.REWARD_STATE_RUNNING


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The modules of support/rewards.py, not below /tmp, which a sandbox hides behind its own."""
    folder = Path(tempfile.mkdtemp(prefix="treadle-rewards-", dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "own_rewards.py").write_text(OWN_REWARDS)
    (folder / "own_scores.py").write_text(OWN_SCORES)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    settings = {"MODULES": "own_rewards", "CORES": "2", "PIN": "off"}
    with shared_tools(tmp_path_factory.mktemp("rewards"), PYTHONPATH=import_path(folder), **settings) as process:
        yield process


@pytest.fixture
async def calls(service: ServiceProcess) -> AsyncIterator[RewardCalls]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield RewardCalls(channel)


async def start(start_service: StartService, folder: Path, **settings: str) -> ServiceProcess:
    """A service of the test's own; started again it is the same service."""
    env = environment(PYTHONPATH=import_path(folder), MODULES="own_rewards", REWARDS="", **settings)
    return await start_service("treadle_tools", env)


@asynccontextmanager
async def rewards(start_service: StartService, folder: Path, **settings: str) -> AsyncIterator[RewardCalls]:
    process = await start(start_service, folder, **settings)
    async with grpc.aio.insecure_channel(process.address) as channel:
        yield RewardCalls(channel)


async def test_a_reward_is_accepted_scored_watched_and_told(
    start_service: StartService, nats_url: str, folder: Path
) -> None:
    facts: asyncio.Queue[Fact] = asyncio.Queue()

    async with open_bus(nats_url, "test") as bus, rewards(start_service, folder) as calls:
        await bus.subscribe(["reward_ended"], facts.put)
        accepted = await calls.score("given", {"score": 0.25}, job="math", trajectory_id="t-7")
        assert accepted.state in (pb.REWARD_STATE_PENDING, RUNNING)
        states = await calls.changes(accepted.reward_id)
        ended = states[-1]
        assert (ended.state, ended.score, ended.output, ended.data_json) == (DONE, 0.25, "read", '{"seen": ["score"]}')
        assert (ended.job, ended.trajectory_id, ended.reward, ended.tries) == ("math", "t-7", "given", 1)
        assert ended.timing.execution.ToNanoseconds() > 0
        assert [one.revision for one in states] == sorted({one.revision for one in states})
        assert await calls.get(accepted.reward_id) == ended
        told = (await facts.get()).reward_ended
        assert (told.reward_id, told.trajectory_id, told.job, told.score) == (ended.reward_id, "t-7", "math", 0.25)


async def test_a_function_without_a_score_fails_its_reward_alone(calls: RewardCalls) -> None:
    names = ["nothing", "no_number", "raising", "given"]
    accepted = [await calls.score(name, {"score": 1}) for name in names]
    ended = await calls.ended(*(one.reward_id for one in accepted))
    assert [one.state for one in ended] == [FAILED, FAILED, FAILED, DONE]
    assert [one.HasField("score") for one in ended] == [False, False, False, True]
    for one, word in zip(ended, ["no reward", "nan", "RuntimeError: no such luck", ""], strict=True):
        assert word in one.error


async def test_what_was_accepted_is_scored_after_a_kill(start_service: StartService, folder: Path) -> None:
    """
    WHEN    the service is killed with a reward running, others waiting and one done
    Result: the next one scores what had not ended, tells the done one as it was, and repeats are answered as before
    """
    process = await start(start_service, folder, REWARD_SLOTS="1")
    async with grpc.aio.insecure_channel(process.address) as channel:
        calls = RewardCalls(channel)
        [done] = await calls.ended((await calls.score("given", {"score": 3}, id="a")).reward_id)
        running = await calls.score("waiting", {"seconds": 1}, id="b", job="one")
        large = {"score": 5, "text": base64.b85encode(os.urandom(700_000)).decode()}  # more than one message of NATS
        waiting = [await calls.score("given", {"score": 4}, id="c", job="one"), await calls.score("given", large)]
        await calls.running(running.reward_id)
        process.kill()
    async with rewards(start_service, folder, REWARD_SLOTS="1") as calls:
        assert await calls.get(done.reward_id) == done
        again = await calls.score("given", {"score": 4}, id="c", job="one")
        assert again.reward_id == waiting[0].reward_id
        ended = await calls.ended(running.reward_id, *(one.reward_id for one in waiting))
        assert [(one.state, one.score) for one in ended] == [(DONE, 1.0), (DONE, 4.0), (DONE, 5.0)]


async def test_no_job_waits_for_all_of_another(start_service: StartService, folder: Path) -> None:
    async with rewards(start_service, folder, REWARD_SLOTS="1") as calls:
        await calls.ended((await calls.score("given", {"score": 0})).reward_id)  # what it costs is known now
        large = [await calls.score("given", {"score": 1}, job="large") for _ in range(60)]
        small = [await calls.score("given", {"score": 2}, job="small") for _ in range(3)]
        ended = await calls.ended(*(one.reward_id for one in (*large, *small)))
        order = sorted(ended, key=lambda one: one.ended_at.ToNanoseconds())
        last = max(index for index, one in enumerate(order) if one.job == "small")
        still_large = sum(one.job == "large" for one in order[last:])
        assert still_large > 10, [one.job for one in order]
        in_order = [one.reward_id for one in order if one.job == "large"]
        assert in_order == [one.reward_id for one in large]


async def test_a_cancelled_reward_ends_whether_it_waits_or_runs(start_service: StartService, folder: Path) -> None:
    async with rewards(start_service, folder, REWARD_SLOTS="1") as calls:
        running = await calls.score("endless", {})
        waiting = await calls.score("given", {"score": 1})
        await calls.running(running.reward_id)
        assert (await calls.cancel(waiting.reward_id)).state == CANCELLED
        assert (await calls.cancel(running.reward_id)).state == CANCELLED
        [after] = await calls.ended((await calls.score("given", {"score": 2})).reward_id)
        assert (after.state, after.score) == (DONE, 2.0)
        assert (await calls.cancel(after.reward_id)).state == DONE


async def test_a_watch_of_a_job_hears_of_later_rewards(calls: RewardCalls) -> None:
    watch = calls.stub.WatchRewards(pb.WatchRewardsRequest(job="mine"), timeout=CALL_S)
    await calls.score("given", {"score": 1}, job="other")
    mine = await calls.score("given", {"score": 2}, job="mine")
    async for answer in watch:
        assert answer.reward.reward_id == mine.reward_id
        if answer.reward.state == DONE:
            break
    watch.cancel()


async def test_a_full_pool_says_when_to_come_back(start_service: StartService, folder: Path) -> None:
    async with rewards(start_service, folder, REWARD_SLOTS="1", MAX_REWARDS="2") as calls:
        running = await calls.score("endless", {})
        await calls.running(running.reward_id)
        for _ in range(2):
            await calls.score("given", {"score": 1})
        with pytest.raises(grpc.aio.AioRpcError) as full:
            await calls.score("given", {"score": 1})
        error = error_of(full.value)
        assert error[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "REWARDS_WAITING")
        assert error.retry_after_s is not None


async def test_agents_do_not_see_rewards(service: ServiceProcess, calls: RewardCalls) -> None:
    async with calls_to(service) as tools:
        with refused("TOOL_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await tools.invoke({"score": 1}, tool="given")
    listed = await calls.stub.ListRewards(pb.ListRewardsRequest(), timeout=CALL_S)
    assert {one.name for one in listed.rewards} >= {"given", "waiting"}


PASSING = "def double(x):\n    return 2 * x\n"
TESTS = """
from solution import double
def test_one():
    assert double(1) == 2
def test_two():
    assert double(3) == {}
"""

BUILTIN: list[tuple[str, dict[str, Any], float]] = [
    ("exact_match", {"answer": " 4 2\n", "expected": "4 2"}, 1.0),
    ("exact_match", {"answer": "Paris", "expected": ["Rome", "paris"], "ignore_case": True}, 1.0),
    ("exact_match", {"answer": "Paris", "expected": "paris"}, 0.0),
    ("math_equal", {"answer": r"so it is $\boxed{\frac{1}{2}}$", "expected": "0.5"}, 1.0),
    ("math_equal", {"answer": "the answer is 3/4", "expected": r"\frac{6}{8}"}, 1.0),
    ("math_equal", {"answer": "I do not know", "expected": "7"}, 0.0),
    ("math_equal", {"answer": "$x^2-1$", "expected": "$(x-1)(x+1)$"}, 1.0),
    ("python_tests", {"files": {"solution.py": PASSING}, "tests": {"test_it.py": TESTS.format(6)}}, 1.0),
    ("python_tests", {"files": {"solution.py": PASSING}, "tests": {"test_it.py": TESTS.format(7)}}, 0.5),
    (
        "python_tests",
        {"files": {"solution.py": PASSING}, "tests": {"test_it.py": TESTS.format(7)}, "all_or_nothing": True},
        0.0,
    ),
    (
        "python_tests",
        {"files": {"solution.py": PASSING}, "tests": {"test_it.py": TESTS.format(6)}, "expected_tests": 4},
        0.5,
    ),
    ("python_tests", {"files": {"solution.py": "def double(:"}, "tests": {"test_it.py": TESTS.format(6)}}, 0.0),
]


async def test_the_built_in_rewards(calls: RewardCalls) -> None:
    accepted = [await calls.score(name, arguments) for name, arguments, _ in BUILTIN]
    ended = await calls.ended(*(one.reward_id for one in accepted))
    assert [(one.state, one.error) for one in ended] == [(DONE, "")] * len(BUILTIN)
    assert [one.score for one in ended] == [score for _, _, score in BUILTIN]


SLOW = "import time\n" + "".join(f"def test_{n}():\n    time.sleep(0.2)\n" for n in range(6))


async def test_python_tests_runs_on_the_cores_that_it_is_granted(calls: RewardCalls) -> None:
    """WHEN it is known how long it takes, and a second core is free. Result: two workers, and the same score."""
    arguments = {"files": {"solution.py": ""}, "tests": {"test_it.py": SLOW}}
    for _ in range(2):
        [ended] = await calls.ended((await calls.score("python_tests", arguments)).reward_id)
        assert (ended.state, ended.score) == (DONE, 1.0), ended.output
    assert "2 workers" in ended.output or "bringing up nodes" in ended.output


async def test_tests_that_are_not_run_are_no_score(calls: RewardCalls) -> None:
    accepted = await calls.score("python_tests", {"files": {"a.py": ""}, "tests": {"test_it.py": "x = 1"}})
    [ended] = await calls.ended(accepted.reward_id)
    assert (ended.state, ended.error) == (FAILED, "tool_error: pytest found no tests")


async def test_a_drain_ends_what_runs_and_keeps_it(start_service: StartService, folder: Path) -> None:
    process = await start(start_service, folder)
    async with grpc.aio.insecure_channel(process.address) as channel:
        calls = RewardCalls(channel)
        await calls.ended((await calls.score("waiting", {"seconds": 0})).reward_id)  # its worker runs
        running = [await calls.score("waiting", {"seconds": 0.7}) for _ in range(4)]
        await calls.running(running[0].reward_id)
        process.terminate()
        assert await process.wait() == 0, process.stderr_text()
    async with rewards(start_service, folder) as calls:
        ended = await calls.ended(*(one.reward_id for one in running))
        assert [(one.state, one.score) for one in ended] == [(DONE, 0.7)] * 4


async def test_a_reward_ends_once_nats_is_back(
    start_service: StartService, nats_server: NatsServer, folder: Path
) -> None:
    async with rewards(start_service, folder) as calls:
        running = await calls.score("waiting", {"seconds": 1})
        await calls.running(running.reward_id)
        nats_server.kill()
        await asyncio.sleep(1.5)
        assert (await calls.get(running.reward_id)).state == RUNNING
        with pytest.raises(grpc.aio.AioRpcError) as away:
            await calls.score("given", {"score": 1})
        assert error_of(away.value).code is grpc.StatusCode.UNAVAILABLE
        nats_server.start()
        [ended] = await calls.ended(running.reward_id)
        assert (ended.state, ended.score) == (DONE, 1.0)


async def test_a_path_out_of_the_work_folder_is_refused(calls: RewardCalls) -> None:
    for path in ("../up.py", "/etc/up.py"):
        accepted = await calls.score("python_tests", {"files": {path: ""}, "tests": {"test_it.py": ""}})
        [ended] = await calls.ended(accepted.reward_id)
        assert ended.state == FAILED
        assert "below the work folder" in ended.error
