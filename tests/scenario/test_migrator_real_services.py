"""A move between real sidecars under a real scheduler; only the engines are fake."""

from contextlib import AsyncExitStack

import grpc.aio
from support.conditions import until_said
from support.engine_steps import run_step, step_request
from support.fake_migration_peers import MigratorCalls
from support.fake_sglang import expected, fake_sglang
from support.scheduler import SchedulerClient
from support.scheduler import scheduler as scheduler_service
from support.sidecar_in_process import Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2
from treadle_migrator.config import MigratorSettings
from treadle_migrator.wire import wire
from treadle_runtime.server import serving

PROMPT = list(range(10, 60))
NEW_TOKENS = 20
LISTEN = "127.0.0.1:0"


async def take_step(
    scheduler: SchedulerClient, sidecars: dict[str, Sidecar], turn: int, context: list[int]
) -> str:
    """One step wherever the scheduler sends it; adds its output to the context and returns the
    engine's id."""
    ticket = await scheduler.step("t", turn, context_tokens=len(context), max_new_tokens=NEW_TOKENS)
    request = step_request(
        ticket, context, SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    )
    result = await run_step(sidecars[ticket.engine_id].stub, request)
    result.require_whole()
    context += result.tokens
    return str(ticket.engine_id)


async def test_a_trajectory_moves_during_its_tool_call_and_goes_on_at_the_target(
    nats_url: str,
) -> None:
    """Step 0 runs on one engine. While the tool runs, the trajectory is moved to the other; step 1
    runs there.

    A move that is asked for with the old revision afterwards is refused. Result: done by prefill,
    tokens as if nothing had happened, the second move failed with REVISION_MISMATCH.
    """
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(scheduler_service(nats_url))
        sidecars: dict[str, Sidecar] = {}
        for engine_id in ("e0", "e1"):
            engine = await stack.enter_async_context(fake_sglang())
            sidecars[engine_id] = await stack.enter_async_context(
                sidecar(nats_url, engine.url, engine_id, scheduler=scheduler.address)
            )
        moving = MigratorSettings(nats_url=nats_url, listen=LISTEN, scheduler=scheduler.address)
        migrator = await stack.enter_async_context(serving(moving, wire))
        calls = MigratorCalls(
            await stack.enter_async_context(grpc.aio.insecure_channel(migrator.address))
        )

        await scheduler.until_registered(len(sidecars))
        await scheduler.open("t", prompt_tokens=len(PROMPT))
        context = list(PROMPT)
        source = await take_step(scheduler, sidecars, 0, context)
        (target,) = set(sidecars) - {source}

        async def until_idle() -> (
            scheduler_pb2.Trajectory
        ):  # the scheduler has heard that the step is over
            return await until_said(
                lambda: scheduler.trajectory("t"),
                lambda said: said.state == scheduler_pb2.TRAJECTORY_STATE_IDLE,
            )

        request = pb.StartMigrationRequest(
            request_id="move-0",
            trajectory_id="t",
            source=pb.Endpoint(engine_id=source, address=sidecars[source].address),
            target=pb.Endpoint(engine_id=target, address=sidecars[target].address),
            expected_revision=(await until_idle()).revision,
            remaining_tokens=100.0,
            cache_salt="default",
            allow_prefill=True,
        )
        done = await calls.moved(request)
        assert (done.state, done.failure_reason) == (pb.MIGRATION_STATE_DONE, "")
        assert (done.path, done.prefix_tokens) == (
            pb.MIGRATION_PATH_PREFILL,
            len(PROMPT) + NEW_TOKENS,
        )
        assert (await scheduler.trajectory("t")).engine_id == target
        assert await take_step(scheduler, sidecars, 1, context) == target
        assert context[len(PROMPT) :] == expected(PROMPT, 2 * NEW_TOKENS)
        await until_idle()
        request.request_id = "move-1"
        request.source.CopyFrom(pb.Endpoint(engine_id=target, address=sidecars[target].address))
        request.target.CopyFrom(pb.Endpoint(engine_id=source, address=sidecars[source].address))
        refused = await calls.moved(request)
        assert (refused.state, refused.failure_reason) == (
            pb.MIGRATION_STATE_FAILED,
            "REVISION_MISMATCH",
        )
        assert (await scheduler.trajectory("t")).engine_id == target
