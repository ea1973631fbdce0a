"""The client against the real scheduler and rollout service; the engine alone is a fake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import treadle
from support.conditions import until
from support.fake_engine import FakeEngine, Script, token_at
from support.mesh_in_process import QUICK, WAIT_S, Port, engine_port
from support.processes import ServiceProcess, StartService
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

PROMPT = [1, 2, 3]
LEASE_TTL_S = 60.0  # nobody renews the fakes' leases, and no test takes so long


async def register(scheduler: str, engine_id: str, address: str) -> None:
    info = engine_pb2.EngineInfo(
        engine_id=engine_id, address=address, model="fake", weight_version="0", slot_limit=8, max_context_tokens=4096
    )
    async with grpc.aio.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await stub.RegisterEngine(scheduler_pb2.RegisterEngineRequest(request_id=engine_id, info=info), timeout=WAIT_S)


@asynccontextmanager
async def engines(scheduler: str, *engine_ids: str) -> AsyncIterator[dict[str, FakeEngine]]:
    """Fake engines behind real servers, registered at the scheduler."""
    fakes = {engine_id: FakeEngine(engine_id, lambda ticket_id: None) for engine_id in engine_ids}  # type: ignore[abstract]
    ports: list[Port] = []
    try:
        for engine_id, fake in fakes.items():
            port = engine_port(fake)
            ports.append(port)
            await port.start()
            await register(scheduler, engine_id, port.address)
        yield fakes
    finally:
        for port in ports:
            await port.stop()


async def start_scheduler(start_service: StartService, **settings: str) -> ServiceProcess:
    env = {"TREADLE_SCHEDULER_LEASE_TTL_S": str(LEASE_TTL_S)}
    return await start_service(
        "treadle_scheduler", {**env, **{f"TREADLE_SCHEDULER_{k}": v for k, v in settings.items()}}
    )


async def one_turn(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    for _ in range(2):
        async for _chunk in trajectory.generate(treadle.Sampling(max_new_tokens=4)):
            pass
        trajectory.observe([9])
    return 1.0


async def test_a_rollout_goes_through_the_real_scheduler_and_rollout_service(start_service: StartService) -> None:
    rollout = await start_service("treadle_rollout")
    scheduler = await start_scheduler(start_service, ROLLOUT=rollout.address)
    prompts = [treadle.Prompt(f"p{n}", [n, n + 1]) for n in range(2)]
    async with engines(scheduler.address, "e0", "e1"), treadle.Client(scheduler.address, retry=QUICK) as client:
        result = await client.rollout(prompts, one_turn, samples_per_prompt=3, keep_per_prompt=2)
        assert [t.error for t in result.trajectories] == [""] * 6
        assert sum(t.kept for t in result.trajectories) == 4
        batch = await client.get_batch(result.rollout_id, max_groups=2)
        assert [len(group.trajectories) for group in batch.groups] == [2, 2]
        kept = {t.trajectory_id: t for t in result.trajectories if t.kept}
        for group in batch.groups:
            for t in group.trajectories:
                assert (t.tokens, t.loss_mask) == (kept[t.trajectory_id].tokens, kept[t.trajectory_id].loss_mask)


async def test_a_stream_lost_in_the_middle_goes_on_under_a_ticket_of_the_real_scheduler(
    start_service: StartService,
) -> None:
    scheduler = await start_scheduler(start_service)
    async with engines(scheduler.address, "e0") as fakes, treadle.Client(scheduler.address, retry=QUICK) as client:
        fakes["e0"].script = Script(lose_at=4)
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        async for _ in t.generate(treadle.Sampling(max_new_tokens=10)):
            pass
        assert t.steps[0].token_ids == [token_at(PROMPT, i) for i in range(10)]
        first, second = fakes["e0"].requests("Generate")
        assert first.ticket.ticket_id != second.ticket.ticket_id
        await t.close()


async def test_a_long_turn_in_calls_goes_through_the_real_scheduler_also_where_one_is_lost_or_left(
    start_service: StartService,
) -> None:
    """Calls of 4 tokens; the second loses its engine in the middle, and the next turn is left in its second call.

    Result: the real scheduler gives a ticket for each; no token is missing or comes twice.
    """
    scheduler = await start_scheduler(start_service)
    async with (
        engines(scheduler.address, "e0") as fakes,
        treadle.Client(scheduler.address, retry=QUICK, call_tokens=4) as client,
    ):
        engine = fakes["e0"]
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
        assert [(s.turn, len(s.token_ids), s.finish_reason) for s in t.steps] == [(0, 10, "length"), (1, 6, "aborted")]


async def test_steps_left_early_in_every_way_leave_the_real_scheduler_in_order(start_service: StartService) -> None:
    """A step is broken off after two tokens, another before its first; each time the trajectory goes on.

    Result: the real scheduler takes every next request, and the trajectory closes.
    """
    scheduler = await start_scheduler(start_service)
    async with engines(scheduler.address, "e0") as fakes, treadle.Client(scheduler.address, retry=QUICK) as client:
        engine = fakes["e0"]
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
        async for _ in t.generate(treadle.Sampling(max_new_tokens=10)):
            pass
        assert [(s.turn, len(s.token_ids), s.finish_reason) for s in t.steps] == [(0, 2, "aborted"), (1, 10, "length")]
        await t.close(reward=0.0)


async def test_the_real_scheduler_is_killed_in_the_middle_and_the_client_goes_on(start_service: StartService) -> None:
    """SIGKILL between two turns; a new process takes the same address and NATS store.

    Result: the client's call waits for it; turn and trajectory are the same; nothing runs twice.
    """
    scheduler = await start_scheduler(start_service)
    async with engines(scheduler.address, "e0") as fakes, treadle.Client(scheduler.address, retry=QUICK) as client:
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        async for _ in t.generate(treadle.Sampling(max_new_tokens=4)):
            pass
        scheduler.kill()
        await scheduler.wait()

        async def go_on() -> None:
            async for _ in t.generate(treadle.Sampling(max_new_tokens=4)):
                pass
            await t.close(reward=1.0)

        async with asyncio.timeout(WAIT_S * 2), asyncio.TaskGroup() as group:
            group.create_task(go_on())
            await start_scheduler(start_service, LISTEN=scheduler.address)
        assert [step.turn for step in t.steps] == [0, 1]
        assert len(fakes["e0"].requests("Generate")) == 2
