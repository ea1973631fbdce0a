"""The client without asyncio, in threads that have an event loop of their own and in those that
have none."""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import treadle
import treadle.sync
from support.commands import output_of
from support.fake_engine import Script, token_at
from support.fake_rewards import SCORE, fake_rewards
from support.fake_servicer import Refusal
from support.mesh_in_process import QUICK, FakeMesh
from support.scripted_chat import scripted_chat
from treadle.environments import EnvManager, Sandboxed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROMPTS = [treadle.Prompt("p0", [1, 2]), treadle.Prompt("p1", [3, 4, 5])]
SAMPLING = treadle.Sampling(max_new_tokens=4)
WAIT_S = 20.0
CANCELLED = "the call was cancelled, with its client or with its trajectory"


@pytest.fixture
def mesh() -> Iterator[FakeMesh]:
    """A mesh of fakes in a thread of its own, so that the test's thread may block."""
    loop = treadle.sync.EventLoop()

    async def begin() -> FakeMesh:
        mesh = FakeMesh(["e0", "e1"])
        await mesh.start()
        return mesh

    mesh = loop.run(begin())
    yield mesh
    loop.run(mesh.stop())
    loop.close()


def client_of(mesh: FakeMesh, **options: Any) -> treadle.sync.Client:
    return treadle.sync.Client(mesh.address, retry=QUICK, seed=0, **options)


def agent(trajectory: treadle.sync.Trajectory, prompt: treadle.Prompt) -> float:
    for _chunk in trajectory.generate(SAMPLING):
        pass
    result = trajectory.tool("echo", {"said": prompt.id})
    assert result.data == {"said": prompt.id}
    return float(trajectory.sample)


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def test_a_rollout_of_plain_functions_comes_back_whole(mesh: FakeMesh) -> None:
    """Result: as of the asynchronous client; the batch can be taken; no thread is left."""
    before = threads()
    with client_of(mesh) as client:
        result = client.rollout(PROMPTS, agent, samples_per_prompt=3, concurrency=2)
        assert [(t.prompt_id, t.sample) for t in result.trajectories] == [
            (p.id, s) for p in PROMPTS for s in range(3)
        ]
        for t in result.trajectories:
            prompt = next(p.tokens for p in PROMPTS if p.id == t.prompt_id)
            assert t.tokens == prompt + [token_at(prompt, i) for i in range(4)]
            assert (t.outcome, t.reward, t.error) == ("finished", float(t.sample), "")
        batch = client.get_batch(result.rollout_id, max_groups=2)
        assert [len(group.trajectories) for group in batch.groups] == [3, 3]
        assert client.confirm_batch(result.rollout_id, "b") is None
    assert threads() == before
    assert not mesh.scheduler.open_trajectories


async def test_it_works_inside_a_running_event_loop(mesh: FakeMesh) -> None:
    """As in a cell of a notebook."""
    assert asyncio.get_running_loop().is_running()
    before = threads()
    with client_of(mesh) as client:
        result = client.rollout(PROMPTS, agent, samples_per_prompt=1)
    assert [t.error for t in result.trajectories] == ["", ""]
    assert threads() == before


def test_an_agent_may_leave_its_reward_to_the_mesh(mesh: FakeMesh) -> None:
    def scored(
        trajectory: treadle.sync.Trajectory, prompt: treadle.Prompt
    ) -> treadle.sync.PendingReward:
        agent(trajectory, prompt)
        return trajectory.score("exact_match", {})

    loop = treadle.sync.EventLoop()
    rewards = fake_rewards(mesh)
    loop.run(rewards.__aenter__())
    with client_of(mesh) as client:
        result = client.rollout(PROMPTS, scored, samples_per_prompt=1)
        assert [(t.reward, t.error) for t in result.trajectories] == [(SCORE, "")] * 2
        pending = client.score(result.trajectories[0].trajectory_id, "exact_match", {})
        assert (pending.result().score, pending.reward_id) == (
            SCORE,
            f"w-{result.trajectories[0].trajectory_id}",
        )
    loop.run(rewards.__aexit__(None, None, None))
    loop.close()


def test_trajectories_and_sessions_can_be_used_by_hand(mesh: FakeMesh) -> None:
    with client_of(mesh) as client:
        with client.open(prompt_id="p", sample=0, prompt=[7]) as t:
            chunks = list(t.generate(SAMPLING))
            assert [token for chunk in chunks for token in chunk.token_ids] == t.steps[-1].token_ids
            with t.open_session("count", {"from": 1}) as session:
                assert (session.first.output, session.step({}).output) == ('{"from": 1}', "1")
            assert t.time_tool(lambda: 6 * 7) == 42
            t.observe([9])
            assert t.tokens == [7, *t.steps[-1].token_ids, 9]
            assert [span.kind for span in t.spans].count("tool") == 3
        assert not mesh.tools.sessions
        with (
            pytest.raises(ZeroDivisionError),
            client.open(prompt_id="q", sample=0, prompt=[7]) as failed,
        ):
            _ = 1 / 0
        assert (t.outcome, failed.outcome) == ("finished", "failed")
        left = client.open(prompt_id="r", sample=0, prompt=[7])
    assert left.outcome == "cancelled"


