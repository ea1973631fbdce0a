"""Bad input to every RPC of MigratorService: the right code, naming the field or the reason."""

from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from support.conditions import until
from support.fake_migration_peers import CALL_S, fake_mesh, migrator
from support.rpc import error_of
from treadle.migrator.v1 import migrator_pb2 as pb

E0 = pb.Endpoint(engine_id="e0", address="127.0.0.1:7410")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"trajectory_id": ""}, "trajectory_id"),
        ({"source": pb.Endpoint(engine_id="", address="127.0.0.1:1")}, "source.engine_id"),
        ({"source": pb.Endpoint(engine_id="e9", address="127.0.0.1")}, "source.address"),
        ({"target": pb.Endpoint(engine_id="e9", address="")}, "target.address"),
        ({"target": pb.Endpoint(engine_id="e9", address="host:0")}, "target.address"),
        ({"target": E0}, "target.engine_id"),
        (
            {"source": E0, "target": pb.Endpoint(engine_id="e1", address="127.0.0.1:7410")},
            "target.address",
        ),
        ({"expected_revision": -1}, "expected_revision"),
        ({"remaining_tokens": -1.0}, "remaining_tokens"),
        ({"remaining_tokens": float("nan")}, "remaining_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"give_up_after": Duration()}, "give_up_after"),
        ({"give_up_after": Duration(seconds=-1)}, "give_up_after"),
    ],
)
async def test_start_migration_names_the_bad_field(nats_url: str, fields: dict[str, Any], field: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.start(mesh.request("t", "e0", "e1", **fields))
    error = error_of(refused.value)
    assert (error.code, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))


async def test_start_migration_refuses_a_trajectory_that_moves_already(nats_url: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        mesh.place("t", "e0")
        mesh.sidecars["e1"].gate.close()
        await calls.start(mesh.request("t", "e0", "e1"))
        await until(lambda: mesh.sidecars["e1"].gate.waiting)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.start(mesh.request("t", "e0", "e1", request_id="another"))
        with pytest.raises(grpc.aio.AioRpcError) as reused:
            await calls.start(mesh.request("u", "e0", "e1", request_id="start-t"))
        mesh.sidecars["e1"].gate.open()
    assert error_of(refused.value)[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "MIGRATION_IN_PROGRESS")
    assert error_of(reused.value).fields == ("request_id",)


@pytest.mark.parametrize(
    ("migration_id", "code", "reason", "fields"),
    [
        ("nowhere", grpc.StatusCode.NOT_FOUND, "MIGRATION_NOT_FOUND", ()),
        ("", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", ("migration_id",)),
        ("a b", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", ("migration_id",)),
    ],
)
async def test_get_watch_and_cancel_refuse_an_unknown_or_malformed_migration(
    nats_url: str, migration_id: str, code: grpc.StatusCode, reason: str, fields: tuple[str, ...]
) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        for call in (calls.get, calls.states, calls.cancel):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(migration_id)
            assert error_of(refused.value)[:3] == (code, reason, fields)


async def test_cancel_migration_needs_a_request_id(nats_url: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        mesh.place("t", "e0")
        done = await calls.moved(mesh.request("t", "e0", "e1"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.cancel(done.migration_id, "")
    assert error_of(refused.value).fields == ("request_id",)


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"page_size": -1}, "page_size"),
        ({"page_size": 1001}, "page_size"),
        ({"page_token": "not a token"}, "page_token"),
        ({"page_token": "bm90IGEgbnVtYmVy"}, "page_token"),
        ({"trajectory_id": "a b"}, "trajectory_id"),
    ],
)
async def test_list_migrations_names_the_bad_field(nats_url: str, request_fields: dict[str, Any], field: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.stub.ListMigrations(pb.ListMigrationsRequest(**request_fields), timeout=CALL_S)
    error = error_of(refused.value)
    assert (error.code, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))
