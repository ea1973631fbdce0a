"""Which samples are run, ended, replaced and taken, through the real scheduler and rollout service;
the engines alone are fakes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import treadle
from support.conditions import until
from support.fake_engine import FakeEngine, Script, leased_engines
from support.mesh_in_process import QUICK, WAIT_S, generate
from support.processes import StartService
from treadle.trajectory import TRAJECTORY_CLOSED
from treadle_runtime.bus import Bus

POLL_S = 0.1
PROMPTS = [treadle.Prompt(f"p{number}", [number, number + 1]) for number in range(4)]


@dataclass(frozen=True)
class Mesh:
    """Two clients, and the engines whose tokens they get."""

    engines: list[FakeEngine]
    client: treadle.Client
    other: treadle.Client


@pytest.fixture
async def mesh(start_service: StartService, bus: Bus) -> AsyncIterator[Mesh]:
    rollout = await start_service("treadle_rollout")
    scheduler = await start_service(
        "treadle_scheduler", {"TREADLE_SCHEDULER_ROLLOUT": rollout.address}
    )
    async with (
        leased_engines(bus, scheduler.address, ["e0", "e1"]) as engines,
        treadle.Client(scheduler.address, retry=QUICK) as client,
        treadle.Client(scheduler.address, retry=QUICK) as other,
    ):
        yield Mesh(engines, client, other)


@asynccontextmanager
async def running(
    call: asyncio.Task[treadle.RolloutResult],
) -> AsyncIterator[asyncio.Task[treadle.RolloutResult]]:
    """A rollout beside the test, which ends with it."""
    try:
        yield call
    finally:
        call.cancel()
        await asyncio.wait({call})


async def one_turn(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    await generate(trajectory, 4 + trajectory.sample)
    return float(trajectory.sample % 2)


async def test_the_mesh_ends_a_sample_of_a_settled_group_though_its_client_does_not_hear_of_it(
    mesh: Mesh,
) -> None:
    """A client has opened sample 1 by itself and generates without an end; one of another prompt
    too. Sample 0 of another client settles the group.

    Result: the step is aborted at its engine and the trajectory closed as cancelled; the other
    prompt's goes on.
    """
    for engine in mesh.engines:
        engine.script = Script(hold_at=2, times=9, only_max_new_tokens=50)
    held = [
        await mesh.other.open(prompt_id=prompt, sample=1, prompt=[1, 2], rollout_id="epoch")
        for prompt in ("p0", "p1")
    ]
    steps = [asyncio.create_task(generate(trajectory, 50)) for trajectory in held]
    await until(lambda: sum(len(engine.running) for engine in mesh.engines) == 2)
    await mesh.client.rollout(
        PROMPTS[:2],
        one_turn,
        samples_per_prompt=2,
        keep_per_prompt=1,
        rollout_id="epoch",
        concurrency=1,
        part=(0, 4),
    )
    async with asyncio.timeout(WAIT_S):
        assert len(await steps[0]) == 2
        with pytest.raises(treadle.TreadleError) as ended:
            await generate(held[0], 1)
    assert (ended.value.reason, ended.value.metadata["state"]) == (TRAJECTORY_CLOSED, "cancelled")
    assert len([ticket for engine in mesh.engines for ticket in engine.aborted]) == 1
    assert not steps[1].done()
    steps[1].cancel()


async def test_an_agent_whose_step_the_mesh_has_ended_counts_as_cancelled_and_hands_nothing_in(
    mesh: Mesh,
) -> None:
    """Two parts of a rollout in two clients. The sample of the second waits for its engine when the
    first one's settles the group, of which the second hears by its watch and by the end of its
    step.

    Result: cancelled without an error, and the service has one sample.
    """
    for engine in mesh.engines:
        engine.script = Script(hold_at=2, times=9, only_max_new_tokens=50)

    async def long_turn(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        await generate(trajectory, 50)
        return 1.0

    shared: dict[str, Any] = {"samples_per_prompt": 2, "keep_per_prompt": 1, "rollout_id": "epoch"}
    call = asyncio.create_task(mesh.other.rollout(PROMPTS[:1], long_turn, part=(1, 2), **shared))
    async with running(call):
        await until(lambda: sum(len(engine.running) for engine in mesh.engines) == 1)
        await mesh.client.rollout(PROMPTS[:1], one_turn, part=(0, 2), **shared)
        async with asyncio.timeout(WAIT_S):
            [sample] = (await call).trajectories
    assert (sample.outcome, sample.error, sample.kept) == ("cancelled", "", False)
    batch = await mesh.client.get_batch("epoch", max_groups=1)
    assert [[t.sample for t in group.trajectories] for group in batch.groups] == [[0]]


async def test_dual_end_sampling_trains_both_ends_of_each_group(mesh: Mesh) -> None:
    """Five samples of 4 to 8 tokens, of which three are kept, one of them the longest."""
    result = await mesh.client.rollout(
        PROMPTS[:2],
        one_turn,
        samples_per_prompt=5,
        keep_per_prompt=3,
        shaping=treadle.Shaping(rule="dual_end", longest=1),
    )
    batch = await mesh.client.get_batch(result.rollout_id, max_groups=2)
    assert [sorted(t.sample for t in group.trajectories) for group in batch.groups] == [
        [0, 1, 4]
    ] * 2


async def test_a_prompt_may_have_more_samples_than_others(mesh: Mesh) -> None:
    result = await mesh.client.rollout(
        PROMPTS[:3], one_turn, samples_per_prompt=2, shaping=treadle.Shaping(samples=(2, 4, 3))
    )
    assert [(t.prompt_id, t.sample) for t in result.trajectories] == [
        (prompt, sample)
        for prompt, samples in (("p0", 2), ("p1", 4), ("p2", 3))
        for sample in range(samples)
    ]


async def test_groups_that_are_not_needed_are_withdrawn(mesh: Mesh) -> None:
    """Two of four groups are needed; the agents of the others wait for ever.

    Result: these end as cancelled, and the batch has the two.
    """

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        reward = await one_turn(trajectory, prompt)
        if prompt.id in ("p0", "p2"):
            await asyncio.Event().wait()
        return reward

    async with asyncio.timeout(WAIT_S):
        result = await mesh.client.rollout(
            PROMPTS, agent, samples_per_prompt=2, shaping=treadle.Shaping(keep_groups=2)
        )
    assert {t.prompt_id for t in result.trajectories if t.outcome == "cancelled"} == {"p0", "p2"}
    batch = await mesh.client.get_batch(result.rollout_id, max_groups=4)
    assert sorted(group.prompt_id for group in batch.groups) == ["p1", "p3"] and batch.exhausted


async def test_no_more_groups_are_begun_than_may_be_open_until_a_trainer_takes_one(
    mesh: Mesh,
) -> None:
    """Two may be open. Each batch of one group lets one more begin; the rollout ends when the last
    has settled."""
    begun: list[str] = []

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        begun.append(prompt.id)
        return await one_turn(trajectory, prompt)

    def has_begun(count: int) -> bool:
        return len(begun) == count

    shaping = treadle.Shaping(max_open_groups=2)
    call = asyncio.create_task(
        mesh.client.rollout(
            PROMPTS, agent, samples_per_prompt=1, rollout_id="epoch", shaping=shaping
        )
    )
    async with running(call):
        taken: list[str] = []
        for opened in (2, 3, 4):
            await until(partial(has_begun, opened))
            batch = await mesh.other.get_batch("epoch", max_groups=1)
            taken += [group.prompt_id for group in batch.groups]
        async with asyncio.timeout(WAIT_S):
            result = await call
        last = await mesh.other.get_batch("epoch", max_groups=4)
    assert sorted(begun) == ["p0", "p1", "p2", "p3"] and len(result.trajectories) == 4
    assert sorted([*taken, *(group.prompt_id for group in last.groups)]) == sorted(begun)


@pytest.mark.parametrize("waiting", [1, 2])
async def test_a_rollout_keeps_the_pace_of_its_trainer_and_drops_groups_that_grew_too_old(
    mesh: Mesh, waiting: int
) -> None:
    """A batch has one group, the bound is one version, and the engines serve version 0. Of two
    samples of the second prompt, one or both wait in their agents.

    Result: two groups begin at once, and one more once a batch was taken and its weights are there.
    With version 2 the second group is dropped with both of its samples, and the last prompt begins.
    """
    begun: list[str] = []
    second_waits = asyncio.Semaphore(0)

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        begun.append(prompt.id)
        reward = await one_turn(trajectory, prompt)
        if prompt.id == "p1" and trajectory.sample >= 2 - waiting:
            second_waits.release()
            await asyncio.Event().wait()
        return reward

    shaping = treadle.Shaping(batch_groups=1)
    call = asyncio.create_task(
        mesh.client.rollout(
            PROMPTS,
            agent,
            samples_per_prompt=2,
            max_staleness=1,
            rollout_id="epoch",
            shaping=shaping,
        )
    )
    async with running(call), asyncio.timeout(WAIT_S):
        await until(lambda: begun)
        taken = [await mesh.other.get_batch("epoch", max_groups=1)]
        for _ in range(waiting):
            await second_waits.acquire()
        assert set(begun) == {"p0", "p1"}
        for engine in mesh.engines:
            engine.script = Script(version_from={0: "1"}, times=99)
        taken.append(await mesh.other.get_batch("epoch", max_groups=1, weight_version=1))
        for engine in mesh.engines:
            engine.script = Script(version_from={0: "2"}, times=99)
        taken.append(await mesh.other.get_batch("epoch", max_groups=1, weight_version=2))
        result = await call
        with pytest.raises(treadle.TreadleError) as refused:
            await mesh.other.get_batch("epoch", max_groups=2)
    assert [each.groups[0].prompt_id for each in taken] == ["p0", "p2", "p3"]
    assert all(len(each.groups[0].trajectories) == 2 for each in taken) and taken[-1].exhausted
    of_second = [each for each in result.trajectories if each.prompt_id == "p1"]
    assert sum(each.outcome == "cancelled" for each in of_second) == waiting
    assert not any(each.kept for each in of_second if each.outcome == "cancelled")
    report = await mesh.other.shaping_report(rollout_id="epoch")
    assert report.drops["stale"] >= 1 and report.trained == 6
    assert [each.field for each in refused.value.field_violations] == ["max_groups"]


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_trainer_that_may_be_behind_and_bounds_open_groups_is_served_first_come(
    mesh: Mesh, max_staleness: int
) -> None:
    """Each agent takes two turns.

    Result: with a tolerance of a version, a trajectory keeps its place in the queue.
    """

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        await one_turn(trajectory, prompt)
        return await one_turn(trajectory, prompt)

    await mesh.client.rollout(
        PROMPTS,
        agent,
        samples_per_prompt=1,
        max_staleness=max_staleness,
        shaping=treadle.Shaping(max_open_groups=len(PROMPTS)),
    )
    tickets = [
        call.request.ticket
        for engine in mesh.engines
        for call in engine.calls
        if call.method == "Generate"
    ]
    assert len(tickets) == 2 * len(PROMPTS)
    places = {(ticket.trajectory_id, ticket.priority) for ticket in tickets}
    assert (len(places) == len(PROMPTS)) == (max_staleness > 0)


async def test_samples_that_are_too_old_are_replaced_so_that_every_batch_is_whole(
    mesh: Mesh,
) -> None:
    """The engines serve version "default", which counts as 0, and from the first batch on version
    1. The bound is 0. Of the second prompt one sample has come and one still runs, with tokens of
    version 0, when the trainer is at 1.

    Result: both are run again, and its batch has two samples of version 1.
    """
    runs: list[tuple[str, int]] = []
    second_waits = asyncio.Event()

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        runs.append((prompt.id, trajectory.sample))
        reward = await one_turn(trajectory, prompt)
        if runs.count((prompt.id, trajectory.sample)) == 1 and (prompt.id, trajectory.sample) == (
            "p1",
            1,
        ):
            second_waits.set()
            await asyncio.Event().wait()
        return reward

    shaping = treadle.Shaping(replace_stale=True)
    call = asyncio.create_task(
        mesh.client.rollout(
            PROMPTS[:2],
            agent,
            samples_per_prompt=2,
            max_staleness=0,
            rollout_id="epoch",
            shaping=shaping,
        )
    )
    async with running(call), asyncio.timeout(WAIT_S):
        await until(lambda: runs)
        first = await mesh.other.get_batch("epoch", max_groups=1)
        await second_waits.wait()
        await until(lambda: len(runs) == 4)
        for engine in mesh.engines:
            engine.script = Script(version_from={0: "1"}, times=99)
        second = await mesh.other.get_batch("epoch", max_groups=1, weight_version=1)
        await call
    assert [group.prompt_id for group in (*first.groups, *second.groups)] == ["p0", "p1"]
    [group] = second.groups
    assert [[span.weight_version for span in t.version_spans] for t in group.trajectories] == [
        ["1"],
        ["1"],
    ]
    assert sorted(runs[4:]) == [("p1", 1), ("p1", 2)] and second.exhausted


async def test_a_batch_that_waits_has_what_there_is_when_its_time_is_over(mesh: Mesh) -> None:
    """One of two groups settles. A batch of two may wait for a moment.

    Result: it has one group, and a later one the other.
    """
    goes_on = asyncio.Event()

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        if prompt.id == "p1":
            await goes_on.wait()
        return await one_turn(trajectory, prompt)

    call = asyncio.create_task(
        mesh.client.rollout(PROMPTS[:2], agent, samples_per_prompt=1, rollout_id="epoch")
    )
    async with running(call), asyncio.timeout(WAIT_S):
        sizes: list[int] = []
        while sum(sizes) == 0:  # the rollout may not be there yet, nor its first group
            try:
                early = await mesh.other.get_batch("epoch", max_groups=2, wait_at_most_s=0.1)
            except treadle.TreadleError as error:
                assert error.reason == "ROLLOUT_NOT_FOUND"
                continue
            sizes.append(len(early.groups))
        assert sizes[-1] == 1 and not early.exhausted
        goes_on.set()
        late = await mesh.other.get_batch("epoch", max_groups=2, wait_at_most_s=60.0)
    assert [group.prompt_id for group in late.groups] == ["p1"]


async def test_each_rank_of_a_trainer_gets_its_part_of_a_batch(mesh: Mesh) -> None:
    """Three ranks take four groups; one asks twice, as its first answer might have been lost.

    Result: parts of 2, 1 and 1 groups, each group once; a rank that gives other parameters is
    refused.
    """
    result = await mesh.client.rollout(PROMPTS, one_turn, samples_per_prompt=2)
    parts = await asyncio.gather(
        *(
            mesh.other.get_batch(result.rollout_id, max_groups=4, batch_id="step-1", part=(rank, 3))
            for rank in range(3)
        )
    )
    prompts = [[group.prompt_id for group in part.groups] for part in parts]
    assert sorted(map(len, prompts)) == [1, 1, 2]
    assert sorted(prompt for part in prompts for prompt in part) == ["p0", "p1", "p2", "p3"]
    with pytest.raises(treadle.TreadleError, match="request_id"):
        await mesh.other.get_batch(result.rollout_id, max_groups=3, batch_id="step-1", part=(0, 3))
    with pytest.raises(ValueError, match="batch_id"):
        await mesh.other.get_batch(result.rollout_id, part=(0, 3))


async def test_prompts_whose_lengths_vary_more_get_more_samples_in_the_next_rollout(
    mesh: Mesh,
) -> None:
    """In the first rollout the samples of p0 have lengths far apart, those of the others equal
    ones. Six samples may be started for two prompts of two kept ones each.

    Result: of the second rollout p0 has four samples and p1 two; the report counts both rollouts.
    """

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        await generate(trajectory, 4 + 30 * trajectory.sample * (prompt.id == "p0"))
        return float(trajectory.sample % 2)

    shaping = treadle.Shaping(history="run-7", budget=1.5)
    results = [
        await mesh.client.rollout(
            PROMPTS[:2], agent, samples_per_prompt=4, keep_per_prompt=2, shaping=shaping
        )
        for _ in range(2)
    ]
    first, second = ([t.prompt_id for t in result.trajectories] for result in results)
    assert (first.count("p0"), first.count("p1")) == (3, 3)
    assert (second.count("p0"), second.count("p1")) == (4, 2)
    report = await mesh.client.shaping_report(history="run-7")
    assert (report.trained, report.sampled >= 8) == (8, True)
    assert report.kept_fraction == pytest.approx(report.trained / report.sampled)
    with pytest.raises(treadle.TreadleError, match="HISTORY_NOT_FOUND"):
        await mesh.client.shaping_report(history="run-8")


async def test_a_cap_follows_successful_lengths_and_shapes_the_rewards_near_it(mesh: Mesh) -> None:
    """Ten successes of 1 to 10 tokens teach a cap; the ceiling is 40 tokens and the cap moves by
    10% a rollout.

    Result: the next rollout has a cap of 36, which its trajectories are opened with; the report
    says so. A success beyond the soft limit gets less, and its trainer is told the whole reward
    too.
    """
    left: list[int | None] = []

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        left.append(trajectory.tokens_left)
        await generate(trajectory, 1 + trajectory.sample)
        return 1.0

    cap = treadle.LengthCap(
        ceiling_tokens=40,
        floor_tokens=2,
        least_successes=10,
        percentile=0.9,
        soft_percentile=0.5,
        most_cut_share=0.2,
    )
    shaping = treadle.Shaping(history="run-7", length_cap=cap)
    for _ in range(2):
        result = await mesh.client.rollout(
            PROMPTS[:1], agent, samples_per_prompt=10, shaping=shaping
        )
    assert left == [40] * 10 + [36] * 10
    report = await mesh.client.shaping_report(history="run-7")
    assert 0 < report.length_cap_tokens < 36 and "successes" in report.length_cap_report
    batch = await mesh.client.get_batch(result.rollout_id, max_groups=1)
    trained = {t.sample: (t.reward, t.unshaped_reward) for t in batch.groups[0].trajectories}
    assert trained[0] == (1.0, None)
    assert 0.0 < trained[9][0] < 1.0 and trained[9][1] == 1.0


async def test_samples_that_were_ended_early_count_as_sampled(mesh: Mesh) -> None:
    """The first of two samples settles the group while the other one is in its second turn."""

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        await generate(trajectory, 4)
        if trajectory.sample == 1:
            turned.set()
            await asyncio.Event().wait()
        await turned.wait()
        return 1.0

    turned = asyncio.Event()
    result = await mesh.client.rollout(PROMPTS[:1], agent, samples_per_prompt=2, keep_per_prompt=1)
    report = await mesh.client.shaping_report(result.rollout_id)
    for _ in range(int(WAIT_S / POLL_S)):
        if report.sampled == 2:
            break
        # the scheduler tells of closings once their last tokens are counted
        await asyncio.sleep(POLL_S)
        report = await mesh.client.shaping_report(result.rollout_id)
    assert (report.trained, report.sampled_tokens, report.trained_tokens) == (1, 8, 4)
    assert report.drops == {"aborted": 1}
