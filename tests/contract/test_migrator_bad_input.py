"""Bad input to every RPC of MigratorService: the right code, naming the field or the reason."""

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from support.conditions import until
from support.fake_migration_peers import CALL_S, fake_mesh, migrator
from support.rpc import refusal_of
from treadle.migrator.v1 import migrator_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
E0 = pb.Endpoint(engine_id="e0", address="127.0.0.1:7410")


async def test_a_bad_field_of_a_request_is_named(nats_url: str) -> None:
    bad_moves: list[tuple[dict[str, Any], str]] = [
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
    ]
    bad_lists: list[tuple[dict[str, Any], str]] = [
        ({"page_size": -1}, "page_size"),
        ({"page_size": 1001}, "page_size"),
        ({"page_token": "not a token"}, "page_token"),
        ({"page_token": "bm90IGEgbnVtYmVy"}, "page_token"),
        ({"trajectory_id": "a b"}, "trajectory_id"),
    ]
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as calls:
        for fields, field in bad_moves:
            error = await refusal_of(calls.start(mesh.request("t", "e0", "e1", **fields)))
            assert (error.code, error.fields) == (INVALID, (field,)), fields
        for fields, field in bad_lists:
            error = await refusal_of(
                calls.stub.ListMigrations(pb.ListMigrationsRequest(**fields), timeout=CALL_S)
            )
            assert (error.code, error.fields) == (INVALID, (field,)), fields


async def test_a_trajectory_that_moves_already_is_refused_and_a_repeat_is_answered_alike(
    nats_url: str,
) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as calls:
        mesh.place("t", "e0")
        mesh.sidecars["e1"].gate.close()
        started = await calls.start(mesh.request("t", "e0", "e1"))
        assert await calls.start(mesh.request("t", "e0", "e1")) == started
        await until(lambda: mesh.sidecars["e1"].gate.waiting)
        busy = await refusal_of(calls.start(mesh.request("t", "e0", "e1", request_id="another")))
        reused = await refusal_of(calls.start(mesh.request("u", "e0", "e1", request_id="start-t")))
        nameless = await refusal_of(calls.cancel(started.migration_id, ""))
        mesh.sidecars["e1"].gate.open()
        await calls.ended(started.migration_id)
        assert len(mesh.scheduler.requests("SwitchEngine")) == 1
    assert busy[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "MIGRATION_IN_PROGRESS")
    assert reused.fields == nameless.fields == ("request_id",)


async def test_an_unknown_or_malformed_migration_is_refused(nats_url: str) -> None:
    malformed = (INVALID, "INVALID_ARGUMENT", ("migration_id",))
    unknown = (grpc.StatusCode.NOT_FOUND, "MIGRATION_NOT_FOUND", ())
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as calls:
        for migration_id, said in (("nowhere", unknown), ("", malformed), ("a b", malformed)):
            for call in (calls.get, calls.states, calls.cancel):
                assert (await refusal_of(call(migration_id)))[:3] == said
