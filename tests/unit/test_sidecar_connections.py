"""How long a sidecar keeps a connection to its engine."""

import asyncio

import pytest
from aiohttp import web
from treadle_core.engine_queue.pace import EngineProgress, EngineWork
from treadle_sidecar.engine import client


async def test_a_connection_that_the_engine_is_about_to_close_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang closes a connection after a while without requests; the request that meets it there
    would be lost."""
    monkeypatch.setattr(client, "IDLE_CONNECTION_S", 0.05)
    peers: list[object] = []

    async def abort(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        return web.Response()

    application = web.Application()
    application.add_routes([web.post("/abort_request", abort)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = client.EngineClient(
        f"http://127.0.0.1:{runner.addresses[0][1]}",
        EngineWork(lambda _: None),
        EngineProgress(stall_s=30.0),
    )
    try:
        await engine.abort("a")
        await asyncio.sleep(1.0)
        await engine.abort("b")
    finally:
        await engine.close()
        await runner.cleanup()
    assert len(peers) == len(set(peers)) == 2
