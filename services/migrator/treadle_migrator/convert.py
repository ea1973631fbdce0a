"""Convert between the messages of the contract and this service's values, and check those of a
request."""

import uuid

from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.telemetry.v1.facts_pb2 import Fact, MigrationEnded
from treadle_core.transfers import Transfer
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import (
    duration,
    endpoint,
    identifier,
    non_empty,
    non_negative,
    number_of,
    positive,
    require,
    require_duration,
    timestamp,
)

from treadle_migrator.migrations import Endpoint, Migration, Move, State

FACT_SOURCE = "migrator"


def migration_id_of(request_id: str) -> str:
    """Return a migration id derived from the request's, not a random one: a repeat of a request
    whose answer was not recorded finds what it started."""
    return f"m-{uuid.uuid5(uuid.NAMESPACE_OID, request_id).hex}"


def move_from(request: pb.StartMigrationRequest, default_give_up_s: float) -> Move:
    """Return the move that the request describes. Raises InvalidArgument naming the field."""
    source, target = (
        _endpoint_from("source", request.source),
        _endpoint_from("target", request.target),
    )
    require(
        source.engine_id != target.engine_id,
        "target.engine_id",
        "must be another engine than source",
    )
    require(
        source.address != target.address, "target.address", "must be another sidecar than source"
    )
    non_negative("expected_revision", request.expected_revision)
    non_negative("remaining_tokens", request.remaining_tokens)
    give_up_after_s = default_give_up_s
    if request.HasField("give_up_after"):
        give_up_after_s = positive(
            "give_up_after", require_duration("give_up_after", request.give_up_after)
        )
    return Move(
        trajectory_id=identifier("trajectory_id", request.trajectory_id),
        source=source,
        target=target,
        expected_revision=request.expected_revision,
        remaining_tokens=request.remaining_tokens,
        cache_salt=non_empty("cache_salt", request.cache_salt),
        allow_prefill=request.allow_prefill,
        give_up_after_s=give_up_after_s,
    )


def _endpoint_from(name: str, message: pb.Endpoint) -> Endpoint:
    engine_id = identifier(f"{name}.engine_id", message.engine_id)
    return Endpoint(engine_id, endpoint(f"{name}.address", message.address))


def transfer_from(migration: Migration) -> Transfer:
    """Return a waiting migration as the transmission scheduler sees it."""
    move = migration.move
    return Transfer(
        transfer_id=migration.migration_id,
        source=move.source.engine_id,
        target=move.target.engine_id,
        remaining_tokens=move.remaining_tokens,
        asked_at_s=migration.created_at_s,
    )


def migration_to(migration: Migration) -> pb.Migration:
    """Return the resource of the contract."""
    move, prefix = migration.move, migration.prefix
    message = pb.Migration(
        migration_id=migration.migration_id,
        trajectory_id=move.trajectory_id,
        source_engine_id=move.source.engine_id,
        target_engine_id=move.target.engine_id,
        state=number_of(migration.state, pb.MigrationState),
        revision=migration.revision,
        failure_reason=migration.failure_reason,
    )
    if prefix is not None:
        message.path = number_of(prefix.path, pb.MigrationPath)
        message.prefix_tokens = prefix.tokens
        message.tokens_from_storage = prefix.from_storage
        message.tokens_prefilled = prefix.prefilled
    message.created_at.CopyFrom(timestamp(migration.created_at_s))
    if migration.started_at_s is not None:
        message.started_at.CopyFrom(timestamp(migration.started_at_s))
    if migration.ended_at_s is not None:
        message.ended_at.CopyFrom(timestamp(migration.ended_at_s))
    return message


def fact_of(migration: Migration) -> Fact:
    """Return the fact of a migration's end. Its id is the migration's, so that a repeat is
    recognised."""
    move, prefix = migration.move, migration.prefix
    ended = MigrationEnded(
        migration_id=migration.migration_id,
        trajectory_id=move.trajectory_id,
        source_engine_id=move.source.engine_id,
        target_engine_id=move.target.engine_id,
        moved=migration.state is State.DONE,
        failure_reason="CANCELLED"
        if migration.state is State.CANCELLED
        else migration.failure_reason,
        prefix_tokens=prefix.tokens if prefix else 0,
        tokens_from_storage=prefix.from_storage if prefix else 0,
    )
    started_at_s = (
        migration.created_at_s if migration.started_at_s is None else migration.started_at_s
    )
    ended_at_s = started_at_s if migration.ended_at_s is None else migration.ended_at_s
    ended.elapsed.CopyFrom(duration(ended_at_s - started_at_s))
    if migration.started_at_s is not None:
        ended.started_at.CopyFrom(timestamp(migration.started_at_s))
    fact = make_fact(FACT_SOURCE, migration_ended=ended)
    fact.fact_id = f"migration-ended-{migration.migration_id}"
    return fact
