"""Moves of trajectories between the engines of a live mesh, asked of the migrator as the scheduler
asks it."""

import uuid
from collections.abc import Mapping, Sequence

from google.protobuf.duration_pb2 import Duration
from treadle import Trajectory
from treadle.engine.v1.engine_pb2 import EngineInfo
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle.scheduler.v1.scheduler_pb2 import RegisteredEngine

CALL_TIMEOUT_S = 60.0


def infos_of(engines: Sequence[RegisteredEngine]) -> dict[str, EngineInfo]:
    """What each engine is, by id."""
    return {str(engine.info.engine_id): engine.info for engine in engines}


async def move_away(
    migrator: "migrator_pb2_grpc.MigratorServiceAsyncStub",
    scheduler: "scheduler_pb2_grpc.SchedulerServiceAsyncStub",
    trajectory: Trajectory,
    infos: Mapping[str, EngineInfo],
) -> migrator_pb2.Migration:
    """Move a trajectory to the other of two engines; returns when the migration has ended. Raises
    ValueError where it failed."""
    asked = scheduler_pb2.GetTrajectoryRequest(trajectory_id=trajectory.trajectory_id)
    owned = (await scheduler.GetTrajectory(asked, timeout=CALL_TIMEOUT_S)).trajectory
    source = infos[owned.engine_id]
    target = next(info for engine_id, info in infos.items() if engine_id != source.engine_id)
    request = migrator_pb2.StartMigrationRequest(
        request_id=uuid.uuid4().hex,
        trajectory_id=trajectory.trajectory_id,
        source=migrator_pb2.Endpoint(engine_id=source.engine_id, address=source.address),
        target=migrator_pb2.Endpoint(engine_id=target.engine_id, address=target.address),
        # above 1 where a plan chose another engine before the first step
        expected_revision=owned.revision,
        cache_salt=source.weight_version,
        allow_prefill=True,
        give_up_after=Duration(seconds=int(CALL_TIMEOUT_S)),
    )
    move = (await migrator.StartMigration(request, timeout=CALL_TIMEOUT_S)).migration
    watch = migrator_pb2.WatchMigrationRequest(migration_id=move.migration_id)
    async for answer in migrator.WatchMigration(watch, timeout=CALL_TIMEOUT_S):
        move = answer.migration  # the stream ends when the move has ended
    if move.state != migrator_pb2.MIGRATION_STATE_DONE:
        raise ValueError(f"a move between two engines failed: {move.failure_reason}")
    return move