def test_what_a_trajectory_reports_comes_from_the_clients_thread(mesh: FakeMesh) -> None:
    """A generation that is left by `observe` is a step then, too."""
    reporting: set[str] = set()
    with client_of(mesh, token_interval_s=0.0) as client:
        t = client.open(
            prompt_id="p",
            sample=0,
            prompt=[7],
            on_change=lambda *_: reporting.add(threading.current_thread().name),
        )
        stream = t.generate(treadle.Sampling(max_new_tokens=64))
        said = next(stream).token_ids
        t.observe([9])
        assert t.tokens == [7, *said, 9]
        assert reporting == {"treadle"}
        t.close()


def test_tools_of_many_agents_run_at_the_same_time(mesh: FakeMesh) -> None:
    """More than the threads that asyncio would give them."""
    together = threading.Barrier(40)

    def agent(trajectory: treadle.sync.Trajectory, prompt: treadle.Prompt) -> float:
        return float(trajectory.time_tool(lambda: together.wait(WAIT_S)) >= 0)

    with client_of(mesh) as client:
        result = client.rollout(PROMPTS, agent, samples_per_prompt=20)
    assert {t.error for t in result.trajectories} == {""}


def test_leaving_a_generation_ends_it(mesh: FakeMesh) -> None:
    with (
        client_of(mesh, token_interval_s=0.0) as client,
        client.open(prompt_id="p", sample=0, prompt=[7]) as t,
    ):
        for engine in mesh.engines.values():
            engine.script = Script(hold_at=4)
        for chunk in t.generate(treadle.Sampling(max_new_tokens=64)):
            if chunk.offset + len(chunk.token_ids) == 4:
                break
        assert t.tool("echo", {}).ok
        assert (t.steps[-1].finish_reason, len(t.steps[-1].token_ids)) == ("aborted", 4)


