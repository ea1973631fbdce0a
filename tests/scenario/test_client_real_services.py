"""The client against the real scheduler and rollout service; the engine alone is a fake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import treadle
from support.conditions import until
from support.fake_engine import FakeEngine, Script, leased_engines, token_at
from support.fake_servicer import Refusal
from support.mesh_in_process import QUICK, WAIT_S, generate
from support.processes import StartService

PROMPT = [1, 2, 3]


@asynccontextmanager
async def one_engine(
    scheduler: str, **options: Any
) -> AsyncIterator[tuple[FakeEngine, treadle.Client]]:
    client = treadle.Client(scheduler, retry=QUICK, **options)
    async with leased_engines(None, scheduler, ["e0"]) as [engine], client:
        yield engine, client


async def one_turn(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    for _ in range(2):
        await generate(trajectory, 4)
        trajectory.observe([9])
    return 1.0


async def test_a_rollout_goes_through_the_real_scheduler_and_rollout_service(
    start_service: StartService,
) -> None:
    rollout = await start_service("treadle_rollout")
    scheduler = await start_service(
        "treadle_scheduler", {"TREADLE_SCHEDULER_ROLLOUT": rollout.address}
    )
    prompts = [treadle.Prompt(f"p{n}", [n, n + 1]) for n in range(2)]
    async with (
        leased_engines(None, scheduler.address, ["e0", "e1"]),
        treadle.Client(scheduler.address, retry=QUICK) as client,
    ):
        result = await client.rollout(prompts, one_turn, samples_per_prompt=3, keep_per_prompt=2)
        assert [t.error for t in result.trajectories] == [""] * 6
        assert sum(t.kept for t in result.trajectories) == 4
        batch = await client.get_batch(result.rollout_id, max_groups=2)
        assert [len(group.trajectories) for group in batch.groups] == [2, 2]
        kept = {t.trajectory_id: t for t in result.trajectories if t.kept}
        for group in batch.groups:
            for t in group.trajectories:
                assert (t.tokens, t.loss_mask) == (
                    kept[t.trajectory_id].tokens,
                    kept[t.trajectory_id].loss_mask,
                )


async def test_processes_that_share_a_rollout_run_a_part_each_and_settle_groups_together(
    start_service: StartService,
) -> None:
    """Two clients run halves of a rollout that keeps two of four samples. The agents of the second
    one never end.

    Result: the first one's samples settle every group, which ends those of the second one; each
    trajectory comes once.
    """
    rollout = await start_service("treadle_rollout")
    scheduler = await start_service(
        "treadle_scheduler", {"TREADLE_SCHEDULER_ROLLOUT": rollout.address}
    )
    prompts = [treadle.Prompt(f"p{n}", [n, n + 1]) for n in range(3)]
    shared: dict[str, Any] = {
        "samples_per_prompt": 4,
        "keep_per_prompt": 2,
        "rollout_id": "epoch-1",
    }

    async def never_end(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        await one_turn(trajectory, prompt)
        await asyncio.Event().wait()
        return 0.0

    async with (
        leased_engines(None, scheduler.address, ["e0", "e1"]),
        treadle.Client(scheduler.address, retry=QUICK) as first,
        treadle.Client(scheduler.address, retry=QUICK) as second,
    ):
        results = await asyncio.gather(
            second.rollout(prompts, never_end, part=(1, 2), **shared),
            first.rollout(prompts, one_turn, part=(0, 2), **shared),
        )
        assert [[(t.prompt_id, t.sample) for t in result.trajectories] for result in results] == [
            [(prompt.id, sample) for prompt in prompts for sample in samples]
            for samples in ((1, 3), (0, 2))
        ]
        assert {t.outcome for t in results[0].trajectories} == {"cancelled"}
        batch = await first.get_batch("epoch-1", max_groups=3)
        assert [sorted(t.sample for t in group.trajectories) for group in batch.groups] == [
            [0, 2]
        ] * 3
        with pytest.raises(
            treadle.TreadleError, match="rollout_id: epoch-1 has other prompts"
        ) as refused:
            await first.rollout(prompts[:1], one_turn, part=(0, 2), **shared)
        assert refused.value.field_violations[0].field == "rollout_id"
        for part, name in (((2, 2), "r"), ((0, 2), ""), ((-1, 2), "r")):
            with pytest.raises(ValueError, match="part"):
                await first.rollout(prompts, one_turn, rollout_id=name, part=part)


async def test_a_long_turn_in_calls_goes_through_the_real_scheduler_also_where_one_is_lost_or_left(
    start_service: StartService,
) -> None:
    """Calls of 4 tokens; the second loses its engine in the middle, and the next turn is left in
    its second call.

    Result: the real scheduler gives a ticket for each; no token is missing or comes twice.
    """
    scheduler = await start_service("treadle_scheduler")
    async with one_engine(scheduler.address, call_tokens=4) as (engine, client):
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        stream = t.generate(treadle.Sampling(max_new_tokens=10))
        for _ in range(2):
            await anext(stream)
        engine.script = Script(lose_at=2)
        async for _ in stream:
            pass
        first = [token_at(PROMPT, index) for index in range(4)]
        second = [token_at([*PROMPT, *first], index) for index in range(4)]
        third = [token_at([*PROMPT, *first, *second], index) for index in range(2)]
        assert t.steps[0].token_ids == [*first, *second, *third]
        assert [request.ticket.turn for request in engine.requests("Generate")] == [0, 1, 1, 2]
        t.observe([9])
        stream = t.generate(treadle.Sampling(max_new_tokens=10))
        for _ in range(3):
            await anext(stream)
        await t.close(outcome="truncated")
        assert [(s.turn, len(s.token_ids), s.finish_reason) for s in t.steps] == [
            (0, 10, "length"),
            (1, 6, "aborted"),
        ]


async def test_an_engine_that_refuses_a_step_keeps_its_trajectory(
    start_service: StartService,
) -> None:
    """Each of two engines would refuse one step. Result: the repeated step runs at the engine that
    has refused it."""
    scheduler = await start_service("treadle_scheduler")
    async with (
        leased_engines(None, scheduler.address, ["e0", "e1"]) as engines,
        treadle.Client(scheduler.address, retry=QUICK) as client,
    ):
        for engine in engines:
            engine.refuse_next(
                "Generate", Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
            )
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        with pytest.raises(treadle.TreadleError, match="INVALID_ARGUMENT"):
            await generate(t, 4)
        await generate(t, 4)
        (used,) = [engine for engine in engines if engine.requests("Generate")]
        assert [request.ticket.turn for request in used.requests("Generate")] == [0, 0]


async def test_steps_left_early_in_every_way_leave_the_real_scheduler_in_order(
    start_service: StartService,
) -> None:
    """A step is broken off after two tokens, another before its first; each time the trajectory
    goes on.

    Result: the real scheduler takes every next request, and the trajectory closes.
    """
    scheduler = await start_service("treadle_scheduler")
    async with one_engine(scheduler.address) as (engine, client):
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        engine.script = Script(hold_at=2)
        async for _ in t.generate(treadle.Sampling(max_new_tokens=10)):
            break
        await until(engine.holding.is_set)  # by this stream, and not by the next
        t.observe([9])
        engine.script, engine.holding = Script(hold_at=0), asyncio.Event()
        stream = t.generate(treadle.Sampling(max_new_tokens=10))
        first = asyncio.ensure_future(anext(stream))
        await until(engine.holding.is_set)
        first.cancel()
        await asyncio.wait({first})
        await generate(t, 10)
        assert [(s.turn, len(s.token_ids), s.finish_reason) for s in t.steps] == [
            (0, 2, "aborted"),
            (1, 10, "length"),
        ]
        await t.close(reward=0.0)


@pytest.mark.parametrize("call_tokens", [0, 4])
async def test_a_step_that_the_real_scheduler_refuses_does_not_spoil_the_next_one(
    start_service: StartService, call_tokens: int
) -> None:
    scheduler = await start_service("treadle_scheduler")
    async with one_engine(scheduler.address, call_tokens=call_tokens) as (_, client):
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        for _ in range(2):
            with pytest.raises(
                treadle.TreadleError, match=r"^INVALID_ARGUMENT max_new_tokens: must be > 0, is 0$"
            ):
                await generate(t, 0)
        await generate(t, 4)
        assert [step.turn for step in t.steps] == [0]


async def test_tags_that_no_engine_carries_are_named_at_once_and_refused_after_a_while(
    start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    """Result: one warning for all trajectories; then an error that says which tags there are."""
    scheduler = await start_service("treadle_scheduler", {"TREADLE_SCHEDULER_MISSING_TAGS_S": "1"})
    lack = "none of the 1 engines carries the hardware tags h100, fp8; engines have no tags"
    async with one_engine(scheduler.address) as (engine, client):
        await until(lambda: engine.lease_id)
        for sample in range(2):
            t = await client.open(
                prompt_id="p0", sample=sample, prompt=PROMPT, hardware_tags=["h100", "fp8"]
            )
            with pytest.raises(treadle.TreadleError, match=f"{lack}, for over 1 s") as refused:
                await generate(t, 4)
            assert refused.value.reason == "NO_ENGINE_WITH_TAGS"
    (warning,) = [record for record in caplog.records if record.name == "treadle"]
    assert lack in warning.getMessage()


async def test_the_real_scheduler_is_killed_in_the_middle_and_the_client_goes_on(
    start_service: StartService,
) -> None:
    """SIGKILL between two turns; a new process takes the same address and NATS store.

    Result: the client's call waits for it; turn and trajectory are the same; nothing runs twice.
    """
    scheduler = await start_service("treadle_scheduler")
    async with one_engine(scheduler.address) as (engine, client):
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        await generate(t, 4)
        scheduler.kill()
        await scheduler.wait()

        async def go_on() -> None:
            await generate(t, 4)
            await t.close(reward=1.0)

        async with asyncio.timeout(WAIT_S * 5), asyncio.TaskGroup() as group:
            group.create_task(go_on())
            await start_service(
                "treadle_scheduler", {"TREADLE_SCHEDULER_LISTEN": scheduler.address}
            )
        assert [step.turn for step in t.steps] == [0, 1]
        assert len(engine.requests("Generate")) == 2
