"""NATS goes away in the middle of a move and comes back with its store."""

import pytest
from google.protobuf.duration_pb2 import Duration
from support.conditions import until
from support.fake_migration_peers import fake_mesh, migrator
from support.nats_server import NatsServer
from treadle.migrator.v1 import migrator_pb2 as pb


@pytest.mark.usefixtures("impatient")
async def test_a_move_whose_state_cannot_be_stored_fails_and_the_engines_move_again_afterwards(
    nats_server: NatsServer,
) -> None:
    """NATS dies while the target fetches; the switch may not be sent unless it is stored.

    Result: failed, the source is the owner, the end is stored and told once NATS is back, and the
    next move runs.
    """
    async with fake_mesh() as mesh, migrator(nats_server.url, mesh) as calls:
        mesh.place("t", "e0")
        target = mesh.sidecars["e1"]
        target.gate.close()
        started = await calls.start(
            mesh.request("t", "e0", "e1", give_up_after=Duration(seconds=60))
        )
        await until(lambda: target.gate.waiting)
        nats_server.kill()
        target.gate.open()
        await until(lambda: mesh.sidecars["e0"].requests("ExportPrefix"))
        assert mesh.scheduler.owners["t"] == ("e0", 1)
        await until(lambda: target.prefixes)
        nats_server.start()
        ended = await calls.ended(started.migration_id)
        assert ended.state in (pb.MIGRATION_STATE_FAILED, pb.MIGRATION_STATE_DONE)
        moved = ended.state == pb.MIGRATION_STATE_DONE
        assert ended.failure_reason == ("" if moved else "STATE_NOT_STORED")
        assert mesh.scheduler.owners["t"] == (("e1", 2) if moved else ("e0", 1))
        mesh.place("u", "e0")
        assert (await calls.moved(mesh.request("u", "e0", "e1"))).state == pb.MIGRATION_STATE_DONE