def test_an_asynchronous_agent_and_an_environment_are_played_too(mesh: FakeMesh) -> None:
    async def asynchronous(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        async for _ in trajectory.generate(SAMPLING):
            pass
        return 2.0

    count = Sandboxed("count", [{"from": 0}], actions={"more": {}}, system="Count.")
    with client_of(mesh) as client:
        result = client.rollout(PROMPTS, asynchronous, samples_per_prompt=1)
        assert [t.reward for t in result.trajectories] == [2.0, 2.0]
        played = EnvManager(
            client.asynchronous, count, chat=scripted_chat(["more"]), sampling=SAMPLING
        )
        assert [
            t.reward for t in client.run(played.rollout(samples_per_prompt=2)).trajectories
        ] == [1.5, 1.5]
        assert [
            t.reward
            for t in client.rollout(played.prompts(), played, samples_per_prompt=1).trajectories
        ] == [1.5]


def test_an_agent_that_raises_fails_its_trajectory_alone(mesh: FakeMesh) -> None:
    def picky(trajectory: treadle.sync.Trajectory, prompt: treadle.Prompt) -> float:
        if prompt.id == "p0":
            raise ValueError("not this one")
        return agent(trajectory, prompt)

    with client_of(mesh) as client:
        result = client.rollout(PROMPTS, picky, samples_per_prompt=1)
    assert [(t.outcome, t.error) for t in result.trajectories] == [
        ("failed", "ValueError: not this one"),
        ("finished", ""),
    ]


def test_a_tool_call_ends_with_the_group_that_has_settled(mesh: FakeMesh) -> None:
    """One of two samples is kept; the other one waits for a tool meanwhile.

    Result: its call is cancelled, and the rollout does not wait for it.
    """
    mesh.tools.refuse_next(
        "Invoke", Refusal(grpc.StatusCode.UNAVAILABLE, "AWAY", retry_after_s=WAIT_S)
    )
    ends: list[str] = []

    def agent(trajectory: treadle.sync.Trajectory, prompt: treadle.Prompt) -> float:
        for _chunk in trajectory.generate(SAMPLING):
            pass
        if trajectory.sample == 0:
            try:
                trajectory.tool("echo", {})
            except RuntimeError as error:
                ends.append(str(error))
        else:
            while not any(call.method == "Invoke" for call in mesh.tools.calls):
                threading.Event().wait(0.01)
        return 1.0

    with client_of(mesh) as client:
        result = client.rollout(PROMPTS[:1], agent, samples_per_prompt=2, keep_per_prompt=1)
    assert [t.outcome for t in result.trajectories] == ["cancelled", "finished"]
    assert ends == [CANCELLED]


def hold(mesh: FakeMesh) -> None:
    """No engine goes on after its second token."""
    for engine in mesh.engines.values():
        engine.script = Script(hold_at=2, times=100)


def interrupt_when_held(mesh: FakeMesh) -> threading.Thread:
    """Ctrl-C once both engines hold a step."""

    def interrupt() -> None:
        deadline = threading.Event()
        for _ in range(int(WAIT_S / 0.01)):
            if all(engine.holding.is_set() for engine in mesh.engines.values()):
                break
            deadline.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.parametrize("plain", [True, False])
def test_ctrl_c_ends_what_runs_and_the_client_goes_on(mesh: FakeMesh, plain: bool) -> None:
    """Ctrl-C while both engines are in the middle of steps, with an agent in threads and with one
    in the loop.

    Result: KeyboardInterrupt, steps are aborted, trajectories closed, the rollout cancelled; the
    next call works.
    """

    async def asynchronous(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        async for _ in trajectory.generate(SAMPLING):
            pass
        return 1.0

    hold(mesh)
    with client_of(mesh) as client:
        interrupting = interrupt_when_held(mesh)
        with pytest.raises(KeyboardInterrupt):
            client.rollout(PROMPTS, agent if plain else asynchronous, samples_per_prompt=2)
        interrupting.join()
        assert not mesh.scheduler.open_trajectories
        assert len(mesh.rollout.cancelled) == 1
        for engine in mesh.engines.values():
            engine.script = Script()
        assert [
            t.error for t in client.rollout(PROMPTS, agent, samples_per_prompt=1).trajectories
        ] == ["", ""]


def test_a_client_that_is_closed_says_so_and_one_that_is_forgotten_ends(mesh: FakeMesh) -> None:
    before = threads()
    client = client_of(mesh)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.get_batch("r")
    forgotten = client_of(mesh)
    assert len(threads() - before) == 1
    del forgotten
    gc.collect()
    assert threads() == before


@pytest.mark.timeout(60)
def test_a_call_that_comes_while_the_loop_ends_is_refused() -> None:
    """The end of the loop waits for a function in a thread. Result: the call does not wait for
    ever."""
    loop = treadle.sync.EventLoop()
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        go_on.wait()

    def call() -> None:
        with pytest.raises(RuntimeError, match="the call was cancelled"):
            loop.run(asyncio.to_thread(hold))

    calling, closing = threading.Thread(target=call), threading.Thread(target=loop.close)
    calling.start()
    began.wait(WAIT_S)
    closing.start()
    calling.join()
    with pytest.raises(RuntimeError, match="the client is closed"):
        loop.run(asyncio.Event().wait())
    go_on.set()
    closing.join()


def test_a_call_while_the_client_closes_ends(mesh: FakeMesh) -> None:
    """A call in one thread takes its time to end, and another thread calls meanwhile.

    Result: that call raises. It does not wait for a loop that has ended.
    """
    loop = treadle.sync.EventLoop()
    begun, ending, may_end = threading.Event(), threading.Event(), threading.Event()

    async def slow() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.to_thread(may_end.wait)

    refusals: list[str] = []

    def refused(work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        with pytest.raises(RuntimeError) as error:
            loop.run(work())
        refusals.append(str(error.value))

    first = threading.Thread(target=refused, args=[slow])
    first.start()
    begun.wait(WAIT_S)
    closing = threading.Thread(target=loop.close)
    closing.start()
    ending.wait(WAIT_S)
    late = threading.Thread(target=refused, args=[lambda: asyncio.sleep(3600)], daemon=True)
    late.start()
    late.join(1.0)
    may_end.set()
    for thread in (first, closing, late):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert sorted(refusals) == [
        "the call was cancelled, with its client or with its trajectory",
        "the client is closed",
    ]


def test_a_client_that_is_collected_in_its_own_thread_closes_what_is_open(mesh: FakeMesh) -> None:
    """The garbage collector runs in whichever thread makes objects, and that is mostly the
    loop's."""
    before = threads()
    clients = [client_of(mesh)]
    loop = clients[0].loop
    clients[0].open(prompt_id="p", sample=0, prompt=[7])
    assert mesh.scheduler.open_trajectories

    async def collect() -> None:
        clients.clear()

    loop.run(collect())
    loop._thread.join(WAIT_S)
    assert not mesh.scheduler.open_trajectories
    assert threads() == before


def test_a_call_in_the_clients_own_thread_is_refused(mesh: FakeMesh) -> None:
    """It would wait for itself."""
    with client_of(mesh) as client:

        async def blocks() -> None:
            client.get_batch("r")

        with pytest.raises(RuntimeError, match="asynchronous client"):
            client.run(blocks())


def test_every_method_of_the_client_is_there() -> None:
    public = {name for name in dir(treadle.Client) if not name.startswith("_")}
    assert public <= set(dir(treadle.sync.Client))
    for plain, full in (
        (treadle.sync.Trajectory, treadle.Trajectory),
        (treadle.sync.Session, treadle.Session),
    ):
        waits = {
            name
            for name, each in vars(full).items()
            if asyncio.iscoroutinefunction(each) and name[0] != "_"
        }
        assert waits <= set(vars(plain))


async def test_the_example_plays_and_says_so(mesh: FakeMesh) -> None:
    code, stdout, _ = await output_of(sys.executable, "environments.py", mesh.address, cwd=EXAMPLES)
    assert code == 0
    assert len(stdout.splitlines()) == 4
    assert all("finished" in line for line in stdout.splitlines())
