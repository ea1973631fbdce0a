"""An operator drains an engine of a running mesh, by `treadle drain`."""

import asyncio
import json
import sys
import uuid
from pathlib import Path

import grpc
import treadle
from support.commands import output_of
from support.conditions import until_said
from support.fake_scheduler import FakeScheduler
from support.fake_servicer import Port, Refusal
from support.fake_sglang import expected
from support.mesh_of_processes import PROMPT, Fleet, fleet
from support.processes import StartService
from support.scheduler import scheduler
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server

DRAIN = (sys.executable, "-m", "treadle_cli", "drain")
TOP = (sys.executable, "-m", "treadle_cli", "top")
START_S = 90.0  # of a command, on a busy machine
TOKENS = 30
SAMPLING = treadle.Sampling(max_new_tokens=TOKENS, temperature=0.0)


async def engine(made: Fleet, name: str) -> pb.RegisteredEngine:
    (found,) = (each for each in await made.control.registered() if each.info.engine_id == name)
    return found


async def play(made: Fleet, name: str, turns: int, enough: asyncio.Event) -> None:
    """A trajectory of so many turns, and more until it is enough, each with the tokens of an
    undisturbed run."""
    t = await made.client.open(prompt_id=name, sample=0, prompt=PROMPT)
    context = list(PROMPT)
    while len(t.steps) < turns or not enough.is_set():
        async for _ in t.generate(SAMPLING):
            pass
        assert t.steps[-1].token_ids == expected(context, TOKENS)
        t.observe([7])
        context += [*t.steps[-1].token_ids, 7]
        await asyncio.sleep(0.02)
    await t.close()


async def test_an_engine_is_drained_while_trajectories_run_and_nothing_is_lost(
    start_service: StartService, tmp_path: Path
) -> None:
    """GIVEN   twelve trajectories of many turns on two engines
    WHEN    one engine is drained, and later used again
    Result: it gets empty while they run and no step goes there any more; each turn has its tokens,
    once; the last
            engine is not drained; a drain holds over a kill of the scheduler; after its end the
            engine gets steps"""
    async with fleet(start_service, token_s=0.005, PROBE_S="0") as made:
        where = ("--scheduler", made.scheduler.address)
        enough = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(play(made, f"p{number}", 3, enough))
            await until_said(lambda: engine(made, "e0"), lambda said: said.load.running_steps > 0)
            code, said, errors = await output_of(*DRAIN, "e0", "--json", *where, cwd=tmp_path)
            assert (code, json.loads(said)) == (
                0,
                {"engine": "e0", "draining": True, "trajectories": 0},
            ), errors
            said = (await output_of(*TOP, "--once", "--json", *where, cwd=tmp_path))[1]
            assert [each["health"] for each in json.loads(said)["engines"]] == ["drained", "ok"]
            steps = made.engines[0].steps
            for name, words in (
                ("e1", "no engine but e1 takes steps now"),
                ("e9", "no engine e9 holds a lease"),
            ):
                code, _, errors = await output_of(*DRAIN, name, *where, cwd=tmp_path)
                assert code == 2 and words in errors
            enough.set()
        assert made.engines[0].steps == steps > 0, "no step went there"
        await made.restart_scheduler()
        assert (await engine(made, "e0")).draining
        code, said, _ = await output_of(*DRAIN, "e0", "--undo", *where, cwd=tmp_path)
        assert code == 0 and "e0 takes steps again" in said
        async with asyncio.TaskGroup() as group:
            for number in range(12, 18):
                group.create_task(play(made, f"p{number}", 2, enough))
        assert made.engines[0].steps > steps


async def test_who_waits_for_a_drain_that_somebody_ends_is_told(
    nats_url: str, tmp_path: Path
) -> None:
    """A script that stops the engine once the command has ended well does not stop one that takes
    steps again."""
    async with scheduler(nats_url) as control:
        for name in ("e0", "e1"):
            await control.register(name)
        await control.open("t")
        name = (await control.step("t", 0)).engine_id
        waiting = asyncio.create_task(
            output_of(*DRAIN, name, "--scheduler", control.address, cwd=tmp_path)
        )
        await until_said(
            control.registered, lambda said: any(each.draining for each in said), START_S
        )
        undo = pb.DrainEngineRequest(request_id=uuid.uuid4().hex, engine_id=name, undo=True)
        await control.call("DrainEngine", undo)
        code, said, errors = await waiting
        assert (code, said.strip()) == (2, "") and f"the drain of {name} was ended" in errors


async def test_a_drain_whose_answer_is_lost_is_asked_for_again(tmp_path: Path) -> None:
    fake = FakeScheduler()  # type: ignore[abstract]
    fake.refuse_next("DrainEngine", Refusal(grpc.StatusCode.UNAVAILABLE, "AWAY", after=True))
    async with Port(add_SchedulerServiceServicer_to_server, fake) as address:
        code, said, errors = await output_of(
            *DRAIN, "e0", "--json", "--scheduler", address, cwd=tmp_path
        )
    assert (code, json.loads(said)["trajectories"]) == (0, 0), errors
    first, second = fake.requests("DrainEngine")
    assert first == second


async def test_the_wait_for_a_drain_goes_on_over_a_kill_of_the_scheduler(
    start_service: StartService, tmp_path: Path
) -> None:
    """
    GIVEN   an engine that hangs in a step
    WHEN    the scheduler is killed while the command waits for it, and starts again
    Result: the command waits until the engine is empty, and ends well"""
    async with (
        fleet(start_service, step_s=600.0, PROBE_S="0", ENGINE_STALL_S="600") as made,
        asyncio.TaskGroup() as group,
    ):
        for each in made.engines:
            each.hang()
        trajectory = group.create_task(made.run("p0", 100))
        found = await until_said(
            made.control.registered, lambda said: any(each.load.running_steps for each in said)
        )
        (name,) = (each.info.engine_id for each in found if each.load.running_steps)
        where = ("--scheduler", made.scheduler.address)
        waiting = asyncio.create_task(output_of(*DRAIN, name, "--json", *where, cwd=tmp_path))
        await until_said(lambda: engine(made, name), lambda said: said.draining, START_S)
        await made.restart_scheduler()
        assert (await engine(made, name)).trajectories == 1, "it is not empty yet"
        for each in made.engines:
            each.go_on()
        code, said, errors = await waiting
        assert (code, json.loads(said)) == (
            0,
            {"engine": name, "draining": True, "trajectories": 0},
        ), errors
        await trajectory
        assert (await engine(made, name)).trajectories == 0
