"""How long the control plane takes for what the simulator gives a latency: tickets, predictions, plans, moves.

Measured on the mesh that is compared, before the plays.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from treadle import Client
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.placement.v1 import placement_pb2, placement_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle.scheduler.v1.scheduler_pb2 import RegisteredEngine
from treadle_cli.mesh.mesh import Mesh
from treadle_sim.cluster import Latencies, Link

from treadle_bench.fidelity.live import generate
from treadle_bench.fidelity.trace import HIGHEST_TOKEN_ID
from treadle_bench.samples import Samples

if TYPE_CHECKING:
    from treadle.migrator.v1.migrator_pb2_grpc import MigratorServiceAsyncStub

CALL_TIMEOUT_S = 30.0
PLANS, PLAN_TRAJECTORIES = 9, 32
MOVES, MOVE_CONTEXT, MOVE_TOKENS = 4, 200, 8


@dataclass(frozen=True, slots=True)
class Control:
    """What the simulated control plane is given."""

    latencies: Latencies
    link: Link


async def registered(scheduler: str) -> list[RegisteredEngine]:
    """The engines as the scheduler knows them, by id."""
    async with grpc.aio.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        answer = await stub.ListEngines(scheduler_pb2.ListEnginesRequest(), timeout=CALL_TIMEOUT_S)
    return sorted(answer.engines, key=lambda engine: str(engine.info.engine_id))


async def measure_control(
    mesh: Mesh, client: Client, engines: Sequence[RegisteredEngine], queue_s: Samples, predict_s: Samples
) -> Control:
    """queue_s: of steps that found a slot free. predict_s: from a step's end to the prediction that followed."""
    plan_s = await _plans(mesh.where.services["placement"], engines)
    moves_s = await _moves(mesh, client, engines)
    return Control(
        Latencies(predict_s=predict_s.median, plan_s=plan_s.median, rpc_s=queue_s.median),
        Link(fixed_s=moves_s.median),
    )


async def _plans(placement: str, engines: Sequence[RegisteredEngine]) -> Samples:
    request = placement_pb2.PlanPlacementRequest(
        trajectories=[
            placement_pb2.PlacedTrajectory(
                trajectory_id=f"t{number}", remaining_tokens=50.0 + number, context_tokens=200
            )
            for number in range(PLAN_TRAJECTORIES)
        ],
        engines=[
            placement_pb2.PlacementEngine(
                engine_id=engine.info.engine_id,
                slot_limit=engine.info.slot_limit,
                kv_tokens_capacity=engine.info.kv_tokens_capacity,
                tensor_parallel=engine.info.tensor_parallel,
                decode_curve=engine.info.decode_curve,
            )
            for engine in engines
        ],
        cost_model=placement_pb2.COST_MODEL_LINEAR_INTEGRAL,
    )
    taken_s = Samples()
    async with grpc.aio.insecure_channel(placement) as channel:
        stub = placement_pb2_grpc.PlacementServiceStub(channel)
        for number in range(PLANS + 1):
            begun_s = time.perf_counter()
            await stub.PlanPlacement(request, timeout=CALL_TIMEOUT_S)
            if number > 0:  # the first one compiles
                taken_s.append(time.perf_counter() - begun_s)
    return taken_s


async def _moves(mesh: Mesh, client: Client, engines: Sequence[RegisteredEngine]) -> Samples:
    """Seconds of a move, as the migrator tells; of a context of about MOVE_CONTEXT tokens, between its steps."""
    infos = {engine.info.engine_id: engine.info for engine in engines}
    taken_s = Samples()
    async with grpc.aio.insecure_channel(mesh.where.services["migrator"]) as channel:
        stub = migrator_pb2_grpc.MigratorServiceStub(channel)
        for number in range(MOVES):
            prompt = [(number * MOVE_CONTEXT + at) % HIGHEST_TOKEN_ID for at in range(MOVE_CONTEXT)]
            async with await client.open(prompt_id="move", sample=number, prompt=prompt) as trajectory:
                await generate(trajectory, MOVE_TOKENS)
                source = infos[trajectory.steps[-1].engine_ids[-1]]
                target = next(info for engine_id, info in infos.items() if engine_id != source.engine_id)
                request = migrator_pb2.StartMigrationRequest(
                    request_id=uuid.uuid4().hex,
                    trajectory_id=trajectory.trajectory_id,
                    source=migrator_pb2.Endpoint(engine_id=source.engine_id, address=source.address),
                    target=migrator_pb2.Endpoint(engine_id=target.engine_id, address=target.address),
                    expected_revision=1,
                    cache_salt=source.weight_version,
                    allow_prefill=True,
                    give_up_after=Duration(seconds=int(CALL_TIMEOUT_S)),
                )
                taken_s.append(await _one_move(stub, request))
    return taken_s


async def _one_move(stub: MigratorServiceAsyncStub, request: migrator_pb2.StartMigrationRequest) -> float:
    move = (await stub.StartMigration(request, timeout=CALL_TIMEOUT_S)).migration
    watch = migrator_pb2.WatchMigrationRequest(migration_id=move.migration_id)
    async for answer in stub.WatchMigration(watch, timeout=CALL_TIMEOUT_S):
        move = answer.migration  # the stream ends at a terminal state
    if move.state != migrator_pb2.MIGRATION_STATE_DONE:
        raise ValueError(f"a move between idle engines came to nothing: {move.failure_reason}")
    return float(move.ended_at.ToNanoseconds() - move.started_at.ToNanoseconds()) / 1e9
