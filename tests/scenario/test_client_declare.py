"""Scenarios of declared agents through Client.rollout: what they declare is what the services of
the mesh are asked."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import treadle
from support.fake_rewards import SCORE, FakeRewards, fake_rewards
from support.fake_servicer import Refusal
from support.mesh_in_process import FakeMesh, generate
from treadle.rollout.v1 import rollout_pb2
from treadle.tools.v1 import tools_pb2
from treadle.types import duration

LAKE = treadle.Prompt("p0", [1, 2], data={"task": "lake", "seed": 7})
MATH = treadle.Prompt("p1", [3, 4, 5], data={"task": "math", "seed": 8})
LIMITS = treadle.Limits(cpu_cores=1, memory_bytes=1 << 28, wall_s=2.5, output_bytes=1000)


@pytest.fixture
async def rewards(mesh: FakeMesh) -> AsyncIterator[FakeRewards]:
    async with fake_rewards(mesh) as fake:
        yield fake


@treadle.environment("frozen_lake", limits=LIMITS)
def lake(prompt: treadle.Prompt) -> dict[str, Any]:
    return {"seed": prompt.data["seed"]}


@treadle.reward("exact_match")
def exact(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> dict[str, Any]:
    return {"answer": str(len(trajectory.tokens)), "expected": prompt.id}


def task_of(prompt: treadle.Prompt) -> str:
    return str(prompt.data["task"])


async def one_turn(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    await generate(trajectory, 3)
    return 1.0


@treadle.agent(
    hardware={"lake": ["compute", "h800"], "": ["bandwidth"]}, task=task_of, samples_per_prompt=1
)
async def mapped(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    return await one_turn(trajectory, prompt)


def tags_of(mesh: FakeMesh) -> dict[tuple[str, int], list[str]]:
    opened = mesh.scheduler.requests("OpenTrajectory")
    return {(request.prompt_id, request.sample): list(request.hardware_tags) for request in opened}


async def test_hardware_tags_reach_the_scheduler_by_the_task_of_the_prompt(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    await client.rollout([LAKE, MATH], mapped)
    assert tags_of(mesh) == {("p0", 0): ["compute", "h800"], ("p1", 0): ["bandwidth"]}


@pytest.mark.parametrize("agent", [mapped, one_turn])
async def test_tags_of_the_call_are_used_instead_for_all_or_by_prompt_and_sample(
    mesh: FakeMesh, client: treadle.Client, agent: Any
) -> None:
    await client.rollout([LAKE], agent, samples_per_prompt=2, hardware_tags=["h20"])
    assert tags_of(mesh) == {("p0", 0): ["h20"], ("p0", 1): ["h20"]}
    await client.rollout(
        [LAKE], agent, samples_per_prompt=2, hardware_tags=lambda prompt, s: [prompt.id, f"s{s}"]
    )
    assert tags_of(mesh) == {("p0", 0): ["p0", "s0"], ("p0", 1): ["p0", "s1"]}
    await client.rollout([LAKE], agent, samples_per_prompt=2, hardware_tags=())
    assert tags_of(mesh) == {("p0", 0): [], ("p0", 1): []}


@pytest.mark.parametrize("tags", ["compute", lambda *_: "compute"])
async def test_one_text_in_place_of_tags_ends_the_rollout(
    mesh: FakeMesh, client: treadle.Client, tags: Any
) -> None:
    """Result: not seven tags of one letter each, which no engine carries."""
    with pytest.raises(
        TypeError, match=r"hardware_tags must be a sequence of tags such as \('compute',\)"
    ):
        await client.rollout([LAKE], one_turn, hardware_tags=tags)
    assert not mesh.scheduler.requests("OpenTrajectory")
    assert len(mesh.rollout.requests("CancelRollout")) == 1


async def test_tags_that_no_engine_carries_fail_the_trajectories_that_ask_for_them_alone(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    """WHEN the scheduler refuses the first step. Result: its trajectory has failed and says why;
    the other is whole."""
    mesh.scheduler.refuse_next(
        "ScheduleStep",
        Refusal(grpc.StatusCode.FAILED_PRECONDITION, "NO_ENGINE_WITH_TAGS", "none carries compute"),
    )
    result = await client.rollout([LAKE, MATH], mapped, concurrency=1)
    assert [t.outcome for t in result.trajectories] == ["failed", "finished"]
    assert "NO_ENGINE_WITH_TAGS none carries compute" in result.trajectories[0].error


async def test_declared_values_are_the_defaults_of_a_call(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    """Result: the rollout service is asked for what is declared, and then for what a call gives
    instead."""
    declared = treadle.agent(
        redundancy=1.5,
        keep_per_prompt=2,
        max_staleness=5,
        max_total_tokens=9,
        concurrency=1,
        shaping=treadle.Shaping(rule="shortest"),
    )
    open_at_once: list[int] = []

    @declared
    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        open_at_once.append(len(mesh.scheduler.open_trajectories))
        await asyncio.sleep(0)
        return await one_turn(trajectory, prompt)

    # Under a bound of staleness a client watches the rollout, which the fake cannot show.
    await client.rollout([LAKE], agent, max_staleness=-1)
    assert max(open_at_once) == 1
    given = treadle.Shaping()
    await client.rollout([LAKE], agent, 4, 0, -1, concurrency=0, max_total_tokens=0, shaping=given)
    assert max(open_at_once) > 1
    first, second = mesh.rollout.specs.values()
    assert first == rollout_pb2.RolloutSpec(
        samples_per_prompt=3,
        keep_per_prompt=2,
        max_staleness=-1,
        prompt_ids=["p0"],
        max_total_tokens=9,
        selection=rollout_pb2.Selection(
            rule=rollout_pb2.SELECTION_RULE_SHORTEST, success_reward=1.0
        ),
    )
    assert second == rollout_pb2.RolloutSpec(
        samples_per_prompt=4, max_staleness=-1, prompt_ids=["p0"]
    )


async def test_an_agent_that_declares_nothing_runs_as_before(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    result = await client.rollout([LAKE], one_turn)
    assert [(t.outcome, t.reward) for t in result.trajectories] == [("finished", 1.0)] * 4
    [spec] = mesh.rollout.specs.values()
    assert spec == rollout_pb2.RolloutSpec(
        samples_per_prompt=4, max_staleness=-1, prompt_ids=["p0"]
    )
    assert set(map(tuple, tags_of(mesh).values())) == {()}
    assert not mesh.tools.calls


async def test_an_environment_opens_with_its_limits_before_the_agent_and_ends_before_the_reward(
    mesh: FakeMesh, client: treadle.Client, rewards: FakeRewards
) -> None:
    order: list[str] = []

    @treadle.agent(environment=lake, reward=exact, samples_per_prompt=1)
    async def play(
        trajectory: treadle.Trajectory, prompt: treadle.Prompt, session: treadle.Session
    ) -> None:
        order.append(session.first.output)
        await generate(trajectory, 3)
        order.append((await session.step({"action": "down"})).output)

    result = await client.rollout([LAKE], play)
    assert [(t.outcome, t.reward, t.error) for t in result.trajectories] == [
        ("finished", SCORE, "")
    ]
    assert order == ['{"seed": 7}', "1"]
    [opened] = mesh.tools.requests("OpenSession")
    assert (opened.tool, opened.trajectory_id) == (
        "frozen_lake",
        result.trajectories[0].trajectory_id,
    )
    assert opened.limits == tools_pb2.Limits(
        cpu_cores=1, memory_bytes=1 << 28, wall_time=duration(2.5), output_bytes=1000
    )
    [asked] = rewards.requests("ScoreTrajectory")
    assert (asked.reward, json.loads(asked.arguments_json)) == (
        "exact_match",
        {"answer": "5", "expected": "p0"},
    )
    [closed], [scored] = (
        [call.time_s for call in fake.calls if call.method == method]
        for fake, method in ((mesh.tools, "CloseSession"), (rewards, "ScoreTrajectory"))
    )
    assert closed < scored
    assert not mesh.tools.sessions


async def test_an_environment_without_limits_has_those_of_its_tool(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    @treadle.agent(
        environment=treadle.environment("count")(lambda prompt: {}), samples_per_prompt=1
    )
    async def play(
        trajectory: treadle.Trajectory, prompt: treadle.Prompt, session: treadle.Session
    ) -> float:
        return await one_turn(trajectory, prompt)

    await client.rollout([LAKE], play)
    [opened] = mesh.tools.requests("OpenSession")
    assert not opened.HasField("limits")


async def test_a_declared_agent_is_called_by_hand_and_closes_its_environment_also_where_it_raises(
    mesh: FakeMesh, client: treadle.Client, rewards: FakeRewards
) -> None:
    """Result: the session has ended although its trajectory is still open; an agent that raised
    asks for no reward."""
    open_sessions: list[int] = []

    @treadle.agent(environment=lake, reward=exact)
    async def play(
        trajectory: treadle.Trajectory, prompt: treadle.Prompt, session: treadle.Session
    ) -> None:
        open_sessions.append(len(mesh.tools.sessions))
        if trajectory.sample == 1:
            raise ValueError("no move is legal")

    for sample in range(2):
        trajectory = await client.open(prompt_id="p0", sample=sample, prompt=LAKE.tokens)
        if sample == 0:
            pending = await play(trajectory, LAKE)
            assert isinstance(pending, treadle.PendingReward)
            assert (await pending.result()).score == SCORE
        else:
            with pytest.raises(ValueError, match="no move is legal"):
                await play(trajectory, LAKE)
        assert not mesh.tools.sessions
        assert trajectory.trajectory_id in mesh.scheduler.open_trajectories
    assert open_sessions == [1, 1]
    assert len(rewards.requests("ScoreTrajectory")) == 1


async def test_an_environment_that_cannot_be_opened_fails_its_trajectory_alone(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    refusal = Refusal(
        grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", fields=("limits.memory_bytes",)
    )
    mesh.tools.refuse_next("OpenSession", refusal)

    @treadle.agent(environment=lake, concurrency=1, samples_per_prompt=2)
    async def play(
        trajectory: treadle.Trajectory, prompt: treadle.Prompt, session: treadle.Session
    ) -> float:
        return await one_turn(trajectory, prompt)

    result = await client.rollout([LAKE], play)
    assert [t.outcome for t in result.trajectories] == ["failed", "finished"]
    assert "limits.memory_bytes" in result.trajectories[0].error


async def test_redundant_environments_end_when_their_group_has_settled(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    """
    WHEN    2 of 3 environments are enough and one never answers
    Result: the rollout ends with the 2, and the third session is closed."""

    @treadle.agent(environment=lake, keep_per_prompt=2, redundancy=1.5)
    async def play(
        trajectory: treadle.Trajectory, prompt: treadle.Prompt, session: treadle.Session
    ) -> float:
        if trajectory.sample == 0:
            await asyncio.Event().wait()
        return await one_turn(trajectory, prompt)

    result = await client.rollout([LAKE], play)
    assert [t.outcome for t in result.trajectories] == ["cancelled", "finished", "finished"]
    assert len(mesh.tools.requests("OpenSession")) == 3
    assert not mesh.tools.sessions


async def test_an_agent_that_has_a_reward_or_has_failed_asks_for_none(
    mesh: FakeMesh, client: treadle.Client, rewards: FakeRewards
) -> None:
    """
    WHEN    samples return a number, close with a reward, close as failed, and return nothing
    Result: the last one alone is scored by the mesh"""

    @treadle.agent(reward=exact, samples_per_prompt=4)
    async def play(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float | None:
        await generate(trajectory, 3)
        if trajectory.sample == 1:
            await trajectory.close(reward=0.25)
        elif trajectory.sample == 2:
            await trajectory.close(outcome="failed")
        return 0.0 if trajectory.sample == 0 else None

    result = await client.rollout([LAKE], play)
    assert [(t.reward, t.outcome) for t in result.trajectories] == [
        (0.0, "finished"),
        (0.25, "finished"),
        (None, "failed"),
        (SCORE, "finished"),
    ]
    [asked] = rewards.requests("ScoreTrajectory")
    assert asked.trajectory_id == result.trajectories[3].trajectory_id


async def test_a_reward_that_must_be_serverless_is_looked_up_before_anything_begins(
    mesh: FakeMesh, client: treadle.Client, rewards: FakeRewards
) -> None:
    """The mesh has `graded` behind a URL, `exact_match` in its sandboxes, and no `judged`."""

    def declared(name: str) -> Any:
        reward = treadle.reward(name, serverless=True)(
            lambda trajectory, prompt: {"answer": prompt.id}
        )

        @treadle.agent(reward=reward, samples_per_prompt=1)
        async def play(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> None:
            await generate(trajectory, 3)

        return play

    for name, reason in (
        ("exact_match", "REWARD_NOT_SERVERLESS"),
        ("judged", "REWARD_FUNCTION_NOT_FOUND"),
    ):
        with pytest.raises(treadle.TreadleError) as refused:
            await client.rollout([LAKE], declared(name))
        assert refused.value.reason == reason
    assert not mesh.rollout.specs and not mesh.scheduler.requests("OpenTrajectory")
    result = await client.rollout([LAKE], declared("graded"))
    assert [t.reward for t in result.trajectories] == [SCORE]
    assert len(rewards.requests("ListRewards")) == 3
