"""HTTPS beside a service: its certificate may change while it serves."""

import asyncio
import shutil
import ssl
from pathlib import Path

import aiohttp
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from treadle.certificates import AUTHORITY, CERTIFICATE, KEY
from treadle_cli.certs import make_certificates
from treadle_cli.mesh.services import GATEWAY_FOLDER
from treadle_runtime.http.web import RENEW_S, bind_http, serve_http


async def test_while_one_of_two_new_files_is_written_the_old_certificate_serves(
    tmp_path: Path,
) -> None:
    old = make_certificates(tmp_path / "old") / GATEWAY_FOLDER
    new = make_certificates(tmp_path / "new") / GATEWAY_FOLDER
    stopping, listener = asyncio.Event(), bind_http("LISTEN", "127.0.0.1:0")
    folder = Path(shutil.copytree(old, tmp_path / "used"))
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/"

    async def connect(authority: Path) -> None:
        """Raises ClientError where this authority has not signed the certificate, or where there is
        none."""
        trust = ssl.create_default_context(cafile=str(authority / AUTHORITY))
        async with (
            aiohttp.ClientSession() as http,
            http.get(url, ssl=trust, server_hostname="gateway.treadle") as response,
        ):
            assert response.status == 404

    async with asyncio.TaskGroup() as group:
        group.create_task(
            serve_http(Starlette(), listener, stopping, tls_folder=str(folder), grace_s=1.0)()
        )
        await connect(old)
        shutil.copy(new / CERTIFICATE, folder / CERTIFICATE)
        await asyncio.sleep(2 * RENEW_S)
        await connect(old)
        shutil.copy(new / KEY, folder / KEY)
        await asyncio.sleep(2 * RENEW_S)
        await connect(new)
        stopping.set()


def test_a_server_that_is_cancelled_again_and_again_lets_its_request_end_and_takes_no_more() -> (
    None
):
    """As where a background task fails while the gateway serves. On uvloop, as services run: a
    server that is cut off there goes on accepting."""

    async def scenario() -> None:
        entered, goes_on = asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Response:
            entered.set()
            await goes_on.wait()
            return PlainTextResponse("done")

        listener = bind_http("LISTEN", "127.0.0.1:0")
        port = listener.getsockname()[1]
        app = Starlette(routes=[Route("/", slow)])
        serving = asyncio.create_task(serve_http(app, listener, asyncio.Event(), grace_s=60.0)())
        async with aiohttp.ClientSession() as http:
            asked = asyncio.ensure_future(http.get(f"http://127.0.0.1:{port}/"))
            await entered.wait()
            for _ in range(3):
                serving.cancel()
                await asyncio.sleep(0.05)
            with pytest.raises(OSError):
                while True:  # until uvicorn sees that it is to end
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    await asyncio.sleep(0.01)
            goes_on.set()
            async with await asked as response:
                assert await response.text() == "done"
        await asyncio.wait({serving})
        assert serving.cancelled()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 60.0))
