"""Rewards of a real service: accepted at once, scored in the sandbox, shared out among jobs, never
lost."""

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.conditions import until_said
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService
from support.rewards import OWN_REWARDS, OWN_SCORES, RewardCalls, rewards_of
from support.rpc import refusal_of, refused
from support.tools import CALL_S, ToolsCalls, calls_to, environment, shared_tools, write_tools
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle.tools.v1 import rewards_pb2 as pb
from treadle_runtime.bus import open_bus

DONE, FAILED, CANCELLED = pb.REWARD_STATE_DONE, pb.REWARD_STATE_FAILED, pb.REWARD_STATE_CANCELLED
RUNNING = pb.REWARD_STATE_RUNNING


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings of a service with the rewards of support/rewards.py."""
    return write_tools(tmp_path_factory.mktemp("own"), OWN_REWARDS, OWN_SCORES)


@pytest.fixture(scope="module")
def service(
    own: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    with shared_tools(tmp_path_factory.mktemp("rewards"), **own, CORES="2", PIN="off") as process:
        yield process


async def start(
    start_service: StartService, own: dict[str, str], **settings: str
) -> ServiceProcess:
    """A service of the test's own; started again it is the same service."""
    return await start_service("treadle_tools", environment(**own, REWARDS="", **settings))


@asynccontextmanager
async def run(
    start_service: StartService, own: dict[str, str], **settings: str
) -> AsyncIterator[RewardCalls]:
    """One run of it."""
    async with rewards_of(await start(start_service, own, **settings)) as calls:
        yield calls


async def test_a_reward_is_accepted_scored_watched_and_told(
    start_service: StartService, nats_url: str, own: dict[str, str]
) -> None:
    facts: asyncio.Queue[Fact] = asyncio.Queue()
    async with open_bus(nats_url, "test") as bus, run(start_service, own) as calls:
        await bus.subscribe(["reward_ended"], facts.put)
        accepted = await calls.score("given", {"score": 0.25}, job="math", trajectory_id="t-7")
        assert accepted.state in (pb.REWARD_STATE_PENDING, RUNNING)
        states = await calls.changes(accepted.reward_id)
        ended = states[-1]
        assert (ended.state, ended.score, ended.output, ended.data_json) == (
            DONE,
            0.25,
            "read",
            '{"seen": ["score"]}',
        )
        assert (ended.job, ended.trajectory_id, ended.reward, ended.tries) == (
            "math",
            "t-7",
            "given",
            1,
        )
        assert ended.timing.execution.ToNanoseconds() > 0
        assert [one.revision for one in states] == sorted({one.revision for one in states})
        assert await calls.get(accepted.reward_id) == ended
        told = (await facts.get()).reward_ended
        assert (told.reward_id, told.trajectory_id, told.job, told.score) == (
            ended.reward_id,
            "t-7",
            "math",
            0.25,
        )


async def test_a_function_without_a_score_fails_its_reward_alone(rewards: RewardCalls) -> None:
    names = ["nothing", "no_number", "raising", "given"]
    accepted = [await rewards.score(name, {"score": 1}) for name in names]
    ended = await rewards.ended(*(one.reward_id for one in accepted))
    assert [one.state for one in ended] == [FAILED, FAILED, FAILED, DONE]
    assert [one.HasField("score") for one in ended] == [False, False, False, True]
    for one, word in zip(
        ended, ["no reward", "must be finite", "RuntimeError: no such luck", ""], strict=True
    ):
        assert word in one.error


async def test_what_was_accepted_is_scored_after_a_kill(
    start_service: StartService, own: dict[str, str]
) -> None:
    """WHEN    the service is killed with a reward running, others waiting and one done Result: the
    next one scores what had not ended, tells the done one as it was, and repeats are answered as
    before"""
    process = await start(start_service, own, REWARD_SLOTS="1")
    async with rewards_of(process) as calls:
        done = await calls.end("given", {"score": 3}, id="a")
        running = await calls.score("waiting", {"seconds": 1}, id="b", job="one")
        # more than one message of NATS
        large = {"score": 5, "text": base64.b85encode(os.urandom(700_000)).decode()}
        waiting = [
            await calls.score("given", {"score": 4}, id="c", job="one"),
            await calls.score("given", large),
        ]
        await calls.running(running.reward_id)
        process.kill()
    async with run(start_service, own, REWARD_SLOTS="1") as calls:
        assert await calls.get(done.reward_id) == done
        again = await calls.score("given", {"score": 4}, id="c", job="one")
        assert again.reward_id == waiting[0].reward_id
        ended = await calls.ended(running.reward_id, *(one.reward_id for one in waiting))
        assert [(one.state, one.score) for one in ended] == [(DONE, 1.0), (DONE, 4.0), (DONE, 5.0)]


