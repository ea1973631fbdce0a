"""Protobuf messages to this service's values and to core's, and back."""

import uuid

from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.telemetry.v1.facts_pb2 import Fact, MigrationEnded
from treadle_core.steps.transfers import Transfer
from treadle_runtime.facts import make_fact

from treadle_migrator.migration import Endpoint, Migration, Move, Path, State

FACT_SOURCE = "migrator"
STATES = {
    State.PENDING: pb.MIGRATION_STATE_PENDING,
    State.PREPARING: pb.MIGRATION_STATE_PREPARING,
    State.SWITCHING: pb.MIGRATION_STATE_SWITCHING,
    State.DONE: pb.MIGRATION_STATE_DONE,
    State.FAILED: pb.MIGRATION_STATE_FAILED,
    State.CANCELLED: pb.MIGRATION_STATE_CANCELLED,
}
PATHS = {Path.STORAGE: pb.MIGRATION_PATH_STORAGE, Path.PREFILL: pb.MIGRATION_PATH_PREFILL}


def migration_id_of(request_id: str) -> str:
    """Derived, not drawn: a repeat of a request whose answer was not recorded finds what it started."""
    return f"m-{uuid.uuid5(uuid.NAMESPACE_OID, request_id).hex}"


def move_from(request: pb.StartMigrationRequest, default_give_up_s: float) -> Move:
    """A checked request."""
    asked_s = request.give_up_after.ToNanoseconds() / 1e9 if request.HasField("give_up_after") else default_give_up_s
    return Move(
        trajectory_id=request.trajectory_id,
        source=Endpoint(request.source.engine_id, request.source.address),
        target=Endpoint(request.target.engine_id, request.target.address),
        expected_revision=request.expected_revision,
        remaining_tokens=request.remaining_tokens,
        cache_salt=request.cache_salt,
        allow_prefill=request.allow_prefill,
        give_up_after_s=asked_s,
    )


def transfer_from(migration: Migration) -> Transfer:
    """A waiting migration as the transmission scheduler sees it."""
    move = migration.move
    return Transfer(
        transfer_id=migration.migration_id,
        source=move.source.engine_id,
        target=move.target.engine_id,
        remaining_tokens=move.remaining_tokens,
        asked_at_s=migration.created_at_s,
    )


def migration_to(migration: Migration) -> pb.Migration:
    """The resource as it stands."""
    move, prefix = migration.move, migration.prefix
    message = pb.Migration(
        migration_id=migration.migration_id,
        trajectory_id=move.trajectory_id,
        source_engine_id=move.source.engine_id,
        target_engine_id=move.target.engine_id,
        state=STATES[migration.state],
        revision=migration.revision,
        failure_reason=migration.failure_reason,
    )
    if prefix is not None:
        message.path = PATHS[prefix.path]
        message.prefix_tokens = prefix.tokens
        message.tokens_from_storage = prefix.from_storage
        message.tokens_prefilled = prefix.prefilled
    message.created_at.FromNanoseconds(_nanoseconds(migration.created_at_s))
    if migration.started_at_s is not None:
        message.started_at.FromNanoseconds(_nanoseconds(migration.started_at_s))
    if migration.ended_at_s is not None:
        message.ended_at.FromNanoseconds(_nanoseconds(migration.ended_at_s))
    return message


def fact_of(migration: Migration) -> Fact:
    """The fact of a migration's end. Its id is the migration's, so that one published twice is heard once."""
    move, prefix = migration.move, migration.prefix
    ended = MigrationEnded(
        migration_id=migration.migration_id,
        trajectory_id=move.trajectory_id,
        source_engine_id=move.source.engine_id,
        target_engine_id=move.target.engine_id,
        moved=migration.state is State.DONE,
        failure_reason="CANCELLED" if migration.state is State.CANCELLED else migration.failure_reason,
        prefix_tokens=prefix.tokens if prefix else 0,
        tokens_from_storage=prefix.from_storage if prefix else 0,
    )
    started_at_s = migration.created_at_s if migration.started_at_s is None else migration.started_at_s
    ended_at_s = started_at_s if migration.ended_at_s is None else migration.ended_at_s
    ended.elapsed.FromNanoseconds(max(0, _nanoseconds(ended_at_s) - _nanoseconds(started_at_s)))
    if migration.started_at_s is not None:
        ended.started_at.FromNanoseconds(_nanoseconds(migration.started_at_s))
    fact = make_fact(FACT_SOURCE, migration_ended=ended)
    fact.fact_id = f"migration-ended-{migration.migration_id}"
    return fact


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
