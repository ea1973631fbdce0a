"""Every trajectory says where its time went: on a mesh of real services, of which the engines alone
are fakes."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path

import grpc.aio
import pytest
import treadle
from support.conditions import until, until_said
from support.fake_migration_peers import MigratorCalls
from support.mesh_with_ledgers import PROMPT, TOKEN_S, Mesh, mesh
from support.processes import StartService
from treadle.migrator.v1 import migrator_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.types import seconds

PARTS = tuple(field.name for field in pb.Ledger.DESCRIPTOR.fields if field.name != "wall")
EXACT = 0.01  # of the wall time, by which the sum of the parts may differ
TOOL_S = 0.4


def spent(ledger: pb.Ledger, *parts: str) -> float:
    return sum(seconds(getattr(ledger, part)) for part in parts or PARTS)


async def use_tool(t: treadle.Trajectory, seconds: float = TOOL_S) -> None:
    result = await t.tool("python", {"code": f"import time; time.sleep({seconds})"})
    assert result.ok, result.error
    t.observe([7, 8])


async def take_step(t: treadle.Trajectory, tokens: int) -> None:
    async for _ in t.generate(
        treadle.Sampling(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    ):
        pass


async def move(m: Mesh, t: treadle.Trajectory) -> None:
    """To the other engine, while its tool runs."""
    said = await until_said(
        lambda: m.control.trajectory(t.trajectory_id),
        lambda said: said.state == pb.TRAJECTORY_STATE_IDLE,
    )
    at = {
        info.engine_id: migrator_pb2.Endpoint(engine_id=info.engine_id, address=info.address)
        for info in await m.control.engines()
    }
    (target,) = set(at) - {said.engine_id}
    request = migrator_pb2.StartMigrationRequest(
        request_id=uuid.uuid4().hex,
        trajectory_id=t.trajectory_id,
        source=at[said.engine_id],
        target=at[target],
        expected_revision=said.revision,
        remaining_tokens=100.0,
        cache_salt="default",
        allow_prefill=True,
    )
    async with grpc.aio.insecure_channel(m.migrator.address) as channel:
        done = await MigratorCalls(channel).moved(request)
    assert done.state == migrator_pb2.MIGRATION_STATE_DONE, done


async def check_sum(m: Mesh, t: treadle.Trajectory) -> pb.Ledger:
    """The sum against the time by the scheduler's clock, and by the client's own, which begins a
    little later. The scheduler may have closed it long before the client got the answer, where it
    was killed between the two."""
    ledger = await m.ledger(t)
    seen_s = max(span.end_s for span in t.spans) - t.opened_s
    assert spent(ledger) == pytest.approx(seconds(ledger.wall), rel=EXACT), ledger
    assert spent(ledger) >= (1 - EXACT) * seen_s, ledger
    return ledger


@pytest.mark.timeout(240)
async def test_parts_add_up_with_tools_queues_preemptions_a_move_new_weights_and_a_restart(
    start_service: StartService,
) -> None:
    """GIVEN   two engines of one slot, and twelve trajectories of three turns with tools between, half
    of them short
    WHEN    all engines load other weights, one trajectory is moved, and the scheduler is killed and
    started again
    Result: of each trajectory the parts add up to the time from its opening to its closing; what
    happened is in its
            part, and what the restart took is held or control"""
    async with mesh(start_service) as m:
        for engine in m.engines:
            engine.load_s = 1.0
        steps: list[str] = []
        moved = asyncio.Event()

        async def run(number: int) -> treadle.Trajectory:
            short = number % 2 == 0
            t = await m.client.open(
                prompt_id=f"p{number}", sample=0, prompt=PROMPT, max_total_tokens=90 if short else 0
            )
            for turn in range(3):
                await take_step(t, 30 if short else 60)
                steps.append(t.trajectory_id)
                if len(steps) == 1:
                    await asyncio.gather(use_tool(t), move(m, t))
                    moved.set()
                elif turn < 2:
                    await use_tool(t)
            await t.close(reward=1.0)
            return t

        running = [asyncio.create_task(run(number)) for number in range(12)]
        await moved.wait()
        await m.client.update_weights("/m/v2", "v2")
        await until(lambda: len(steps) >= 12)
        await m.restart_scheduler()
        ran = await asyncio.gather(*running)
        ledgers = [await check_sum(m, t) for t in ran]

    for ledger, t in zip(ledgers, ran, strict=True):
        seen_s = sum(span.end_s - span.start_s for span in t.spans if span.kind == "tool")
        assert spent(ledger, "tool") == pytest.approx(seen_s, abs=0.5), (
            "and the moment before it closes"
        )
        assert spent(ledger, "tool") >= 2 * TOOL_S
    assert sum(spent(ledger, "decode") for ledger in ledgers) >= 12 * 3 * 29 * TOKEN_S
    assert sum(spent(ledger, "weights") for ledger in ledgers) >= 1.0
    for part in ("held", "queue", "prefill", "control"):
        assert sum(spent(ledger, part) for ledger in ledgers) > 0.0, part


async def test_a_step_that_is_evicted_waits_as_preempted_and_not_in_the_queue(
    start_service: StartService,
) -> None:
    """A long trajectory comes while a short one has the only slot. Result: the short one is
    preempted, for as long as the long one runs."""
    async with mesh(start_service, engines=1) as m:
        await m.control.set_policy(preempt=True)  # without reserves: both are at the engine
        short = await m.client.open(
            prompt_id="short", sample=0, prompt=PROMPT, max_total_tokens=100
        )
        step = asyncio.create_task(take_step(short, 100))
        await until(lambda: m.engines[0].sampled >= 10)
        m.engines[0].token_s = 5 * TOKEN_S  # so that the rest lasts until the long one comes
        long = await m.client.open(prompt_id="long", sample=0, prompt=PROMPT)
        await take_step(long, 100)
        m.engines[0].token_s = TOKEN_S
        await step
        assert short.steps[0].preemptions == 1
        for t in (short, long):
            await t.close()
        of_short, of_long = await check_sum(m, short), await check_sum(m, long)
    assert spent(of_short, "preempted") == pytest.approx(
        spent(of_long, "prefill", "decode"), rel=0.2
    )
    assert spent(of_long, "preempted") == 0.0


async def test_time_on_an_engine_that_is_lost_is_what_its_client_saw(
    start_service: StartService,
) -> None:
    """The sidecar is killed in the middle of a step. Result: the part before that is decode, and
    nothing is missing."""
    async with mesh(start_service) as m:
        t = await m.client.open(prompt_id="p", sample=0, prompt=PROMPT)
        step = asyncio.create_task(take_step(t, 300))
        await until(lambda: any(engine.running for engine in m.engines))
        await asyncio.sleep(150 * TOKEN_S)
        (at,) = [number for number, engine in enumerate(m.engines) if engine.running]
        m.sidecars[at].kill()
        await step
        await t.close()
        assert len(t.steps[0].engine_ids) == 2
        ledger = await check_sum(m, t)
    assert spent(ledger, "decode") >= 250 * TOKEN_S  # the client sees the first token a little late


async def test_a_step_without_any_engine_is_held(start_service: StartService) -> None:
    async with mesh(start_service, engines=1) as m:
        t = await m.client.open(prompt_id="p", sample=0, prompt=PROMPT)
        await take_step(t, 20)
        m.sidecars[0].terminate()
        await m.control.until_registered(0)
        step = asyncio.create_task(take_step(t, 20))
        held = await until_said(
            lambda: m.control.trajectory(t.trajectory_id),
            lambda said: seconds(said.ledger.held) > 1.0,
        )
        assert seconds(held.ledger.wall) >= spent(held.ledger), "until now"
        await m.control.close(t.trajectory_id, request_id=uuid.uuid4().hex)
        with pytest.raises(treadle.TreadleError):
            await step
        ledger = (await m.control.trajectory(t.trajectory_id)).ledger
    assert spent(ledger, "held") > 1.0


async def test_treadle_explain_tells_of_a_mesh_what_its_scheduler_knows(
    start_service: StartService, tmp_path: Path
) -> None:
    """Three trajectories of a rollout, of which one is explained: closed, and before that while its
    step runs."""
    async with mesh(start_service, engines=1) as m:

        async def explain(t: treadle.Trajectory, *options: str) -> str:
            command = (sys.executable, "-m", "treadle_cli", "explain", t.trajectory_id)
            process = await asyncio.create_subprocess_exec(
                *(*command, "--scheduler", m.scheduler.address, *options),
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
            )
            printed, _ = await process.communicate()
            assert process.returncode == 0
            return printed.decode()

        async def run(number: int) -> treadle.Trajectory:
            t = await m.client.open(prompt_id="p", sample=number, prompt=PROMPT, rollout_id="r")
            await take_step(t, 30)
            await use_tool(t)
            await take_step(t, 20)
            await t.close(reward=1.0)
            return t

        first, *_ = await asyncio.gather(*(run(number) for number in range(3)))
        ledger = await check_sum(m, first)
        told = json.loads(await explain(first, "--json"))
        running = await m.client.open(prompt_id="p", sample=9, prompt=PROMPT)
        step = asyncio.create_task(take_step(running, 1_000))
        await until(lambda: m.engines[0].running)
        m.engines[0].token_s = 1.0  # so that it still runs when the command has started
        text = " ".join((await explain(running)).split())
        step.cancel()

    assert told["ledger"] == pytest.approx({f"{part}_s": spent(ledger, part) for part in PARTS})
    assert [each["kind"] for each in told["decisions"] if each["kind"] == "ticket"] == [
        "ticket"
    ] * 2
    assert told["recorded"]["trajectory_s"] <= told["recorded"]["rollout_s"]
    assert [fate["policy"] for fate in told["simulated"]] == ["fcfs", "sticky", "verl", "treadle"]
    for fate in told["simulated"]:
        assert fate["rollout_s"] == pytest.approx(told["recorded"]["rollout_s"], rel=0.9)
    assert "not accounted for yet: a step is on e0" in text
    assert "It has sampled nothing yet" in text