async def test_a_full_pool_says_when_to_come_back_and_no_job_waits_for_all_of_another(
    start_service: StartService, own: dict[str, str]
) -> None:
    """GIVEN   one slot, in which a reward runs that never ends, and as many of two jobs waiting as
    may WHEN    one more is asked for; then one of those that wait is cancelled, and the one that
    runs Result: it is refused; both end at once; the others are scored, each job's in order and the
    jobs in turns"""
    async with run(start_service, own, REWARD_SLOTS="1", MAX_REWARDS="62") as calls:
        await calls.end("given", {"score": 0})  # what it costs is known now
        running = await calls.score("endless", {})
        await calls.running(running.reward_id)
        large = [await calls.score("given", {"score": 1}, job="large") for _ in range(59)]
        small = [await calls.score("given", {"score": 2}, job="small") for _ in range(3)]
        full = await refusal_of(calls.score("given", {"score": 1}))
        assert full[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "REWARDS_WAITING")
        assert full.retry_after_s is not None
        for reward in (large.pop(), running):
            assert (await calls.cancel(reward.reward_id)).state == CANCELLED
        ended = await calls.ended(*(one.reward_id for one in (*large, *small)))
        assert [(one.state, one.score) for one in ended] == [(DONE, 1.0)] * 58 + [(DONE, 2.0)] * 3
        order = sorted(ended, key=lambda one: one.ended_at.ToNanoseconds())
        last = max(index for index, one in enumerate(order) if one.job == "small")
        assert len(order) - last > 10, [one.job for one in order]
        in_order = [one.reward_id for one in order if one.job == "large"]
        assert in_order == [one.reward_id for one in large]
        assert (await calls.cancel(order[0].reward_id)).state == DONE


async def test_a_watch_of_a_job_hears_of_later_rewards(rewards: RewardCalls) -> None:
    watch = rewards.stub.WatchRewards(pb.WatchRewardsRequest(job="mine"), timeout=CALL_S)
    await rewards.score("given", {"score": 1}, job="other")
    mine = await rewards.score("given", {"score": 2}, job="mine")
    async for answer in watch:
        assert answer.reward.reward_id == mine.reward_id
        if answer.reward.state == DONE:
            break
    watch.cancel()


async def test_agents_do_not_see_rewards(calls: ToolsCalls, rewards: RewardCalls) -> None:
    with refused("TOOL_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await calls.invoke({"score": 1}, tool="given")
    listed = await rewards.stub.ListRewards(pb.ListRewardsRequest(), timeout=CALL_S)
    assert {one.name for one in listed.rewards} >= {"given", "waiting"}
    assert not any(one.serverless for one in listed.rewards), "each runs in a sandbox here"


PASSING = "def double(x):\n    return 2 * x\n"
TESTS = """
from solution import double
def test_one():
    assert double(1) == 2
def test_two():
    assert double(3) == {}
"""


def double_tests(passing: int = 2, **more: Any) -> dict[str, Any]:
    """Two tests of a function, of which so many pass."""
    tests = {"test_it.py": TESTS.format(6 if passing == 2 else 7)}
    return {"files": {"solution.py": PASSING}, "tests": tests, **more}


BUILTIN: list[tuple[str, dict[str, Any], float]] = [
    ("exact_match", {"answer": " 4 2\n", "expected": "4 2"}, 1.0),
    ("exact_match", {"answer": "Paris", "expected": ["Rome", "paris"], "ignore_case": True}, 1.0),
    ("exact_match", {"answer": "Paris", "expected": "paris"}, 0.0),
    ("math_equal", {"answer": r"so it is $\boxed{\frac{1}{2}}$", "expected": "0.5"}, 1.0),
    ("math_equal", {"answer": "the answer is 3/4", "expected": r"\frac{6}{8}"}, 1.0),
    ("math_equal", {"answer": "I do not know", "expected": "7"}, 0.0),
    ("math_equal", {"answer": "$x^2-1$", "expected": "$(x-1)(x+1)$"}, 1.0),
    ("python_tests", double_tests(), 1.0),
    ("python_tests", double_tests(passing=1), 0.5),
    ("python_tests", double_tests(passing=1, all_or_nothing=True), 0.0),
    ("python_tests", double_tests(expected_tests=4), 0.5),
    ("python_tests", double_tests(files={"solution.py": "def double(:"}), 0.0),
]


async def test_the_built_in_rewards(rewards: RewardCalls) -> None:
    accepted = [await rewards.score(name, arguments) for name, arguments, _ in BUILTIN]
    ended = await rewards.ended(*(one.reward_id for one in accepted))
    assert [(one.state, one.error) for one in ended] == [(DONE, "")] * len(BUILTIN)
    assert [one.score for one in ended] == [score for _, _, score in BUILTIN]


SLOW = "import time\n" + "".join(f"def test_{n}():\n    time.sleep(0.2)\n" for n in range(6))


async def test_python_tests_runs_on_the_cores_that_it_is_granted(rewards: RewardCalls) -> None:
    """WHEN it is known how long it takes, and a second core is free. Result: two workers, and the
    same score."""
    arguments = {"files": {"solution.py": ""}, "tests": {"test_it.py": SLOW}}
    for _ in range(2):
        ended = await rewards.end("python_tests", arguments)
        assert (ended.state, ended.score) == (DONE, 1.0), ended.output
    assert "2 workers" in ended.output or "bringing up nodes" in ended.output


async def test_tests_that_are_not_run_are_no_score(rewards: RewardCalls) -> None:
    ended = await rewards.end(
        "python_tests", {"files": {"a.py": ""}, "tests": {"test_it.py": "x = 1"}}
    )
    assert (ended.state, ended.error) == (FAILED, "tool_error: pytest found no tests")


async def test_a_drain_ends_what_runs_and_keeps_it(
    start_service: StartService, own: dict[str, str]
) -> None:
    process = await start(start_service, own)
    async with rewards_of(process) as calls:
        await calls.end("waiting", {"seconds": 0})  # its worker runs
        running = [await calls.score("waiting", {"seconds": 0.7}) for _ in range(4)]
        await calls.running(running[0].reward_id)
        process.terminate()
        assert await process.wait() == 0, process.stderr_text()
    async with run(start_service, own) as calls:
        ended = await calls.ended(*(one.reward_id for one in running))
        assert [(one.state, one.score) for one in ended] == [(DONE, 0.7)] * 4


async def test_a_reward_ends_once_nats_is_back(
    start_service: StartService, nats_server: NatsServer, own: dict[str, str]
) -> None:
    process = await start(start_service, own)
    async with calls_to(process) as tools, rewards_of(process) as calls:
        running = await calls.score("waiting", {"seconds": 3})
        await calls.running(running.reward_id)
        await until_said(tools.resources, lambda said: said.actions_running == 1)
        nats_server.kill()
        await until_said(tools.resources, lambda said: said.actions_running == 0)
        assert (await calls.get(running.reward_id)).state == RUNNING
        away = await refusal_of(calls.score("given", {"score": 1}))
        assert away.code is grpc.StatusCode.UNAVAILABLE
        nats_server.start()
        [ended] = await calls.ended(running.reward_id)
        assert (ended.state, ended.score) == (DONE, 3.0)


@pytest.mark.parametrize("how", ["killed", "late", "large"])
async def test_code_that_stops_its_scorer_gets_the_reward_that_is_declared_for_it(
    rewards: RewardCalls, how: str
) -> None:
    """Its process ends without an answer, or takes too long or too much memory. Result: that
    reward, at the first try, with the reason as output; and no reward where none is declared."""
    ended = await rewards.end("stopped", {"how": how})
    assert (ended.state, ended.score, ended.error, ended.tries) == (DONE, 0.0, "", 1)
    reasons = {"killed": "crashed: killed by SIGKILL", "late": "timed_out: stopped after 1 s"}
    assert ended.output.startswith(reasons.get(how, "out_of_memory: "))
    undeclared = await rewards.end("stops", {"how": how})
    assert (undeclared.state, undeclared.HasField("score")) == (FAILED, False)
